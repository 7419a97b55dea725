"""A trace in memory: which blocks each request asked for, and when.

Columns rather than objects: 8 bytes a block asked for and 32 a request, whatever the number of
distinct blocks, so that a trace of ten million blocks takes 80 MB. A block is named by a 64-bit
number that stands for it together with all before it, as a block key does.

Knows nothing of files, formats, or of what a store does with the requests.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.types import BlockKey

KEY_BYTES = 16
"""Length of the keys that stand for a trace's blocks: enough to tell them apart."""

_CHUNK_REQUESTS = 1024
"""Requests whose keys are made together."""

Ids = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]


class Request(NamedTuple):
    """One prompt."""

    time_s: float
    """When it came, from the trace's start."""
    prompt_tokens: int
    ids: Iterable[int]
    """Its blocks in order. The last may be partly filled, in traces that name such blocks."""
    output_tokens: int = 0


class RequestKeys(NamedTuple):
    """A request as it is put to an index."""

    time_s: float
    prompt_tokens: int
    output_tokens: int
    keys: list[BlockKey]


@dataclass(frozen=True)
class Trace:
    """Requests in the order of their time."""

    name: str
    block_tokens: int
    times_s: npt.NDArray[np.float64]
    prompt_tokens: Numbers
    output_tokens: Numbers
    starts: Numbers
    """Where each request's blocks begin in `ids`; one more entry for the end."""
    ids: Ids
    block_bytes: int | None = None
    """KV bytes of a block, where the trace says so."""
    skipped: int = 0
    """Damaged lines that were left out."""

    @property
    def requests(self) -> int:
        """How many requests."""
        return len(self.times_s)

    @property
    def blocks(self) -> int:
        """How many blocks were asked for, each time counted."""
        return len(self.ids)

    @cached_property
    def unique_blocks(self) -> int:
        """How many different blocks were asked for."""
        return len(np.unique(self.ids))

    @cached_property
    def lengths(self) -> Numbers:
        """How many blocks each request asked for."""
        return np.diff(self.starts)

    def tokens_of(self, hits: Numbers) -> Numbers:
        """Prompt tokens in the first `hits` blocks of each request."""
        return np.minimum(hits * self.block_tokens, self.prompt_tokens)

    def first_counted(self, warmup: float) -> int:
        """The first request that counts when this share of them only warms the store up."""
        return int(self.requests * warmup)

    def __iter__(self) -> Iterator[RequestKeys]:
        """The requests with their blocks' keys. The same block has the same key each time."""
        step = KEY_BYTES
        for first in range(0, self.requests, _CHUNK_REQUESTS):
            last = min(first + _CHUNK_REQUESTS, self.requests)
            starts = self.starts[first : last + 1]
            raw = _keys(self.ids[starts[0] : starts[-1]])
            edges = ((starts - starts[0]) * step).tolist()
            columns = (self.times_s, self.prompt_tokens, self.output_tokens)
            facts = zip(*(column[first:last].tolist() for column in columns), strict=True)
            for index, (time_s, prompt_tokens, output_tokens) in enumerate(facts):
                edge = range(edges[index], edges[index + 1], step)
                keys = [BlockKey(raw[at : at + step]) for at in edge]
                yield RequestKeys(time_s, prompt_tokens, output_tokens, keys)


def _keys(ids: Ids) -> bytes:
    """The ids scattered evenly over 16 bytes each, as hashes are: sketches need that."""
    words = np.empty((len(ids), 2), np.uint64)
    words[:, 0] = _mixed(ids)
    words[:, 1] = _mixed(ids ^ np.uint64(0x5851F42D4C957F2D))
    return words.tobytes()


def _mixed(ids: Ids) -> Ids:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): a permutation, so none collide."""
    mixed = ids + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


@dataclass
class TraceBuilder:
    """Gathers requests into a trace; they may come in any order of time."""

    block_tokens: int
    block_bytes: int | None = None
    _times_s: array[float] = field(default_factory=lambda: array("d"))
    _prompt_tokens: array[int] = field(default_factory=lambda: array("q"))
    _output_tokens: array[int] = field(default_factory=lambda: array("q"))
    _starts: array[int] = field(default_factory=lambda: array("q", [0]))
    _ids: array[int] = field(default_factory=lambda: array("Q"))

    def __len__(self) -> int:
        return len(self._times_s)

    def add(self, request: Request) -> None:
        """Adds a request."""
        self._ids.extend(request.ids)
        self._starts.append(len(self._ids))
        self._times_s.append(request.time_s)
        self._prompt_tokens.append(request.prompt_tokens)
        self._output_tokens.append(request.output_tokens)

    def build(self, name: str, skipped: int = 0) -> Trace:
        """The trace, its requests in the order of their time, and of their coming within that."""
        times_s = np.frombuffer(self._times_s, np.float64)
        prompt_tokens = np.frombuffer(self._prompt_tokens, np.int64)
        output_tokens = np.frombuffer(self._output_tokens, np.int64)
        starts = np.frombuffer(self._starts, np.int64)
        ids = np.frombuffer(self._ids, np.uint64)
        if np.any(np.diff(times_s) < 0):
            order = np.argsort(times_s, kind="stable")
            ids = np.concatenate([ids[starts[at] : starts[at + 1]] for at in order])
            starts = np.concatenate([[0], np.cumsum(np.diff(starts)[order])])
            times_s, prompt_tokens = times_s[order], prompt_tokens[order]
            output_tokens = output_tokens[order]
        return Trace(
            name,
            self.block_tokens,
            times_s,
            prompt_tokens,
            output_tokens,
            starts,
            ids,
            self.block_bytes,
            skipped,
        )
