"""Batches: rows padded on the left, each with its own hits, in one cache of one length."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import GenerationConfig

import kvstore
from kvstore.testing import ServerProcess
from kvstore.types import MissReason
from tests.integration.tiny_models import ALWAYS, BLOCK, Watched, padded, prompt, tiny_llama


@pytest.fixture
def store(redis_server: ServerProcess) -> Iterator[kvstore.Store]:
    with kvstore.connect(redis_server.target) as store:
        yield store


POOLS = pytest.mark.parametrize("pool_bytes", [0, 4 << 20], ids=["store", "pool"])


@POOLS
@pytest.mark.parametrize(
    ("known", "lengths", "prefilled"),
    [
        pytest.param([200, 200], [200, 200], 8, id="both rows, one length"),
        pytest.param([200, 150], [200, 150], 200 - (50 + 128), id="both rows, two lengths"),
        pytest.param([100, 300], [100, 300], 300 - 256, id="the short row's padding is loaded too"),
        pytest.param([300, 0], [300, 200], 200, id="the padded row is missing"),
        pytest.param([0, 200], [300, 200], 300, id="the longest row is missing"),
        pytest.param([200, 0], [200, 200], 200, id="of two alike, the second is missing"),
        pytest.param([0, 200], [200, 200], 200, id="of two alike, the first is missing"),
        pytest.param([0, 0], [200, 130], 200, id="all rows are missing"),
        pytest.param([300, 3, 0], [300, 3, 290], 300, id="a row shorter than a block"),
        pytest.param([130, 200, 64, 90], [140, 260, 200, 90], 260 - 124, id="all different"),
        pytest.param([1, 65], [1, 65], 1, id="a row of one token"),
    ],
)
def test_a_batch_answers_as_without_reuse_whatever_its_rows_hit(
    known: list[int],
    lengths: list[int],
    prefilled: int,
    pool_bytes: int,
    store: kvstore.Store,
    request: pytest.FixtureRequest,
) -> None:
    with Watched(tiny_llama(), store, pool_bytes, salt=request.node.name) as model:
        for index, tokens in enumerate(known):
            if tokens:
                model.generate(prompt(max(lengths), index)[:, :tokens], max_new_tokens=1)
        rows = [prompt(max(lengths), index)[:, :tokens] for index, tokens in enumerate(lengths)]
        with model.counting() as counted:
            model.check(padded(rows))
        assert counted.prefilled == prefilled
        assert counted.usage.requests == len(rows)
        assert counted.usage.prompt.tokens == sum(lengths)
        assert counted.usage.hit().tokens + counted.usage.missed().tokens == sum(lengths)
        assert counted.usage.hit().tokens <= sum(max(tokens - prefilled, 0) for tokens in lengths)
        with model.counting() as counted:
            model.check(padded(rows))
        columns = min(max(lengths) - tokens + (tokens - 1) // BLOCK * BLOCK for tokens in lengths)
        assert counted.prefilled == max(lengths) - columns


@POOLS
def test_the_same_prompt_twice_in_a_batch_is_stored_once(
    pool_bytes: int, store: kvstore.Store
) -> None:
    rows = [prompt(200), prompt(150, 1), prompt(200)]
    with Watched(tiny_llama(), store, pool_bytes, salt=f"twice {pool_bytes}") as model:
        with model.counting() as counted:
            model.check(padded(rows))
        assert counted.usage.stored.blocks == 3 + 2
        assert counted.usage.already_present.blocks == 3
        with model.counting() as counted:
            model.check(padded(rows))
        assert counted.prefilled == 200 - (50 + 128)


def test_a_row_missing_beside_one_that_hits_says_why_nothing_was_loaded(
    store: kvstore.Store,
) -> None:
    with Watched(tiny_llama(), store, salt="beside") as model:
        model.generate(prompt(200))
        with model.counting() as counted:
            model.check(padded([prompt(200), prompt(200, 1)]))
        assert counted.usage.hit().tokens == 0
        assert counted.usage.misses[MissReason.NOT_WORTH_LOADING].blocks == 3
        assert counted.usage.misses[MissReason.NEVER_SEEN].blocks == 3
        with model.counting() as counted:
            model.check(padded([prompt(200), prompt(200, 1)]))
        assert counted.usage.hit().tokens == 2 * 192


def test_padding_is_never_read_from_memory_that_nobody_wrote(store: kvstore.Store) -> None:
    """A masked column of NaN is NaN all the same."""
    inputs = padded([prompt(150), prompt(200, 1)])
    one = {name: tensor[:1] for name, tensor in inputs.items()}
    with Watched(tiny_llama(), store, salt="padding") as model:
        model.check(one)
        torch.use_deterministic_algorithms(True)  # fills new memory with NaN
        try:
            for batch in (one, inputs, inputs):
                model.check(batch)
        finally:
            torch.use_deterministic_algorithms(False)


def test_tokens_after_a_rows_end_are_not_stored_and_its_blocks_stay_right(
    store: kvstore.Store,
) -> None:
    with Watched(tiny_llama(), store, salt="early") as model:
        early, late = prompt(60), prompt(60, 1)
        first = model.plain(early, max_new_tokens=100)[0, 60:].tolist()
        other = set(model.plain(late, max_new_tokens=100)[0, 60:].tolist())
        end = next(i for i, token in enumerate(first) if token not in other and i < 60)
        stop = first[end]
        end = first.index(stop)
        with model.counting() as counted:
            model.check(padded([early, late]), max_new_tokens=100, eos_token_id=stop)
        assert counted.usage.output_tokens < 100 + 60
        assert counted.usage.stored.blocks == (60 + end + 1) // BLOCK + (60 + 99) // BLOCK
        # A later prompt goes on with the very padding that the short row was fed.
        ended = torch.cat([early, torch.tensor([first[: end + 1]])], dim=1)
        longer = torch.cat([ended, torch.zeros((1, 70), dtype=torch.long)], dim=1)
        mask = torch.ones_like(longer)
        with model.counting() as counted:
            model.check({"input_ids": longer, "attention_mask": mask})
        assert counted.usage.hit().blocks == (60 + end + 1) // BLOCK


@pytest.mark.parametrize("given", ["argument", "config"])
def test_the_models_own_end_token_counts_where_the_call_names_none(
    given: str, store: kvstore.Store
) -> None:
    with Watched(tiny_llama(), store, salt=f"own end {given}") as model:
        early, late = prompt(60), prompt(60, 1)
        first = model.plain(early, max_new_tokens=100)[0, 60:].tolist()
        other = set(model.plain(late, max_new_tokens=100)[0, 60:].tolist())
        stop = next(token for token in first[:60] if token not in other)
        end = first.index(stop)
        model.model.generation_config.eos_token_id = stop
        options = {"max_new_tokens": 100, "do_sample": False}
        if given == "config":
            options = {"generation_config": GenerationConfig(**options)}
        with model.counting() as counted:
            model.cached.generate(**padded([early, late]), **options, **ALWAYS)
            assert model.cached.session.flush(30)
        assert counted.usage.stored.blocks == (60 + end + 1) // BLOCK + (60 + 99) // BLOCK


def test_right_padding_and_holes_go_to_the_model(store: kvstore.Store) -> None:
    ids = prompt(200)
    with Watched(tiny_llama(), store, salt="holes") as model:
        model.generate(ids)
        for hidden in (slice(190, 200), slice(50, 60)):
            mask = torch.ones_like(ids)
            mask[:, hidden] = 0
            with model.counting() as counted:
                model.check({"input_ids": ids, "attention_mask": mask})
            assert counted.usage.requests == 0
            assert counted.prefilled == 200


def test_padding_that_only_the_model_would_recognise_is_left_to_it(store: kvstore.Store) -> None:
    """Without a mask, a model takes its padding token for padding."""
    inputs = padded([prompt(200), prompt(150, 1)])
    with Watched(tiny_llama(), store, salt="no mask") as model:
        model.check(inputs)
        model.check(inputs["input_ids"])
        alone = {name: tensor[1:] for name, tensor in inputs.items()}
        model.check(alone)
        with model.counting() as counted:
            model.check(alone["input_ids"])
        assert counted.usage.requests == 0
        # With an end token that is the padding token, nothing can be told: then it is a token.
        with model.counting() as counted:
            model.check(alone["input_ids"], eos_token_id=0)
        assert counted.usage.requests == 1
