"""The arena's file as clients open it, and headers as bytes."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import slots
from kvstore.errors import ConfigError
from kvstore.slots import SlotHeader
from kvstore.types import BlockKey

SIZE = 8 * slots.PAGE_BYTES


@pytest.fixture
def path() -> Iterator[Path]:
    made = Path(f"/dev/shm/kvstore-slots-{os.getpid()}.arena")
    mapping, fd = slots.create_mapping(made, SIZE, epoch=77)
    yield made
    mapping.close()
    os.close(fd)
    made.unlink(missing_ok=True)


def test_only_the_servers_user_can_open_the_file(path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_size == SIZE


def test_the_right_epoch_and_size_map_the_same_memory(path: Path) -> None:
    one = slots.open_mapping(path, SIZE, 77)
    other = slots.open_mapping(path, SIZE, 77)
    assert one is not None
    assert other is not None
    one[5000] = 42
    assert other[5000] == 42
    one.close()
    other.close()


@pytest.mark.parametrize(
    ("size", "epoch"),
    [(SIZE, 78), (SIZE - slots.PAGE_BYTES, 77), (SIZE + slots.PAGE_BYTES, 77), (0, 77), (16, 77)],
)
def test_another_epoch_or_size_is_not_mapped(path: Path, size: int, epoch: int) -> None:
    assert slots.open_mapping(path, size, epoch) is None


def test_a_missing_file_a_folder_and_a_symlink_are_not_mapped(path: Path, tmp_path: Path) -> None:
    assert slots.open_mapping(tmp_path / "missing", SIZE, 77) is None
    assert slots.open_mapping(tmp_path, SIZE, 77) is None
    link = tmp_path / "link"
    link.symlink_to(path)
    assert slots.open_mapping(link, SIZE, 77) is None


def test_a_file_that_is_not_an_arena_is_not_mapped(tmp_path: Path) -> None:
    file = tmp_path / "other"
    file.write_bytes(bytes(SIZE))
    assert slots.open_mapping(file, SIZE, 0) is None


def test_a_file_that_exists_is_refused_and_stays(tmp_path: Path) -> None:
    file = tmp_path / "there.arena"
    file.write_bytes(b"precious")
    with pytest.raises(ConfigError, match=r"there\.arena"):
        slots.create_mapping(file, SIZE, 1)
    assert file.read_bytes() == b"precious"


def test_a_size_that_the_mount_cannot_hold_is_refused_and_leaves_no_file() -> None:
    path = Path(f"/dev/shm/kvstore-huge-{os.getpid()}.arena")
    with pytest.raises(ConfigError, match="can't hold"):
        slots.create_mapping(path, 1 << 50, 1)
    assert not path.exists()


@given(st.integers(1, 1 << 40))
def test_a_slot_has_room_for_its_header_and_payload_and_is_aligned(payload_bytes: int) -> None:
    size = slots.slot_bytes(payload_bytes)
    assert size % slots.ALIGNMENT_BYTES == 0
    assert 0 <= size - slots.HEADER_BYTES - payload_bytes < slots.ALIGNMENT_BYTES


@given(
    st.builds(
        SlotHeader,
        st.integers(0, 2**64 - 1),
        st.binary(min_size=32, max_size=32).map(BlockKey),
        st.integers(0, 2**63),
        st.none() | st.integers(0, 2**64 - 1),
    )
)
def test_a_header_reads_back_as_it_was_written_and_touches_nothing_else(
    header: SlotHeader,
) -> None:
    arena = memoryview(bytearray(b"\xaa" * 256))
    slots.write_header(arena, 64, header)
    assert slots.read_header(arena, 64) == header
    assert slots.read_generation(arena, 64) == header.generation
    assert bytes(arena[:64]) == b"\xaa" * 64
    assert bytes(arena[128:]) == b"\xaa" * 128


def test_a_checksum_is_added_without_a_change_to_the_rest() -> None:
    arena = memoryview(bytearray(128))
    header = SlotHeader(6, BlockKey(b"k" * 32), 60, None)
    slots.write_header(arena, 0, header)
    slots.write_checksum(arena, 0, 2**64 - 1)
    assert slots.read_header(arena, 0) == header._replace(checksum=2**64 - 1)
