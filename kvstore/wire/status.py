"""kvstore's errors to gRPC status codes and back: the one table."""

from __future__ import annotations

import grpc

from kvstore import errors

CODES: dict[type[errors.KVStoreError], grpc.StatusCode] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.UnknownNamespace: grpc.StatusCode.NOT_FOUND,
    errors.UnknownLease: grpc.StatusCode.NOT_FOUND,
    errors.NamespaceConflict: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ChecksumRequired: grpc.StatusCode.FAILED_PRECONDITION,
    errors.TooMany: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.FellBehind: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
}

_UNKNOWN_NAMESPACE = "namespace "


def code_of(error: errors.KVStoreError) -> grpc.StatusCode:
    """The status that tells a client of this error."""
    return CODES.get(type(error), grpc.StatusCode.INTERNAL)


def error_of(call: grpc.RpcError) -> errors.KVStoreError:
    """The error that a failed call stands for."""
    code = call.code() if isinstance(call, grpc.Call) else grpc.StatusCode.UNKNOWN
    details = (call.details() if isinstance(call, grpc.Call) else None) or str(call)
    match code:
        case grpc.StatusCode.INVALID_ARGUMENT:
            return errors.InvalidRequest(details)
        case grpc.StatusCode.NOT_FOUND if details.startswith(_UNKNOWN_NAMESPACE):
            return errors.UnknownNamespace(details)
        case grpc.StatusCode.NOT_FOUND:
            return errors.UnknownLease(details)
        case grpc.StatusCode.FAILED_PRECONDITION:
            return errors.NamespaceConflict(details)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return errors.TooMany(details)
        case _:
            return errors.Unavailable(f"{code.name}: {details}")
