"""Little memory, small steps, many requests, two engines at once: the same answers, no leaks."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

from kvstore.testing import ServerProcess
from scripts.vllm_engine import PAGE_TOKENS

from .conftest import Engine, cached_of, settled_report, tokens_of

PAGES = 33
ROUNDS = 6


def test_two_engines_in_need_of_memory_share_a_server(
    server: ServerProcess, tmp_path: Path
) -> None:
    """Chunked prefill, preemption, vLLM's own prefix cache, and hits in the middle of a block."""
    from . import tiny

    chance = random.Random(1)
    text = [chance.randrange(tiny.VOCABULARY) for _ in range(1200)]
    model = {"model": str(tiny.llama(tmp_path / "llama")), "skip_tokenizer_init": True}
    starts = [0, 0, 0, 300, 300, 600]
    batches = [
        [
            text[start : start + chance.randrange(70, 300)] + text[:3]
            for start in chance.choices(starts, k=8)
        ]
        for _ in range(ROUNDS)
    ]
    settings: dict[str, Any] = {
        **model,
        "max_model_len": 1024,
        "num_gpu_blocks_override": PAGES,
        "max_num_batched_tokens": 192,
        "max_num_seqs": 8,
        "enable_prefix_caching": True,
    }
    with Engine(max_model_len=1024, **model) as plain:
        expected = [tokens_of(plain.generate(*batch, max_tokens=50)) for batch in batches]
    states = []
    with (
        Engine(server.target, **settings) as one,
        Engine(server.target, extra={"load": "always", "store": "always"}, **settings) as other,
    ):
        for batch, answers in zip(batches, expected, strict=True):
            asked = [{"prompt_token_ids": prompt} for prompt in batch]
            for engine in (one, other):
                engine.tell("generate", prompts=asked, max_tokens=50)
            for engine in (one, other):
                assert tokens_of(engine.answer()) == answers
            states.append([engine.ask("state") for engine in (one, other)])
        # A prompt that vLLM has to the middle of a block, and the store for longer.
        prompt = text[900:1200]
        assert tokens_of(one.generate(prompt)) == tokens_of(other.generate(prompt))
        assert other.ask("reset")
        other.generate(prompt[:PAGE_TOKENS], max_tokens=2)
        assert cached_of(other.generate(prompt)) == [256]
        report = settled_report(server, 2 * 8 * ROUNDS + 4)
        gpu = report["tiers"][0]
        assert gpu["name"] == "gpu"
        assert 0 < gpu["used_bytes"] <= gpu["capacity_bytes"]
    for number in range(2):
        last = states[-1][number]
        assert last["preemptions"] > 0
        assert (last["requests"], last["tracked"]) == (0, 0)
        assert last["free_pages"] == PAGES - 1
        # Two connections with two threads each, four that look up, two that load, one that stores.
        assert len(last["threads"]) <= 11, last["threads"]
    totals = report["totals"]
    assert totals["hits"]["gpu"]["tokens"] > 0
    assert totals["hits"]["cpu"]["tokens"] > 0
    counted = [*totals["hits"].values(), *totals["misses"].values()]
    assert sum(one["tokens"] for one in counted) == totals["prompt"]["tokens"]


def test_a_server_that_hangs_holds_neither_memory_nor_requests(
    server: ServerProcess, tmp_path: Path
) -> None:
    """Finished requests wait for their stores; the others go on, and the stores are given up."""
    from . import tiny

    chance = random.Random(3)
    prompts = [[chance.randrange(tiny.VOCABULARY) for _ in range(200)] for _ in range(40)]
    settings: dict[str, Any] = {
        "model": str(tiny.llama(tmp_path / "llama")),
        "skip_tokenizer_init": True,
        "max_model_len": 1024,
    }
    with Engine(**settings) as plain:
        expected = tokens_of(plain.generate(*prompts))
    with Engine(
        server.target,
        extra={"load": "always", "store": "always"},
        num_gpu_blocks_override=PAGES,
        max_num_seqs=4,
        **settings,
    ) as engine:
        assert tokens_of(engine.generate(*prompts[:2])) == expected[:2]
        os.kill(server.pid, signal.SIGSTOP)
        try:
            assert tokens_of(engine.generate(*prompts)) == expected
            state = engine.ask("state")
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert (state["requests"], state["tracked"]) == (0, 0)
        assert state["free_pages"] == PAGES - 1
        skipped = state["skipped"]
        assert skipped["server_down"] > 0
        # The first calls waited for an answer; then the server counted as away.
        assert state["timed_out"] < len(prompts) / 2, skipped
