"""The server's side of the arena: slabs, slots, and exact accounting (D2).

One mapping is cut into equal slabs. A slab serves slots of one size at a time and returns to
the pool when its last slot is freed. Invariants: no two live slots overlap; a slot lies within
one slab; bytes in slabs never exceed the limit. Knows nothing of which block matters more:
when there is no room, `allocate` says so and the caller evicts.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from dataclasses import dataclass, field
from pathlib import Path

from kvstore import slots
from kvstore.errors import ConfigError, InvalidRequest
from kvstore.slots import SlotHeader
from kvstore.types import BlockKey

SLAB_BYTES_MIN = 4 << 20
SLAB_BYTES_MAX = 1 << 30


def default_slab_bytes(arena_bytes: int) -> int:
    """A 64th of the arena, so that several block sizes can live side by side; 4 MiB to 1 GiB."""
    slab = min(max(arena_bytes // 64, SLAB_BYTES_MIN), SLAB_BYTES_MAX)
    return slab // slots.PAGE_BYTES * slots.PAGE_BYTES


@dataclass(slots=True)
class _Slab:
    """A run of equal slots. `fresh` counts those handed out at least once."""

    payload_bytes: int
    stride_bytes: int
    slot_count: int
    fresh: int = 0
    free: list[int] = field(default_factory=list)

    @property
    def used(self) -> int:
        return self.fresh - len(self.free)

    @property
    def full(self) -> bool:
        return self.used == self.slot_count


class Arena:
    """Slots in one shared mapping. Not thread-safe, but for the payloads themselves.

    The file is removed by `close`; one that a killed server left is removed by the next start
    in the same folder (`remove_stale`), told by the lock that a living server holds.
    """

    def __init__(self, path: Path, capacity_bytes: int, epoch: int, slab_bytes: int = 0):
        """Takes `capacity_bytes` of memory at once.

        Raises:
            ConfigError: the host can't hold that much, or it is too little for one slab.
        """
        self.slab_bytes = slab_bytes or default_slab_bytes(capacity_bytes)
        slab_count = (capacity_bytes - slots.PAGE_BYTES) // self.slab_bytes
        if slab_count < 1:
            raise ConfigError(
                f"a CPU tier of {capacity_bytes} bytes is smaller than one slab of "
                f"{self.slab_bytes} bytes; give it at least {self.slab_bytes + slots.PAGE_BYTES}"
            )
        self.path = path
        self.mapping_bytes = slots.PAGE_BYTES + slab_count * self.slab_bytes
        self.capacity_bytes = slab_count * self.slab_bytes
        self._mapping, self._lock_fd = slots.create_mapping(path, self.mapping_bytes, epoch)
        self._generation = epoch
        self.buffer = memoryview(self._mapping)
        self.used_bytes = 0
        """Payload bytes of live slots."""
        self._slabs: list[_Slab | None] = [None] * slab_count
        self._empty = list(range(slab_count - 1, -1, -1))
        self._partial: dict[int, set[int]] = {}

    def close(self) -> None:
        """Unmaps and removes the file. Clients keep their mappings until they notice."""
        self.path.unlink(missing_ok=True)
        os.close(self._lock_fd)
        self.buffer.release()
        # A worker thread may hold a view still, past the deadline of the shutdown. The process
        # ends soon, and takes the mapping with it.
        with contextlib.suppress(BufferError):
            self._mapping.close()

    @property
    def payload_bytes_max(self) -> int:
        """The largest block that fits a slab."""
        return self.slab_bytes - slots.HEADER_BYTES

    @property
    def empty_slabs(self) -> int:
        """Slabs that serve no size now."""
        return len(self._empty)

    def check_payload_bytes(self, payload_bytes: int) -> None:
        """Raises InvalidRequest when no slab could ever hold such a block."""
        if not 0 < payload_bytes <= self.payload_bytes_max:
            raise InvalidRequest(
                f"a block of {payload_bytes} bytes doesn't fit: this server takes 1 to "
                f"{self.payload_bytes_max} bytes a block (its slabs have {self.slab_bytes}); "
                "use fewer tokens a block or a larger CPU tier"
            )

    def slab_of(self, offset: int) -> int:
        """The number of the slab that the slot at `offset` is in."""
        return (offset - slots.PAGE_BYTES) // self.slab_bytes

    def place_of(self, offset: int) -> tuple[int, int]:
        """The slab of the slot at `offset`, and the slot's number in it."""
        number, within = divmod(offset - slots.PAGE_BYTES, self.slab_bytes)
        slab = self._slabs[number]
        assert slab is not None
        return number, within // slab.stride_bytes

    def in_use(self, number: int) -> bool:
        """Whether a slab serves a size now."""
        return self._slabs[number] is not None

    def slot_count(self, number: int) -> int:
        """How many slots a slab in use has."""
        slab = self._slabs[number]
        assert slab is not None
        return slab.slot_count

    def slabs(self, payload_bytes: int) -> list[int]:
        """The slabs that serve this size now."""
        return [
            number
            for number, slab in enumerate(self._slabs)
            if slab and slab.payload_bytes == payload_bytes
        ]

    def allocate(self, payload_bytes: int) -> int | None:
        """The offset of a free slot, now taken; None when no slab has room.

        The slot's generation is odd; the caller calls `begin` before handing it out.
        """
        partial = self._partial.setdefault(payload_bytes, set())
        if not partial:
            if not self._empty:
                return None
            number = self._empty.pop()
            stride = slots.slot_bytes(payload_bytes)
            self._slabs[number] = _Slab(payload_bytes, stride, self.slab_bytes // stride)
            partial.add(number)
        number = next(iter(partial))
        slab = self._slabs[number]
        assert slab is not None
        if slab.free:
            offset = slab.free.pop()
        else:
            offset = slots.PAGE_BYTES + number * self.slab_bytes + slab.fresh * slab.stride_bytes
            slab.fresh += 1
        if slab.full:
            partial.discard(number)
        self.used_bytes += payload_bytes
        return offset

    def free(self, offset: int) -> None:
        """Gives a slot back. Its generation moves on first, so that readers miss from now on."""
        self._advance(offset, to_even=False)
        number = self.slab_of(offset)
        slab = self._slabs[number]
        assert slab is not None
        assert slab.used > 0
        slab.free.append(offset)
        self.used_bytes -= slab.payload_bytes
        if slab.used == 0:
            self._slabs[number] = None
            self._partial[slab.payload_bytes].discard(number)
            self._empty.append(number)
        else:
            self._partial[slab.payload_bytes].add(number)

    def begin(self, offset: int, key: BlockKey, payload_bytes: int) -> memoryview:
        """Marks a slot as being written, and returns its payload to write to."""
        generation = self._advance(offset, to_even=False)
        slots.write_header(self.buffer, offset, SlotHeader(generation, key, payload_bytes, None))
        return slots.payload(self.buffer, offset, payload_bytes)

    def publish(self, offset: int, checksum: int | None) -> int:
        """Makes a written slot readable; returns the generation that readers must see."""
        if checksum is not None:
            slots.write_checksum(self.buffer, offset, checksum)
        return self._advance(offset, to_even=True)

    def seal(self, offset: int, checksum: int) -> None:
        """Adds the checksum to a readable slot, which stays readable."""
        slots.write_checksum(self.buffer, offset, checksum)

    def _advance(self, offset: int, *, to_even: bool) -> int:
        """Moves the generation on to an even or odd number that no slot had before.

        A counter for each slot would not do: its memory holds other blocks' payload while the
        slab serves another size, so it could start again. And since counting begins at the
        epoch, payload that lies where a header was is no generation by accident.
        """
        self._generation += 2 if (self._generation % 2 == 0) == to_even else 1
        slots.write_generation(self.buffer, offset, self._generation)
        return self._generation


def remove_stale(folder: Path, prefix: str) -> list[Path]:
    """Removes the arena files in `folder` that no living server holds; returns them."""
    removed = []
    for path in folder.glob(f"{prefix}*.arena"):
        try:
            # Without blocking: anyone can put a named pipe there.
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            if os.fstat(fd).st_uid == os.getuid():
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
                removed.append(path)
        except OSError:
            pass  # a living server holds it
        finally:
            os.close(fd)
    return removed
