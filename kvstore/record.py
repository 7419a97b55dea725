"""Writes what a running server is asked for to a trace that `kvstore replay` reads.

    {"kvstore_trace": 1}
    {"namespace": 0, "block_tokens": 256, "block_bytes": 8388608}
    {"time_s": 12.345, "namespace": 0, "keys": "9f3c61d0a2b47e58…"}

A line a request: seconds since the recording began, and the blocks asked for, present or not, as
16 hexadecimal digits each. A block key is a hash of tokens, so who guesses a prompt could find it
by its keys. Therefore each key is hashed again, with a secret that is drawn for this recording
and kept nowhere: equal blocks stay equal within the trace, and mean nothing outside it.

What only an engine knows isn't in it: the tokens after a prompt's last full block, and blocks
that the engine had in its own pool and didn't ask for.
"""

from __future__ import annotations

import gzip
import json
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import IO, cast

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvstore.client.asking import asked
from kvstore.client.store import Store
from kvstore.errors import ConfigError
from kvstore.types import BlockKey, Fingerprint

VERSION = 1
_KEY_BYTES = 8


class Recorder:
    """Turns lookups into the lines of a trace."""

    def __init__(self, secret: bytes):
        self._secret = secret
        self._numbers: dict[Fingerprint, int] = {}

    def knows(self, namespace: Fingerprint) -> bool:
        """Whether the namespace was described."""
        return namespace in self._numbers

    def namespace(self, namespace: Fingerprint, block_tokens: int, block_bytes: int) -> str:
        """The line that describes a namespace. It is numbered, not named."""
        number = self._numbers[namespace] = len(self._numbers)
        return _line(namespace=number, block_tokens=block_tokens, block_bytes=block_bytes)

    def request(self, time_s: float, namespace: Fingerprint, keys: list[BlockKey]) -> str:
        """The line of one request."""
        hidden = b"".join(
            blake2b(key, digest_size=_KEY_BYTES, key=self._secret).digest() for key in keys
        )
        return _line(time_s=round(time_s, 3), namespace=self._numbers[namespace], keys=hidden.hex())


def record(
    store: Store, file: Path, namespace: bytes | None = None, seconds: float | None = None
) -> int:
    """Records until the time is up, or until Ctrl-C; returns how many requests.

    Raises:
        ConfigError: the file can't be written.
        Unavailable, FellBehind: the recording ended early; the file has what came before.
    """
    recorder = Recorder(secrets.token_bytes(32))
    requests = 0
    with _output(file) as out, _status(file) as advance:
        out.write(_line(kvstore_trace=VERSION).encode())
        out.flush()
        began_s = time.monotonic()
        try:
            for lookup in asked(store, namespace, seconds):
                if not recorder.knows(lookup.namespace):
                    tokens, size = _block_of(store, lookup.namespace)
                    out.write(recorder.namespace(lookup.namespace, tokens, size).encode())
                line = recorder.request(time.monotonic() - began_s, *lookup)
                out.write(line.encode())
                requests += 1
                advance.advance(advance.task_ids[0])
        except KeyboardInterrupt:
            pass
    return requests


def _block_of(store: Store, namespace: Fingerprint) -> tuple[int, int]:
    """Tokens and bytes of the namespace's blocks."""
    known = json.loads(store.report())["namespaces"]
    found = next(each for each in known if each["fingerprint"] == namespace.hex())
    return found["block_tokens"], found["block_bytes"]


def _line(**fields: object) -> str:
    return json.dumps(fields, separators=(",", ":")) + "\n"


@contextmanager
def _output(file: Path) -> Iterator[IO[bytes]]:
    try:
        opened = file.open("xb")
    except FileExistsError as error:
        raise ConfigError(f"{file} exists; record to a new file") from error
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    with opened:
        if file.suffix != ".gz":
            yield opened
            return
        with gzip.GzipFile(fileobj=opened, mode="wb") as packed:
            yield cast(IO[bytes], packed)


def _status(file: Path) -> Progress:
    bar = Progress(
        SpinnerColumn(),
        TextColumn("recording to {task.description}: {task.completed:,} requests; Ctrl-C ends it"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    bar.add_task(str(file), total=None)
    return bar
