"""What this host can spare: memory, and room in the shared-memory mount."""

from __future__ import annotations

import os
from pathlib import Path

from kvstore.errors import ConfigError

SPARE_SHARE = 4
"""The CPU tier takes one part in so many of the free memory, unless told otherwise; the embedded
Redis tier at most as much again."""

GIB = 1 << 30


def available_bytes() -> int:
    """Memory that can be taken without swapping, within this process's cgroup."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        stat = dict(
            line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines()
        )
        # Files that were read and are not in use count as used, but make room when it's needed.
        used -= int(stat.get("inactive_file", 0))
        if limit != "max":
            available = min(available, int(limit) - used)
    except (OSError, ValueError):
        pass  # no cgroup v2 here
    return max(available, 0)


def mount_free_bytes(folder: Path) -> int:
    """Free room in the file system of `folder`."""
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize


def choose_arena_bytes(asked_bytes: int | None, folder: Path) -> int:
    """The CPU tier's size: as asked, or what the host can spare.

    Raises:
        ConfigError: the host or the shared-memory mount can't hold it.
    """
    if not folder.is_dir():
        raise ConfigError(f"shm_dir {folder}: no such folder")
    mount_bytes, memory_bytes = mount_free_bytes(folder), available_bytes()
    if asked_bytes is None:
        return min(memory_bytes // SPARE_SHARE, mount_bytes * 3 // 4)
    if asked_bytes > mount_bytes:
        raise ConfigError(
            f"cpu_bytes {asked_bytes / GIB:.2f} GiB doesn't fit: {folder} has "
            f"{mount_bytes / GIB:.2f} GiB free. Give a smaller size, or enlarge the mount "
            f"(mount -o remount,size=… {folder}; in a container, --shm-size)"
        )
    if asked_bytes > memory_bytes:
        raise ConfigError(
            f"cpu_bytes {asked_bytes / GIB:.2f} GiB doesn't fit: this host has "
            f"{memory_bytes / GIB:.2f} GiB of memory available ({folder} would allow "
            f"{mount_bytes / GIB:.2f} GiB). Give a smaller size"
        )
    return asked_bytes
