"""What the host can spare, told by a made-up host."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from kvstore import host
from kvstore.errors import ConfigError
from kvstore.host import GIB, available_bytes, choose_arena_bytes


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What /proc and the cgroup say; files not in here don't exist."""
    made: dict[str, str] = {"/proc/meminfo": "MemTotal: 99 kB\nMemAvailable: 16777216 kB\n"}

    def read_text(path: Path) -> str:
        if str(path) not in made:
            raise FileNotFoundError(path)
        return made[str(path)]

    monkeypatch.setattr(Path, "read_text", read_text)
    return made


@pytest.fixture
def mount(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mount with 2 GiB free."""
    stat = SimpleNamespace(f_bavail=2 * GIB // 4096, f_frsize=4096)
    monkeypatch.setattr(host.os, "statvfs", lambda folder: stat)


def test_available_memory_is_what_the_kernel_says(files: dict[str, str]) -> None:
    assert available_bytes() == 16 * GIB


def cgroup(files: dict[str, str], limit: str, used: int, inactive_file: int) -> None:
    base = "/sys/fs/cgroup/memory."
    files[base + "max"] = limit + "\n"
    files[base + "current"] = f"{used}\n"
    files[base + "stat"] = f"anon 5\ninactive_file {inactive_file}\nactive_file 7\n"


def test_a_containers_limit_counts(files: dict[str, str]) -> None:
    cgroup(files, str(8 * GIB), 3 * GIB, 0)
    assert available_bytes() == 5 * GIB


def test_files_that_a_container_has_read_do_not_count_as_used(files: dict[str, str]) -> None:
    cgroup(files, str(8 * GIB), 8 * GIB - 4096, 6 * GIB)
    assert available_bytes() == 6 * GIB + 4096


def test_a_container_without_a_limit_has_the_hosts_memory(files: dict[str, str]) -> None:
    cgroup(files, "max", 3 * GIB, 0)
    assert available_bytes() == 16 * GIB


def test_more_than_the_mount_is_refused_with_what_the_mount_has(
    files: dict[str, str], mount: None, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as raised:
        choose_arena_bytes(3 * GIB, tmp_path)
    message = str(raised.value)
    assert "3.00 GiB" in message
    assert f"{tmp_path} has 2.00 GiB free" in message
    assert "remount" in message


def test_more_than_the_memory_is_refused_with_what_the_host_has(
    files: dict[str, str], mount: None, tmp_path: Path
) -> None:
    files["/proc/meminfo"] = f"MemAvailable: {GIB // 1024} kB\n"
    with pytest.raises(ConfigError, match=r"this host has 1\.00 GiB of memory"):
        choose_arena_bytes(GIB + 1, tmp_path)


def test_what_fits_is_taken_as_asked(files: dict[str, str], mount: None, tmp_path: Path) -> None:
    assert choose_arena_bytes(2 * GIB, tmp_path) == 2 * GIB


def test_unasked_it_is_a_part_of_the_memory_and_never_the_whole_mount(
    files: dict[str, str], mount: None, tmp_path: Path
) -> None:
    assert choose_arena_bytes(None, tmp_path) == 2 * GIB * 3 // 4
    files["/proc/meminfo"] = f"MemAvailable: {4 * GIB // 1024} kB\n"
    assert choose_arena_bytes(None, tmp_path) == GIB


def test_a_mount_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path / "none")):
        choose_arena_bytes(None, tmp_path / "none")
