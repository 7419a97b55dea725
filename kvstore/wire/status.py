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

ERROR_NAME = "kvstore-error"
"""Trailing metadata that names the error's class, since several share a status code."""

_BY_NAME = {kind.__name__: kind for kind in CODES}


def code_of(error: errors.KVStoreError) -> grpc.StatusCode:
    """The status that tells a client of this error."""
    return CODES.get(type(error), grpc.StatusCode.INTERNAL)


def metadata_of(error: errors.KVStoreError) -> tuple[tuple[str, str], ...]:
    """The trailing metadata that tells a client of this error."""
    return ((ERROR_NAME, type(error).__name__),)


def error_of(call: grpc.RpcError) -> errors.KVStoreError:
    """The error that a failed call stands for.

    Those that gRPC raises by itself have no name: a message that is too large, and everything
    that keeps a call from reaching the server.
    """
    if not isinstance(call, grpc.Call):
        return errors.Unavailable(str(call))
    details = call.details() or str(call)
    named = dict(call.trailing_metadata() or ()).get(ERROR_NAME)
    if named in _BY_NAME:
        return _BY_NAME[named](details)
    if call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return errors.TooMany(details)
    return errors.Unavailable(f"{call.code().name}: {details}")
