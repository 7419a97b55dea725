"""The arena as both sides see it: its first page, and the header of each slot.

The server writes headers; clients read them before and after they copy a payload (a sequence
lock): a slot that was reused under a reader is a miss, never another block's bytes (D3). Knows
nothing of who allocates slots or why.

    page 0                     slab 0                               slab 1 ...
    | magic, epoch, sizes |    | header | payload | header | ...    |

A generation is odd while a slot is empty or being written, even and above 0 while it is
readable, and changes whenever either begins, to one that no slot of this arena had before. The
byte order is little-endian, and every payload starts at a multiple of 64 bytes. A generation may
be read torn, byte by byte: each value differs from the one before in at least one byte, and
equality with the expected one needs that byte to be the old one still, so a torn read can only
turn a good read into a miss.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from pathlib import Path
from typing import NamedTuple

from kvstore.errors import ConfigError
from kvstore.types import BlockKey

MAGIC = b"KVSARENA"
FORMAT_VERSION = 1
PAGE_BYTES = 4096
HEADER_BYTES = 64
ALIGNMENT_BYTES = 64

_SUPERBLOCK = struct.Struct("<8sIIQQ")
_HEADER = struct.Struct("<Q32sQQQ")
_GENERATION = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<QQ")
_CHECKSUM_OFFSET = _HEADER.size - _CHECKSUM.size

_CHECKSUM_KNOWN = 1


class SlotHeader(NamedTuple):
    """What a slot says of its payload. `checksum` is None until it has been computed."""

    generation: int
    key: BlockKey
    payload_bytes: int
    checksum: int | None


def slot_bytes(payload_bytes: int) -> int:
    """Bytes that a slot for such a payload takes in the arena, header and padding included."""
    return HEADER_BYTES + -(-payload_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def read_header(arena: memoryview, offset: int) -> SlotHeader:
    """The header of the slot at `offset`."""
    generation, key, payload_bytes, checksum, flags = _HEADER.unpack_from(arena, offset)
    return SlotHeader(
        generation, BlockKey(key), payload_bytes, checksum if flags & _CHECKSUM_KNOWN else None
    )


def read_generation(arena: memoryview, offset: int) -> int:
    """Only the generation of the slot at `offset`."""
    generation: int = _GENERATION.unpack_from(arena, offset)[0]
    return generation


def write_generation(arena: memoryview, offset: int, generation: int) -> None:
    """Overwrites only the generation of the slot at `offset`."""
    _GENERATION.pack_into(arena, offset, generation)


def write_checksum(arena: memoryview, offset: int, checksum: int) -> None:
    """Adds the checksum to the header of the slot at `offset`; readers are not disturbed."""
    _CHECKSUM.pack_into(arena, offset + _CHECKSUM_OFFSET, checksum, _CHECKSUM_KNOWN)


def write_header(arena: memoryview, offset: int, header: SlotHeader) -> None:
    """Overwrites the header of the slot at `offset`."""
    known = header.checksum is not None
    _HEADER.pack_into(
        arena,
        offset,
        header.generation,
        header.key,
        header.payload_bytes,
        header.checksum if header.checksum is not None else 0,
        _CHECKSUM_KNOWN if known else 0,
    )


def payload(arena: memoryview, offset: int, payload_bytes: int) -> memoryview:
    """The payload of the slot at `offset`, in place."""
    start = offset + HEADER_BYTES
    return arena[start : start + payload_bytes]


def create_mapping(path: Path, mapping_bytes: int, epoch: int) -> tuple[mmap.mmap, int]:
    """Creates the file (mode 0600), takes all its memory from the host now, and maps it.

    Returns the mapping, and a descriptor of the file. It holds a shared lock, from before there
    is anything in the file, that tells others that a living server has it; it is the caller's to
    close.

    Taking the memory now, and not at first touch, means that a size which the host can't hold is
    refused at the start, and that no request pays for page faults.

    Raises:
        ConfigError: the file exists, or the mount has no room; nothing is left behind.
    """
    fd = _create_locked(path)
    try:
        os.posix_fallocate(fd, 0, mapping_bytes)
        mapping = mmap.mmap(fd, mapping_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    except OSError as error:
        path.unlink(missing_ok=True)
        os.close(fd)
        raise ConfigError(
            f"can't hold an arena of {mapping_bytes} bytes in {path.parent}: {error.strerror}"
        ) from error
    _SUPERBLOCK.pack_into(mapping, 0, MAGIC, FORMAT_VERSION, 0, epoch, mapping_bytes)
    return mapping, fd


def _create_locked(path: Path) -> int:
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"can't create the arena file {path}: {error.strerror}") from error
        fcntl.flock(fd, fcntl.LOCK_SH)
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)  # another server took it for a stale one, just before the lock


def open_mapping(path: Path, mapping_bytes: int, epoch: int) -> mmap.mmap | None:
    """Maps a server's arena, or returns None when this process can't or mustn't.

    None means: another host, another user, another container, or a file that a server with
    another epoch left behind. The caller then uses streams.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        if os.fstat(fd).st_size != mapping_bytes or mapping_bytes < PAGE_BYTES:
            return None
        if _SUPERBLOCK.unpack(os.pread(fd, _SUPERBLOCK.size, 0)) != (
            MAGIC, FORMAT_VERSION, 0, epoch, mapping_bytes,
        ):  # fmt: skip
            return None
        return mmap.mmap(fd, mapping_bytes, flags=mmap.MAP_SHARED)
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)
