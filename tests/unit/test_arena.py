"""The arena's file: found stale or in use; sizes that can't be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore import slots
from kvstore.arena import (
    SLAB_BYTES_MAX,
    SLAB_BYTES_MIN,
    Arena,
    default_slab_bytes,
    remove_stale,
)
from kvstore.errors import ConfigError, InvalidRequest

SLAB_BYTES = 64 << 10
CAPACITY_BYTES = slots.PAGE_BYTES + 2 * SLAB_BYTES

SERVER = """
import sys
from pathlib import Path
from kvstore.arena import Arena
arena = Arena(Path(sys.argv[1]), {capacity}, 1, {slab})
print("ready", flush=True)
sys.stdin.read()
"""


def server_of(path: Path) -> subprocess.Popen[str]:
    """A process that holds an arena there."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER.format(capacity=CAPACITY_BYTES, slab=SLAB_BYTES), str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_a_killed_servers_file_is_removed_and_a_living_ones_is_not(tmp_path: Path) -> None:
    dead, living = server_of(tmp_path / "kv-dead.arena"), server_of(tmp_path / "kv-living.arena")
    try:
        assert remove_stale(tmp_path, "kv-") == []
        dead.send_signal(signal.SIGKILL)
        dead.wait()
        assert remove_stale(tmp_path, "kv-") == [tmp_path / "kv-dead.arena"]
        assert not (tmp_path / "kv-dead.arena").exists()
        assert (tmp_path / "kv-living.arena").exists()
    finally:
        for process in (dead, living):
            process.kill()
            process.communicate()


def test_only_arena_files_of_the_prefix_are_looked_at(tmp_path: Path) -> None:
    for name in ("kv-1.arena", "kv-1.txt", "other-1.arena"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "target").write_bytes(b"")
    (tmp_path / "kv-link.arena").symlink_to(tmp_path / "target")
    assert remove_stale(tmp_path, "kv-") == [tmp_path / "kv-1.arena"]
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["kv-1.txt", "kv-link.arena", "other-1.arena", "target"]


def test_a_named_pipe_does_not_hold_up_the_start(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "kv-pipe.arena")
    remove_stale(tmp_path, "kv-")


def test_a_file_is_locked_before_its_memory_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else another server that starts meanwhile takes it for a stale one."""
    taken: list[list[Path]] = []

    def fallocate(fd: int, offset: int, size: int) -> None:
        taken.append(remove_stale(tmp_path, "kv-"))
        os.ftruncate(fd, size)

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    arena = Arena(tmp_path / "kv-new.arena", CAPACITY_BYTES, 1, SLAB_BYTES)
    assert taken == [[]]
    assert arena.path.exists()
    arena.close()


def test_close_removes_the_file_and_frees_the_lock(tmp_path: Path) -> None:
    arena = Arena(tmp_path / "kv-a.arena", CAPACITY_BYTES, 1, SLAB_BYTES)
    before = len(os.listdir("/proc/self/fd"))
    arena.close()
    assert not (tmp_path / "kv-a.arena").exists()
    assert len(os.listdir("/proc/self/fd")) < before


def test_close_while_a_thread_still_holds_a_view_does_not_raise(tmp_path: Path) -> None:
    arena = Arena(tmp_path / "kv-a.arena", CAPACITY_BYTES, 1, SLAB_BYTES)
    view = slots.payload(arena.buffer, slots.PAGE_BYTES, 100)
    arena.close()
    view.release()


def test_an_arena_smaller_than_a_slab_is_refused_with_the_least_that_works(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(SLAB_BYTES + slots.PAGE_BYTES)):
        Arena(tmp_path / "kv-a.arena", SLAB_BYTES, 1, SLAB_BYTES)
    Arena(tmp_path / "kv-a.arena", SLAB_BYTES + slots.PAGE_BYTES, 1, SLAB_BYTES).close()


def test_a_start_that_fails_leaves_no_descriptor_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match="No space left"):
        Arena(tmp_path / "kv-a.arena", CAPACITY_BYTES, 1, SLAB_BYTES)
    assert len(os.listdir("/proc/self/fd")) == before
    assert not (tmp_path / "kv-a.arena").exists()


@pytest.mark.parametrize("size", [0, -1, SLAB_BYTES - slots.HEADER_BYTES + 1])
def test_a_block_that_no_slab_could_hold_is_refused(tmp_path: Path, size: int) -> None:
    arena = Arena(tmp_path / "kv-a.arena", CAPACITY_BYTES, 1, SLAB_BYTES)
    with pytest.raises(InvalidRequest, match="doesn't fit"):
        arena.check_payload_bytes(size)
    arena.check_payload_bytes(arena.payload_bytes_max)
    assert arena.allocate(arena.payload_bytes_max) is not None
    arena.close()


@pytest.mark.parametrize("arena_bytes", [1, 4 << 20, 1 << 30, 64 << 30, 1 << 42])
def test_slabs_are_whole_pages_within_bounds(arena_bytes: int) -> None:
    slab = default_slab_bytes(arena_bytes)
    assert slab % slots.PAGE_BYTES == 0
    assert SLAB_BYTES_MIN <= slab <= SLAB_BYTES_MAX
