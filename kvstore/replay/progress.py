"""A progress bar for work of very many small steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

_UPDATES_MAX = 1000


@contextmanager
def bar(title: str, steps: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, gone when done. What it yields hears of steps done, as often as it likes."""
    columns = (TextColumn(title), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    every = max(1, steps // _UPDATES_MAX)
    waiting = 0
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(title, total=steps)

        def advance(done: int) -> None:
            nonlocal waiting
            waiting += done
            if waiting >= every:
                shown.advance(task, waiting)
                waiting = 0

        yield advance
