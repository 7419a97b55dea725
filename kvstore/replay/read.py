"""Trace files in, traces out: finds each file's format by looking at its content."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from kvstore.errors import BadTrace
from kvstore.replay import formats, sessions
from kvstore.replay.formats import Format, Tokenize
from kvstore.replay.lines import Advance, Damage, lines_of
from kvstore.replay.trace import Trace, TraceBuilder

_LOOK_LINES = 8
"""Lines that are looked at to find a format: the first ones may be damaged."""

KNOWN = (
    "Mooncake JSONL, coding-agent session JSON, JSONL of token ids or of text, or a trace that "
    "`kvstore record` wrote; each plain or gzip"
)


@dataclass(frozen=True, slots=True)
class Options:
    """What a trace may not say of itself."""

    block_tokens: int | None = None
    tokenize: Tokenize | None = None
    skip_bad: bool = False


def read(
    paths: Sequence[Path], options: Options = Options(), advance: Advance = lambda size: None
) -> list[Trace]:
    """The traces in these files, in order; sessions make one trace together, the last.

    `advance` hears of bytes read.

    Raises:
        BadTrace: a file can't be read, is of no known format, or has a damaged line.
    """
    traces = []
    damage = Damage(options.skip_bad)
    together = sessions.Sessions(damage)
    for path in paths:
        found = _recognise(path, options)
        if isinstance(found, Format):
            traces.append(_read_lines(path, found, options, advance))
            continue
        together.add(path, found)
        advance(path.stat().st_size)
    gathered = together.build()
    if gathered is not None:
        traces.append(replace(gathered, skipped=damage.skipped))
    for trace in traces:
        if not trace.blocks:
            raise BadTrace(f"{trace.name}: no request has a full block; nothing can be replayed")
    return traces


def _recognise(path: Path, options: Options) -> Format | Any:
    """The format of the file's lines, or the session that it holds."""
    looking = Damage(skip=True)
    for _, line in islice(lines_of(path, looking), _LOOK_LINES):
        try:
            value = formats.parse(line)
        except ValueError:
            continue
        if sessions.is_session(value):
            return value
        try:
            found = formats.recognise(value, options.block_tokens, options.tokenize)
        except ValueError as error:
            raise BadTrace(f"{path}: {error}") from error
        if found is not None:
            return found
    session = sessions.load(path, looking)
    if session is None:
        raise BadTrace(f"{path}: not a trace of a known format: {KNOWN}")
    return session


def _read_lines(path: Path, format_: Format, options: Options, advance: Advance) -> Trace:
    damage = Damage(options.skip_bad)
    builder = TraceBuilder(0)
    for number, line in lines_of(path, damage, advance):
        try:
            request = format_.request(formats.parse(line))
        except ValueError as error:
            damage.note(path, number, str(error))
            continue
        if request is not None:
            builder.add(request)
    builder.block_tokens, builder.block_bytes = format_.block_tokens, format_.block_bytes
    return builder.build(path.name.split(".")[0], damage.skipped)


def tokenizer(name: str) -> Callable[[str], Sequence[int]]:
    """The tokenizer of a folder with a tokenizer.json, of such a file, or of a model's name.

    Raises:
        BadTrace: there is none, or the package that reads it is not installed.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise BadTrace(
            "--tokenizer needs the package tokenizers: pip install tokenizers"
        ) from error
    path = Path(name)
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        made = Tokenizer.from_file(str(file)) if file.exists() else Tokenizer.from_pretrained(name)
    except Exception as error:  # the package raises plain Exceptions
        raise BadTrace(f"--tokenizer {name}: {error}") from error

    def tokenize(text: str) -> Sequence[int]:
        ids: list[int] = made.encode(text).ids
        return ids

    return tokenize
