"""kvstore's errors to gRPC status codes and back: the one table."""

from __future__ import annotations

import grpc

from kvstore import errors
from kvstore.wire._pb import kvstore_pb2 as pb

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


def error_to_wire(error: Exception) -> pb.Error:
    """The same for a call on a session's stream. Whatever isn't kvstore's is a fault of ours."""
    if not isinstance(error, errors.KVStoreError):
        return pb.Error(code=grpc.StatusCode.INTERNAL.value[0], message=repr(error))
    return pb.Error(code=code_of(error).value[0], name=type(error).__name__, message=str(error))


def error_from_wire(error: pb.Error) -> errors.KVStoreError:
    """The error that an answer on a session's stream stands for."""
    return _BY_NAME.get(error.name, errors.Unavailable)(error.message)


def error_of(call: grpc.RpcError | errors.KVStoreError) -> errors.KVStoreError:
    """The error that a failed call stands for.

    Those that gRPC raises by itself have no name: a message that is too large, and everything
    that keeps a call from reaching the server. Calls on a session's stream raise ours.
    """
    if isinstance(call, errors.KVStoreError):
        return call
    if not isinstance(call, grpc.Call):
        return errors.Unavailable(str(call))
    details = call.details() or str(call)
    named = dict(call.trailing_metadata() or ()).get(ERROR_NAME)
    if named in _BY_NAME:
        return _BY_NAME[named](details)
    if call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return errors.TooMany(details)
    return errors.Unavailable(f"{call.code().name}: {details}")
