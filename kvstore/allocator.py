"""Keeps glibc from returning large buffers to the system at every free.

A gRPC message of a MiB is above glibc's threshold for memory of its own from the system: mapped,
faulted in page by page, and unmapped again for each message, which takes about as long as the
rest of sending it. The price is that up to `KEPT_BYTES` of freed memory stay with the process.

The setting is of the whole process. The server sets it for itself. A library must not do so to
an engine that merely imports it; the client does when it first has to send blocks to another
host, since then large messages are what it does. Whoever has set glibc's allocator in the
environment has decided, and nothing is changed.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform

KEPT_BYTES = 128 << 20
_GROWTH_BYTES = 16 << 20
_MAPPED_BYTES = 32 << 20
"""glibc refuses more, in silence."""

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_DECIDED = ("GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")


@functools.cache
def keep_large_buffers() -> bool:
    """Changes the process's allocator, once; whether it was changed (it is glibc's, and free)."""
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in _DECIDED):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = (
        (_M_MMAP_THRESHOLD, _MAPPED_BYTES),
        (_M_TRIM_THRESHOLD, KEPT_BYTES),
        (_M_TOP_PAD, _GROWTH_BYTES),
    )
    # Each is worth having without the others.
    return bool(sum(mallopt(name, value) for name, value in settings) == len(settings))
