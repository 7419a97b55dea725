"""Reuse changes nothing but the time: outputs, bytes and what is computed, from each tier."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import kvstore
from engine.admission import Override
from engine.costs import CostModel, DecodeCost, PrefillCost
from engine.hashing import block_keys
from engine.request import Request
from kvstore.testing import ServerProcess
from kvstore.types import MissReason, SkipReason, TierName
from tests.helpers import eventually
from tests.integration.tiny_models import (
    BLOCK,
    Watched,
    prompt,
    tiny_llama,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def store(redis_server: ServerProcess) -> Iterator[kvstore.Store]:
    with kvstore.connect(redis_server.target) as store:
        yield store


def start_cold(path: str, store: kvstore.Store) -> None:
    """Leaves stored blocks where this path reads them."""
    if path == "redis":
        dropped, _ = store.clear(arena_only=True)
        assert dropped


PATHS = {"gpu": TierName.GPU, "cpu": TierName.CPU, "stream": TierName.CPU, "redis": TierName.REDIS}


@pytest.mark.parametrize("path", PATHS)
def test_greedy_answers_from_each_tier_equal_plain_generation(
    path: str, redis_server: ServerProcess
) -> None:
    ids = prompt(300)
    options = {"pool_bytes": 1 << 20 if path == "gpu" else 0, "salt": path}
    with (
        kvstore.connect(redis_server.target, share_memory=path != "stream") as store,
        Watched(tiny_llama(), store, **options) as model,
    ):
        assert store.shares_memory == (path != "stream")
        with model.counting() as cold:
            model.check(ids)
        assert cold.prefilled == 300
        start_cold(path, store)
        with model.counting() as warm:
            model.check(ids)
        assert warm.hits(PATHS[path]) == 256
        assert warm.prefilled == 300 - 256
        assert warm.usage.hit().tokens == 256


def test_an_answer_depends_on_every_block_that_was_loaded(store: kvstore.Store) -> None:
    """The tests here can fail: one wrong block, and the answer is another."""
    ids = prompt(300)
    with Watched(tiny_llama(), store, salt="spoilt") as model:
        right = model.check(ids)
        for spoilt in range(4):
            load = model.cached.session.namespace.load

            def spoil(
                found: Any, sink: Any, *, spoilt: int = spoilt, load: Any = load, **more: Any
            ):
                def other(position: int, view: memoryview) -> None:
                    copy = bytearray(view)
                    if position == spoilt:
                        copy.reverse()
                    sink(position, memoryview(copy))

                return load(found, other, **more)

            model.cached.session.namespace.load = spoil  # type: ignore[method-assign]
            wrong = model.generate(ids)
            model.cached.session.namespace.load = load  # type: ignore[method-assign]
            assert wrong.tolist() != right.tolist(), spoilt


FRESH_PROCESS = """
import json, sys, kvstore
from tests.integration.tiny_models import Watched, prompt, tiny_llama
with kvstore.connect(sys.argv[1]) as store, Watched(tiny_llama(), store, salt="fresh") as model:
    with model.counting() as counted:
        answer = model.generate(prompt(300))
print(json.dumps([answer.tolist(), counted.usage.hit().tokens, counted.usage.stored.blocks]))
"""


def test_a_fresh_process_answers_the_same_from_what_another_one_stored(
    redis_server: ServerProcess, store: kvstore.Store
) -> None:
    with Watched(tiny_llama(), store, salt="fresh") as model:
        answer = model.check(prompt(300))
    done = subprocess.run(
        [sys.executable, "-c", FRESH_PROCESS, redis_server.target],
        cwd=ROOT, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [answer.tolist(), 256, 0]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_loaded_bytes_are_the_stored_ones_and_answers_those_of_a_split_prefill(
    dtype: torch.dtype, path: str, redis_server: ServerProcess
) -> None:
    ids = prompt(200)
    options = {"pool_bytes": 1 << 20 if path == "gpu" else 0, "salt": f"bits {path}"}
    with (
        kvstore.connect(redis_server.target, share_memory=path != "stream") as store,
        Watched(tiny_llama(dtype=dtype), store, **options) as model,
    ):
        stored = model.generate(ids, return_dict_in_generate=True, max_new_tokens=2).cache
        start_cold(path, store)
        seen: list[DynamicCache] = []
        load = model.cached._load

        def spied(*arguments: Any) -> DynamicCache:
            cache = load(*arguments)
            seen.append(DynamicCache([(layer.keys, layer.values) for layer in cache.layers]))
            return cache

        model.cached._load = spied  # type: ignore[method-assign]
        answer = model.generate(ids)
        assert seen[0].get_seq_length() == 192
        for mine, original in zip(seen[0].layers, stored.layers, strict=True):
            assert mine.keys.dtype == dtype
            assert torch.equal(mine.keys, original.keys[:, :, :192])
            assert torch.equal(mine.values, original.values[:, :, :192])

        split = DynamicCache(config=model.model.config)
        with torch.no_grad():
            model.model(ids[:, :192], cache=split, use_cache=True)
        assert answer.tolist() == model.plain(ids, cache=split).tolist()


@pytest.mark.parametrize("pool_bytes", [0, 1 << 20])
@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 128, 129, 192, 193])
def test_a_prompt_of_any_length_loads_its_full_blocks_but_computes_its_last_token(
    tokens: int, pool_bytes: int, store: kvstore.Store
) -> None:
    ids = prompt(tokens, seed=tokens)
    with Watched(tiny_llama(), store, pool_bytes, salt=f"lengths {pool_bytes}") as model:
        with model.counting() as cold:
            model.check(ids)
        assert cold.prefilled == tokens
        assert cold.usage.stored.blocks == (tokens + 7) // BLOCK
        with model.counting() as warm:
            model.check(ids)
        loadable = (tokens - 1) // BLOCK * BLOCK
        assert warm.usage.hit().tokens == loadable
        assert warm.prefilled == tokens - loadable >= 1
        assert warm.usage.stored.blocks == 0
        assert warm.usage.misses[MissReason.TAIL].tokens == tokens - loadable
        assert [columns for _, columns in warm.forwards[1:]] == [1] * 7


def test_one_new_token_needs_one_pass_and_stores_the_prompt(store: kvstore.Store) -> None:
    ids = prompt(129)
    with Watched(tiny_llama(), store, salt="one") as model:
        for prefilled in (129, 1):
            with model.counting() as counted:
                model.check(ids, max_new_tokens=1)
            assert counted.forwards == [(1, prefilled)]


def test_an_answer_that_ends_early_is_stored_up_to_its_end(store: kvstore.Store) -> None:
    ids = prompt(190)
    with Watched(tiny_llama(), store, salt="ends") as model:
        answer = model.plain(ids, max_new_tokens=12)[0, 190:].tolist()
        stop = answer[4]
        end = answer.index(stop)
        for hits in (0, 128):
            with model.counting() as counted:
                output = model.check(ids, max_new_tokens=12, eos_token_id=stop)
            assert output.shape[1] == 190 + end + 1
            assert counted.usage.hit().tokens == hits
            # The KV of the last token is never computed.
            full = (190 + end) // BLOCK
            assert counted.usage.stored.blocks + counted.usage.already_present.blocks == (
                full if not hits else full - 2
            )


def test_the_next_turn_hits_the_blocks_that_were_generated(store: kvstore.Store) -> None:
    with Watched(tiny_llama(), store, salt="turns") as model:
        first = model.check(prompt(100), max_new_tokens=100)
        second = torch.cat([first, prompt(20, seed=1)], dim=1)
        with model.counting() as counted:
            model.check(second)
        assert counted.usage.hit().tokens == 192  # of 199 tokens with KV
        assert counted.prefilled == 220 - 192


def test_a_turn_later_generated_blocks_are_hit_by_default_too(
    store: kvstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers are kept when they come back in a prompt, if prefill is what takes the time."""
    # The tiny model's own times would soon replace the costs that this test is about.
    monkeypatch.setattr(Request, "_learn", lambda *args: None)
    default = {"load": Override.DEFAULT, "keep": Override.DEFAULT}
    with Watched(tiny_llama(), store, salt="default turns") as model:

        def slow_prefill(costs: CostModel) -> CostModel:
            return CostModel(PrefillCost.of(0.0, 0.05, 0.0), DecodeCost.of(1e-4))

        hits = []
        turn = prompt(100)
        for number in range(3):
            model.cached.session.learn(slow_prefill)
            with model.counting() as counted:
                turn = model.check(turn, max_new_tokens=100, **default)
            hits.append(counted.usage.hit().tokens)
            assert counted.prefilled == turn.shape[1] - 100 - hits[-1]
            turn = torch.cat([turn, prompt(20, seed=number)], dim=1)
        assert hits[0] == 0
        assert hits[1] >= BLOCK
        assert hits[2] >= 192


def test_never_loads_or_stores_when_told_so(store: kvstore.Store) -> None:
    ids = prompt(200)
    with Watched(tiny_llama(), store, salt="never") as model:
        with model.counting() as counted:
            model.check(ids, keep=Override.NEVER)
        assert counted.usage.skipped[SkipReason.BY_REQUEST].blocks == 3
        assert counted.usage.stored.blocks == 0
        namespace = model.cached.session.namespace
        keys = block_keys(namespace.info.fingerprint, ids[0].numpy(), BLOCK)
        # What was refused is told to the server in the background.
        eventually(lambda: namespace.lookup(keys, 0).miss_reason is MissReason.REFUSED)
        with model.counting() as counted:
            model.check(ids)
        assert counted.usage.misses[MissReason.REFUSED].blocks == 3
        assert counted.usage.stored.blocks == 3
        with model.counting() as counted:
            model.check(ids, load=Override.NEVER)
        assert counted.prefilled == 200
        assert counted.usage.misses[MissReason.BY_REQUEST].blocks == 3


def test_generating_within_inference_mode_stores_and_loads(store: kvstore.Store) -> None:
    with Watched(tiny_llama(), store, 1 << 20, salt="inference") as model:
        with torch.inference_mode():
            model.check(prompt(200))
        with model.counting() as counted:
            model.check(prompt(200))
        assert counted.hits(TierName.GPU) == 192
        model.cached.session.pool.clear()  # type: ignore[union-attr]
        with torch.inference_mode(), model.counting() as counted:
            model.check(prompt(200))
        assert counted.hits(TierName.CPU) == 192


def test_a_pool_too_small_for_a_prompt_hands_over_to_the_store(store: kvstore.Store) -> None:
    ids = prompt(300)
    with Watched(tiny_llama(), store, 2 * BLOCK * 256, salt="small pool") as model:
        model.check(ids)
        with model.counting() as counted:
            model.check(ids)
        assert counted.hits(TierName.GPU) == 128
        assert counted.hits(TierName.CPU) == 128
        with model.counting() as counted:
            model.check(prompt(300, seed=1))
        assert counted.usage.hit().tokens == 0
        with model.counting() as counted:
            model.check(ids)
        assert counted.usage.hit().tokens == 256
