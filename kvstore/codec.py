"""The header of a block that leaves the host: what it is, and a checksum of it.

A block in Redis is a header of a fixed place and then the payload, so that neither side joins or
splits large values. A header that this version can't read, or that speaks of other bytes than
it came with, makes the block corrupt, never a guess. Knows nothing of Redis.
"""

from __future__ import annotations

import msgpack
import xxhash

from kvstore.types import BlockKey, NamespaceInfo

Payload = bytes | bytearray | memoryview

MAGIC = "kvs"
VERSION = 1
HEADER_BYTES_MAX = 1024


def checksum(payload: Payload) -> int:
    """xxh3-64 of the bytes. Releases the GIL for all but small payloads."""
    return xxhash.xxh3_64_intdigest(payload)


def encode_header(namespace: NamespaceInfo, key: BlockKey, digest: int) -> bytes:
    """The header of a block whose payload has this checksum."""
    fields = [MAGIC, VERSION, namespace.fingerprint, key, namespace.block_bytes, digest]
    packed: bytes = msgpack.packb(fields, use_bin_type=True)
    return packed


def verify(header: bytes, namespace: NamespaceInfo, key: BlockKey, payload: Payload) -> int | None:
    """The payload's checksum, if the header names this namespace and key and the payload is
    what was stored under it; else None.
    """
    if len(header) > HEADER_BYTES_MAX:
        return None
    try:
        fields = msgpack.unpackb(header, raw=False)
    except (ValueError, msgpack.UnpackException):
        return None
    expected = [MAGIC, VERSION, namespace.fingerprint, key, namespace.block_bytes]
    if not isinstance(fields, list) or len(fields) != 6 or fields[:5] != expected:
        return None
    if len(payload) != namespace.block_bytes:
        return None
    digest = checksum(payload)
    return digest if digest == fields[5] else None
