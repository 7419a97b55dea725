"""Get and Put with chunks that are written and read by hand: the same bytes on the wire.

protobuf copies a chunk twice on its way out and once more on its way in. Here a message that is
nothing but a chunk is one `bytes` that is joined from its head and the block's memory, and a view
of what gRPC received. All other messages are protobuf's own. Other clients see no difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import grpc

from kvstore.wire._pb import kvstore_pb2 as pb
from kvstore.wire._pb import kvstore_pb2_grpc as pb_grpc

_SERVICE = "kvstore.v1.KVStore"
_TAG = b"\x12"
"""Field 2, length-delimited: `chunk` in both GetResponse and PutRequest."""

_VARINT_BYTES_MAX = 5

Received = Any
"""A protobuf message, or the memoryview of a chunk."""


def pack(chunk: memoryview) -> bytes:
    """The message of a chunk. The only copy."""
    size = len(chunk)
    head = bytearray(_TAG)
    while size > 0x7F:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    head.append(size)
    return b"".join((head, chunk))


def unpack(message: bytes) -> memoryview | None:
    """A view of the chunk, if the message is one and nothing else."""
    if message[:1] != _TAG:
        return None
    size = 0
    for index, byte in enumerate(message[1 : 1 + _VARINT_BYTES_MAX]):
        size |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            start = index + 2
            return memoryview(message)[start:] if len(message) - start == size else None
    return None


class Streams:
    """Get and Put of a client. What is sent and received is a message, or a packed chunk and a
    view of one."""

    def __init__(self, channel: grpc.Channel):
        self.get: Callable[..., Iterable[Received]] = channel.unary_stream(
            f"/{_SERVICE}/Get", pb.GetRequest.SerializeToString, _get_response
        )
        self.put: Callable[..., pb.PutResponse] = channel.stream_unary(
            f"/{_SERVICE}/Put", _to_wire, pb.PutResponse.FromString
        )


def add_to_server(service: pb_grpc.KVStoreServicer, server: grpc.aio.Server) -> None:
    """Serves the whole service, Get and Put so."""
    handlers = {
        "Get": grpc.unary_stream_rpc_method_handler(
            service.Get, pb.GetRequest.FromString, _to_wire
        ),
        "Put": grpc.stream_unary_rpc_method_handler(
            service.Put, _put_request, pb.PutResponse.SerializeToString
        ),
    }
    # Of generic handlers the first one for a method wins, of registered ones the last one.
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
    pb_grpc.add_KVStoreServicer_to_server(service, server)
    server.add_registered_method_handlers(_SERVICE, handlers)  # type: ignore[attr-defined]


def _to_wire(message: Any) -> bytes:
    # gRPC sends only `bytes`: with a bytearray in a stream the client waits for ever.
    return message if isinstance(message, bytes) else bytes(message.SerializeToString())


def _get_response(message: bytes) -> Received:
    chunk = unpack(message)
    return pb.GetResponse.FromString(message) if chunk is None else chunk


def _put_request(message: bytes) -> Received:
    chunk = unpack(message)
    return pb.PutRequest.FromString(message) if chunk is None else chunk
