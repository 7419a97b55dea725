"""What the tests of wrong requests share: a namespace, its blocks, and the messages of a Put."""

from __future__ import annotations

from typing import Any

import grpc

from kvstore import codec
from kvstore.types import BlockKey
from kvstore.wire._pb import kvstore_pb2 as pb
from tests.integration.support import BLOCK_BYTES, Raw, chain, content, info_of

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND
PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED

INFO = info_of("wrong requests", model="m", tenant="t")
KEYS = chain("wrong requests", 4)
JOINED = b"".join(KEYS)
NEW = chain("never stored", 3)


def header(client: Raw, **changes: Any) -> pb.PutRequest:
    """The first message of a Put of four blocks."""
    fields = {
        "namespace": INFO.fingerprint,
        "keys": JOINED,
        "block_bytes": BLOCK_BYTES,
        "session": client.session,
    }
    return pb.PutRequest(header=pb.PutHeader(**fields | changes))


def body(keys: list[BlockKey]) -> list[pb.PutRequest]:
    """The messages after the header."""
    messages = []
    for key in keys:
        messages.append(pb.PutRequest(chunk=content(key)))
        messages.append(pb.PutRequest(checksum=codec.checksum(content(key))))
    return messages
