"""Lines of trace files, plain or gzip, and what becomes of damaged ones.

Whether a file is compressed is found by looking at it. Knows nothing of formats.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, cast

from kvstore.errors import BadTrace

_GZIP_MAGIC = b"\x1f\x8b"
_ADVANCE_LINES = 256

Advance = Callable[[int], None]
"""Hears of bytes of a file that have been read."""


class Damage:
    """Damaged lines: each is named and ends the reading, or is left out and counted."""

    def __init__(self, skip: bool):
        self.skip = skip
        self.skipped = 0

    def note(self, path: Path, line: int, why: str) -> None:
        """Notes that this line is not used. Raises BadTrace unless such lines are skipped."""
        if not self.skip:
            raise BadTrace(f"{path}:{line}: {why}; --skip-bad leaves such lines out")
        self.skipped += 1


def open_plain(path: Path) -> tuple[IO[bytes], IO[bytes]]:
    """The file's uncompressed content, and the file itself for its position. Raises BadTrace."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise BadTrace(f"{path}: {error.strerror}") from error
    magic = file.read(len(_GZIP_MAGIC))
    file.seek(0)
    if magic == _GZIP_MAGIC:
        return cast(IO[bytes], gzip.GzipFile(fileobj=file)), file
    return file, file


def lines_of(
    path: Path, damage: Damage, advance: Advance = lambda size: None
) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers from 1.

    Raises:
        BadTrace: the file can't be opened, or its compressed data is damaged.
    """
    content, file = open_plain(path)
    number = position = 0
    with file, content:
        while True:
            try:
                line = content.readline()
            except (OSError, EOFError, zlib.error) as error:
                damage.note(path, number + 1, f"the compressed data is damaged ({error})")
                return
            number += 1
            if number % _ADVANCE_LINES == 0 or not line:
                advance(file.tell() - position)
                position = file.tell()
            if not line:
                return
            if not line.isspace():
                yield number, line
