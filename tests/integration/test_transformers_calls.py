"""What `generate` takes: calls that are served, and calls that go straight to the model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

import kvstore
from kvstore.errors import InvalidRequest
from kvstore.testing import ServerProcess
from kvstore.types import SkipReason
from tests.helpers import eventually
from tests.integration.support import NOTHING_HELD, control
from tests.integration.tiny_models import ALWAYS, Watched, padded, prompt, tiny_llama


@pytest.fixture
def store(server: ServerProcess) -> Iterator[kvstore.Store]:
    with kvstore.connect(server.target) as store:
        yield store


@pytest.fixture
def model(store: kvstore.Store, request: pytest.FixtureRequest) -> Iterator[Watched]:
    """With 200 tokens of `prompt(200)` stored."""
    with Watched(tiny_llama(), store, salt=request.node.name) as model:
        model.generate(prompt(200))
        yield model


def same(ours: Any, theirs: Any) -> bool:
    return bool(ours.tolist() == theirs.tolist())


# -- straight to the model

PASSED_THROUGH: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 2},
    "several answers": {"num_return_sequences": 2, "do_sample": True},
    "no cache": {"use_cache": False},
    "a kind of cache": {"cache_implementation": "static"},
    "the dynamic cache by name": {"cache_implementation": "dynamic"},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "guidance": {"guidance_scale": 1.5},
}


@pytest.mark.parametrize("how", ["options", "config", "model's config"])
@pytest.mark.parametrize("name", PASSED_THROUGH)
def test_what_one_growing_cache_can_not_serve_is_the_models_own_call(
    name: str, how: str, model: Watched
) -> None:
    asked = {"max_new_tokens": 8, "do_sample": False, **PASSED_THROUGH[name]}
    options: dict[str, Any] = asked
    if how == "config":
        options = {"generation_config": GenerationConfig(**asked)}
    elif how == "model's config":
        model.model.generation_config.update(**asked)
        # One without a word about it does not take it back.
        options = {"generation_config": GenerationConfig(max_new_tokens=8)}
    with model.counting() as counted:
        torch.manual_seed(5)
        ours = model.generate(prompt(200), **options)
    torch.manual_seed(5)
    assert same(ours, model.plain(prompt(200), **options))
    assert counted.usage.requests == 0


def test_a_cache_of_the_callers_is_used_and_left_to_grow(model: Watched) -> None:
    ids = prompt(200)
    caches = []
    for generate in (model.generate, model.plain):
        cache = DynamicCache(config=model.model.config)
        with torch.no_grad():
            model.model(ids[:, :100], cache=cache, use_cache=True)
        caches.append((generate(ids, cache=cache), cache))
    (ours, our_cache), (theirs, their_cache) = caches
    assert same(ours, theirs)
    assert our_cache.get_seq_length() == their_cache.get_seq_length() == 207
    assert model.usage.requests == 1  # the fixture's


def test_new_tokens_alone_beside_a_mask_of_all_are_left_to_the_model(model: Watched) -> None:
    ids = prompt(200)
    answers = []
    for generate in (model.generate, model.plain):
        cache = DynamicCache(config=model.model.config)
        with torch.no_grad():
            model.model(ids[:, :100], cache=cache, use_cache=True)
        inputs = {"input_ids": ids[:, 100:], "attention_mask": torch.ones_like(ids)}
        answers.append(generate(inputs, cache=cache))
    assert same(*answers)


def test_embeddings_instead_of_tokens_go_to_the_model(model: Watched) -> None:
    embedded = model.model.get_input_embeddings()(prompt(200)).detach()
    with model.counting() as counted:
        ours = model.generate({"inputs_embeds": embedded})
    assert same(ours, model.plain({"inputs_embeds": embedded}))
    assert counted.usage.requests == 0


@pytest.mark.parametrize("wanted", ["output_attentions", "output_hidden_states"])
def test_what_loading_would_leave_out_of_the_result_is_computed(
    wanted: str, model: Watched
) -> None:
    model.model.set_attn_implementation("eager")
    options = {wanted: True, "return_dict_in_generate": True}
    ours, theirs = model.generate(prompt(200), **options), model.plain(prompt(200), **options)
    name = wanted.removeprefix("output_")
    assert [t.shape for t in ours[name][0]] == [t.shape for t in theirs[name][0]]


def test_a_mask_of_another_shape_than_the_tokens_is_refused(model: Watched) -> None:
    with pytest.raises(InvalidRequest, match="differ in shape"):
        model.generate({"input_ids": prompt(200), "attention_mask": torch.ones(1, 100)})


# -- served


def test_tokens_may_be_called_inputs_as_the_model_calls_them(model: Watched) -> None:
    with model.counting() as counted:
        output = model.generate({"inputs": prompt(200)})
    assert same(output, model.plain(prompt(200)))
    assert counted.usage.hit().tokens == 192


def test_sampling_with_one_seed_gives_one_answer(model: Watched) -> None:
    options = {"do_sample": True, "temperature": 1.5, "top_k": 20, "max_new_tokens": 20}
    torch.manual_seed(7)
    with model.counting() as counted:
        ours = model.generate(prompt(200), **options)
    torch.manual_seed(7)
    assert same(ours, model.plain(prompt(200), **options))
    assert counted.usage.hit().tokens == 192
    torch.manual_seed(8)
    assert not same(ours, model.generate(prompt(200), **options))


class Streamed(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.reshape(-1).tolist()

    def end(self) -> None:
        self.ended = True


def test_a_streamer_gets_prompt_and_answer_once(model: Watched) -> None:
    streamer = Streamed()
    output = model.generate(prompt(200), streamer=streamer)
    assert streamer.tokens == output[0].tolist()
    assert streamer.ended


class After(StoppingCriteria):
    def __init__(self, length: int):
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **more: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length)


@pytest.mark.parametrize("kind", [list, StoppingCriteriaList])
def test_the_callers_stopping_criteria_stop_and_stay_as_they_are(kind: Any, model: Watched) -> None:
    criteria = kind([After(203)])
    output = model.check(prompt(200), stopping_criteria=criteria)
    assert output.shape[1] == 203
    assert len(criteria) == 1


class Forbid(LogitsProcessor):
    def __init__(self, token: int):
        self.token = token

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, self.token] = -torch.inf
        return scores


def test_processors_of_scores_work_on_the_whole_prompt(model: Watched) -> None:
    first = int(model.plain(prompt(200))[0, 200])
    options = {"logits_processor": LogitsProcessorList([Forbid(first)]), "repetition_penalty": 1.3}
    assert int(model.check(prompt(200), **options)[0, 200]) != first


def test_a_result_as_an_object_has_a_cache_to_go_on_with(model: Watched) -> None:
    ours = model.generate(prompt(200), return_dict_in_generate=True, output_scores=True)
    theirs = model.plain(prompt(200), return_dict_in_generate=True, output_scores=True)
    assert same(ours.sequences, theirs.sequences)
    assert len(ours.scores) == len(theirs.scores) == 8
    assert ours.cache.get_seq_length() == theirs.cache.get_seq_length() == 207
    longer = torch.cat([ours.sequences, prompt(10, 1)], dim=1)
    on = model.generate(longer, cache=ours.cache)
    assert same(on, model.plain(longer, cache=theirs.cache))
    assert same(on, model.plain(longer))


def test_the_cache_given_back_may_grow_before_its_blocks_are_stored(model: Watched) -> None:
    ids = prompt(300, 9)
    grown = threading.Event()
    gather = model.cached._split

    def late(block: torch.Tensor) -> Any:
        assert grown.wait(30)
        return gather(block)

    model.cached._split = late  # type: ignore[method-assign]
    asked = {"max_new_tokens": 8, "do_sample": False, **ALWAYS}
    output = model.cached.generate(ids, return_dict_in_generate=True, **asked)
    longer = torch.cat([output.sequences, prompt(100, 1)], dim=1)
    model.model.generate(longer, cache=output.cache, max_new_tokens=8, do_sample=False)
    output.cache.crop(-350)
    grown.set()
    assert model.cached.session.flush(30)
    with model.counting() as counted:
        model.check(ids)
    assert counted.usage.hit().tokens == 256


def test_a_generation_config_object_is_the_models(model: Watched) -> None:
    config = GenerationConfig(max_new_tokens=5, do_sample=False)
    with model.counting() as counted:
        output = model.check(prompt(200), generation_config=config)
    assert output.shape[1] == 205
    assert counted.usage.hit().tokens == 192


def test_prefill_in_chunks_starts_after_what_was_loaded(model: Watched) -> None:
    with model.counting() as counted:
        model.check(prompt(250), prefill_chunk_size=16)
    assert [columns for _, columns in counted.forwards[:5]] == [16, 16, 16, 10, 1]


# -- what goes wrong


class Stop(Exception):
    pass


@pytest.mark.parametrize("at_pass", [0, 3])
def test_a_model_that_fails_leaves_no_lease_and_stores_nothing(
    at_pass: int, model: Watched, store: kvstore.Store
) -> None:
    passes = 0

    def fail(*_: Any) -> None:
        nonlocal passes
        passes += 1
        if passes > at_pass:
            raise Stop

    hook = model.model.register_forward_pre_hook(fail)
    longer = torch.cat([prompt(200), prompt(200, 1)], dim=1)
    with model.counting() as counted, pytest.raises(Stop):
        model.generate(longer)
    hook.remove()
    model.cached.session.flush()
    assert counted.usage.requests == 0
    eventually(lambda: control(store) == NOTHING_HELD)
    with model.counting() as counted:
        model.check(longer)
    assert counted.usage.hit().tokens == 192
    assert counted.usage.stored.blocks == 3


def test_a_request_that_fails_at_its_start_releases_the_rows_before_it(
    model: Watched, store: kvstore.Store
) -> None:
    batch = padded([prompt(200), prompt(150, 1)])
    begin = model.cached.session.begin
    begun = 0

    def second_fails(*arguments: Any, **options: Any) -> Any:
        nonlocal begun
        begun += 1
        if begun == 2:
            raise Stop
        return begin(*arguments, **options)

    model.cached.session.begin = second_fails  # type: ignore[method-assign]
    with pytest.raises(Stop):
        model.generate(batch)
    eventually(lambda: control(store) == NOTHING_HELD)


def test_a_streamer_that_fails_is_the_callers_and_leaves_no_lease(
    model: Watched, store: kvstore.Store
) -> None:
    class Broken(Streamed):
        def put(self, value: torch.Tensor) -> None:
            raise Stop

    with pytest.raises(Stop):
        model.generate(prompt(200), streamer=Broken())
    eventually(lambda: control(store) == NOTHING_HELD)
    model.check(prompt(200))


@pytest.mark.parametrize("share_memory", [True, False])
def test_a_source_that_fails_is_counted_and_the_next_store_works(
    share_memory: bool, server: ServerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        kvstore.connect(server.target, share_memory=share_memory) as store,
        Watched(tiny_llama(), store, salt=f"source {share_memory}") as model,
    ):
        split = model.cached._split

        def broken(block: torch.Tensor) -> Any:
            raise Stop

        model.cached._split = broken  # type: ignore[method-assign]
        with model.counting() as counted:
            model.check(prompt(200))
        assert counted.usage.skipped[SkipReason.FAILED].blocks == 3
        assert "Stop" in caplog.text
        model.cached._split = split  # type: ignore[method-assign]
        with model.counting() as counted:
            model.check(prompt(200))
        assert counted.usage.hit().tokens == 0
        assert counted.usage.stored.blocks == 3
        eventually(lambda: control(store)["reserved_slots"] == 0)


def test_a_pool_that_finds_no_memory_does_not_take_the_answer_back(
    store: kvstore.Store, caplog: pytest.LogCaptureFixture
) -> None:
    with Watched(tiny_llama(), store, 1 << 20, salt="no memory") as model:

        def full(*_: Any) -> None:
            raise torch.OutOfMemoryError("no memory left on the device")

        model.cached.session.pool.write = full  # type: ignore[union-attr,method-assign]
        model.check(prompt(200))
        assert "no memory left" in caplog.text
        with model.counting() as counted:
            model.check(prompt(200))
        assert counted.usage.hit().tokens == 192
