"""The report's sums are those of an engine that was watched from outside."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch

import kvstore
from engine.admission import Override
from kvstore.testing import ServerProcess
from tests.helpers import eventually
from tests.integration.tiny_models import BLOCK, Watched, model_report, padded, prompt, tiny_llama


@pytest.fixture
def store(redis_server: ServerProcess) -> Iterator[kvstore.Store]:
    with kvstore.connect(redis_server.target) as store:
        yield store


def test_the_report_counts_what_the_models_computed_and_what_they_did_not(
    store: kvstore.Store,
) -> None:
    prompts = computed = answered = requests = 0
    engines = [
        Watched(tiny_llama(), store, pool_bytes, name="watched") for pool_bytes in (0, 6 << 14)
    ]
    before = json.loads(store.report())["totals"]
    conversation = prompt(70)
    for turn in range(4):
        for engine in engines:
            for ids, options in (
                (conversation, {}),
                (prompt(150 + turn), {}),
                (prompt(130, seed=turn), {"keep": Override.NEVER}),
                (prompt(150), {"load": Override.NEVER}),
            ):
                with engine.counting() as counted:
                    output = engine.generate(ids, **options)
                prompts += ids.shape[1]
                computed += counted.prefilled
                answered += output.shape[1] - ids.shape[1]
                requests += 1
        if turn == 2:
            store.clear(arena_only=True)
        conversation = torch.cat([conversation, prompt(90, seed=turn)], dim=1)
    report = model_report(store, "watched", requests)
    hits = sum(count["tokens"] for count in report["hits"].values())
    misses = sum(count["tokens"] for count in report["misses"].values())
    assert report["prompt"]["tokens"] == prompts
    assert hits == prompts - computed
    assert misses == computed
    assert report["output_tokens"] == answered
    assert set(report["hits"]) == {"gpu", "cpu", "redis"}
    assert report["token_hit_rate"] == pytest.approx((prompts - computed) / prompts)

    totals = json.loads(store.report())["totals"]
    assert totals["requests"] - before["requests"] == requests
    assert totals["prompt"]["tokens"] - before["prompt"]["tokens"] == prompts
    # What the engines themselves know is the same.
    usages = [engine.cached.session.usage for engine in engines]
    assert sum(usage.hit().tokens for usage in usages) == hits
    assert sum(usage.stored.blocks for usage in usages) == report["stored"]["blocks"]
    assert (
        sum(usage.already_present.blocks for usage in usages)
        == (report["already_present"]["blocks"])
    )
    for engine in engines:
        engine.__exit__()


def test_an_answer_is_counted_to_its_last_token(store: kvstore.Store) -> None:
    with Watched(tiny_llama(), store, name="answers") as model:
        answer = model.plain(prompt(40), max_new_tokens=30)[0, 40:].tolist()
        other = model.plain(prompt(40, 1), max_new_tokens=30)[0, 40:].tolist()
        stop = next(token for token in answer if token not in other)
        model.generate(prompt(40), max_new_tokens=1)
        model.generate(prompt(40), max_new_tokens=30)
        model.generate(padded([prompt(40), prompt(40, 1)]), max_new_tokens=30, eos_token_id=stop)
        report = model_report(store, "answers", 4)
        assert report["output_tokens"] == 1 + 30 + answer.index(stop) + 1 + 30


def test_the_rows_of_a_batch_never_claim_more_than_was_left_out(store: kvstore.Store) -> None:
    rows = [prompt(200), prompt(150, 1), prompt(70, 2)]
    with Watched(tiny_llama(), store, name="rows") as model:
        for _ in range(2):
            with model.counting() as counted:
                model.generate(padded(rows))
        skipped = 200 - counted.prefilled
        assert counted.usage.hit().tokens <= sum(
            max(skipped - (200 - row.shape[1]), 0) for row in rows
        )
        assert counted.usage.hit().tokens > 0
        assert counted.usage.hit().tokens % BLOCK == 0


def test_the_size_of_the_engines_own_pool_is_reported(store: kvstore.Store) -> None:
    with Watched(tiny_llama(), store, 1 << 20, name="pool") as model:
        model.generate(prompt(200))

        def pool() -> tuple[int, int]:
            (tier,) = (t for t in json.loads(store.report())["tiers"] if t["name"] == "gpu")
            return tier["capacity_bytes"], tier["used_bytes"]

        eventually(lambda: pool() == (1 << 20, 3 * model.cached.layout.block_bytes))
