"""Traces of coding agents: one JSON document a session, several of which make one trace.

    {"block_size": 64, "hash_id_scope": "local",
     "requests": [{"t": 0.0, "in": 71175, "out": 169, "hash_ids": [1, 2]}]}

How they are put together: in the order of the files, each session begins a minute after the one
before, and then goes at its own pace. A session with the very prompts of an earlier
file is left out: the same session recorded twice would count as reuse. Block numbers of different
sessions never mean the same block, unless the scope says "global".
"""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

from kvstore.errors import BadTrace
from kvstore.replay.formats import block_ids, check_length, parse, seconds, whole
from kvstore.replay.lines import Damage, lines_of
from kvstore.replay.trace import Request, Trace, TraceBuilder

START_GAP_S = 60.0
_LOCAL_BITS = 40
"""Bits for a block's number within its session; the rest tell the sessions apart."""


def is_session(value: Any) -> bool:
    """Whether this document is a session."""
    requests = value.get("requests") if isinstance(value, dict) else None
    return isinstance(requests, list) and all(isinstance(each, dict) for each in requests)


def load(path: Path, damage: Damage) -> Any:
    """The session in this file, or None if it is damaged, or no session."""
    text = b"".join(line for _, line in lines_of(path, damage))
    try:
        value = parse(text)
    except ValueError:
        return None
    return value if is_session(value) else None


class Sessions:
    """Gathers sessions into one trace."""

    def __init__(self, damage: Damage):
        self.duplicates = 0
        self._damage = damage
        self._seen: set[bytes] = set()
        self._builder: TraceBuilder | None = None
        self._names: list[str] = []

    def __len__(self) -> int:
        return len(self._names)

    def add(self, path: Path, session: Any) -> None:
        """Adds a session. Raises BadTrace for a damaged one, unless such are skipped."""
        # Times and texts differ between two recordings of one session; its prompts don't.
        prompts = [[each.get("in"), each.get("hash_ids")] for each in session["requests"]]
        digest = sha256(json.dumps(prompts).encode()).digest()
        if digest in self._seen:
            self.duplicates += 1
            return
        self._seen.add(digest)
        try:
            block_tokens = whole(session, "block_size", 1)
        except ValueError as error:
            self._damage.note(path, 1, str(error))
            return
        if self._builder is None:
            self._builder = TraceBuilder(block_tokens)
        if block_tokens != self._builder.block_tokens:
            raise BadTrace(
                f"{path}: blocks of {block_tokens} tokens, but {self._builder.block_tokens} in "
                "the sessions before; replay them apart"
            )
        base = 0 if session.get("hash_id_scope") == "global" else len(self) + 1 << _LOCAL_BITS
        for number, value in enumerate(session["requests"], 1):
            try:
                self._builder.add(self._request(value, base, block_tokens))
            except ValueError as error:
                self._damage.note(path, 1, f"request {number}: {error}")
        self._names.append(path.name.split(".")[0])

    def _request(self, value: Any, base: int, block_tokens: int) -> Request:
        prompt_tokens = whole(value, "in")
        ids = block_ids(value.get("hash_ids"))
        check_length(ids, block_tokens, prompt_tokens, "block_size must be wrong")
        if base and ids and max(ids) >= 1 << _LOCAL_BITS:
            raise ValueError(f"hash_ids: a local number has more than {_LOCAL_BITS} bits")
        time_s = seconds(value, "t") + START_GAP_S * len(self)
        output_tokens = whole(value, "out") if "out" in value else 0
        return Request(time_s, prompt_tokens, [base + one for one in ids], output_tokens)

    def build(self) -> Trace | None:
        """The trace of all sessions; None if there were none."""
        if self._builder is None:
            return None
        name = self._names[0] if self._names else "sessions"
        if len(self) > 1:
            name += f" and {len(self) - 1} more sessions"
        return self._builder.build(name)
