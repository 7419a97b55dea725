"""How much a full hit in the CPU tier takes beyond what it must: the copy, and one token's forward.

See --help.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import kvstore
from engine.admission import Override
from engine.plugins.transformers import CachedModel
from engine.plugins.transformers.support import CACHE_ARGUMENT
from kvstore.testing import ServerProcess
from scripts import model
from scripts.bench import common
from scripts.scenarios import HANDBOOK

HELP = """\
A real small model answers prompts of which all but the last token is in the CPU tier, without a
pool of its own, with one token. Beside it, in turns: a plain copy of as many bytes, and the same
call of the model with a cache that is there already.

JSON: rows[] have prompt_tokens, copied_mb, ttft_ms, copy_ms, forward_ms, ratio: of the time to
first token to copy and forward together. Medians over rounds.
"""

PROMPT_BLOCKS = (4, 8, 16, 32)


def measure(cached: CachedModel, ids: list[int], rounds: int) -> dict[str, Any]:
    """One row: a prompt of whole blocks and one token."""
    net, tokens = cached.model, torch.tensor([ids])
    mask = torch.ones_like(tokens)
    cached.generate(tokens, mask, max_new_tokens=1, do_sample=False, keep=Override.ALWAYS)
    cached.session.flush()
    size_bytes = (len(ids) - 1) // cached.layout.block_tokens * cached.layout.block_bytes
    source, target = (np.ones(size_bytes, np.uint8) for _ in range(2))
    ready = DynamicCache(config=net.config)
    with torch.no_grad():
        net(tokens[:, :-1], **{CACHE_ARGUMENT: ready})

    def forward() -> None:
        net.generate(
            tokens,
            attention_mask=mask,
            max_new_tokens=1,
            do_sample=False,
            **{CACHE_ARGUMENT: ready},
        )
        ready.crop(-1)

    def hit() -> None:
        cached.generate(
            tokens,
            mask,
            max_new_tokens=1,
            do_sample=False,
            load=Override.ALWAYS,
            keep=Override.NEVER,
        )

    cases = {"ttft": hit, "copy": lambda: np.copyto(target, source), "forward": forward}
    times = common.interleaved({name: _timed(case) for name, case in cases.items()}, rounds)
    hits = sum(hit.tokens for hit in cached.session.usage.hits.values())
    assert hits >= rounds * (len(ids) - 1), "the prompt was not loaded"
    ttft, copy, run = (statistics.median(times[name]) for name in cases)
    return {
        "prompt_tokens": len(ids),
        "copied_mb": size_bytes / 1e6,
        "ttft_ms": ttft * 1e3,
        "copy_ms": copy * 1e3,
        "forward_ms": run * 1e3,
        "ratio": ttft / (copy + run),
    }


def _timed(case: Callable[[], None]) -> Callable[[], float]:
    def run() -> float:
        started_s = time.perf_counter()
        case()
        return time.perf_counter() - started_s

    return run


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    """All rows."""
    table = common.table(
        "time to first token on a full hit in the CPU tier, ms",
        ("prompt tokens", "copied, MB", "first token", "copy", "forward", "ratio"),
    )
    for row in rows:
        table.add_row(
            f"{row['prompt_tokens']:,}",
            *(f"{row[name]:.1f}" for name in ("copied_mb", "ttft_ms", "copy_ms", "forward_ms")),
            f"{row['ratio']:.2f}",
        )
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    options = common.parser(__doc__.splitlines()[0], HELP).parse_args(arguments)
    folder = str(model.prepare("float32"))
    net: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    text = tokenizer(HANDBOOK.read_text(encoding="utf-8")).input_ids
    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="kvf") as state,
        ServerProcess(Path(state), "--no-redis", cpu_bytes="512MiB") as server,
        kvstore.connect(server.target) as store,
        CachedModel(net, store=store, pool_bytes=0) as cached,
    ):
        sizes = PROMPT_BLOCKS[: 1 if options.quick else None]
        with common.progress("first token", len(sizes)) as advance:
            for blocks in sizes:
                ids = (text * 2)[: blocks * cached.layout.block_tokens + 1]
                rows.append(measure(cached, ids, 3 if options.quick else 15))
                advance(f"{len(ids)} tokens")
    document = {**common.circumstances(), "rows": rows}
    common.publish(document, [table_of(rows)], options.json)


if __name__ == "__main__":
    main()
