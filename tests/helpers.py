"""What tests of all kinds share."""

from __future__ import annotations

import time
from collections.abc import Callable

DEADLINE_S = 20.0


def eventually(condition: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
    """Waits until the condition is true; fails when it isn't by the deadline."""
    give_up_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < give_up_s, f"{condition} was not true within {deadline_s} s"
        time.sleep(0.02)
