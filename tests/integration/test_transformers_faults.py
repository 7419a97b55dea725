"""Never the wrong KV, and never worse than without: identities, damage, absent servers, races."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import torch
from transformers import LlamaForCausalLM, MistralConfig, MistralForCausalLM

import kvstore
from engine.hashing import block_keys
from kvstore import slots
from kvstore.errors import UnsupportedModel
from kvstore.testing import ServerProcess
from kvstore.types import BlockKey, MissReason, SkipReason, TierName
from tests.helpers import eventually
from tests.integration.tiny_models import (
    BLOCK,
    SIZES,
    Watched,
    model_report,
    prompt,
    seeded,
    tiny_llama,
)


@pytest.fixture
def store(redis_server: ServerProcess) -> Iterator[kvstore.Store]:
    with kvstore.connect(redis_server.target) as store:
        yield store


# -- whose KV it is


def hits_across(
    store: kvstore.Store, first: Any, second: Any, *names: dict[str, str], **shared: str
) -> int:
    """Tokens that the second model takes from what the first one stored; both answer right."""
    ids = prompt(200)
    hits = 0
    for model, own in zip((first, second), names or ({}, {}), strict=True):
        with Watched(model, store, **{**shared, **own}) as watched, watched.counting() as counted:
            watched.check(ids)
        hits = counted.usage.hit().tokens
    return hits


def test_the_same_model_hits_what_it_stored_before(store: kvstore.Store, name: str) -> None:
    assert hits_across(store, tiny_llama(), tiny_llama(), salt=name) == 192


def test_models_with_other_weights_never_hit_each_other(store: kvstore.Store, name: str) -> None:
    assert hits_across(store, tiny_llama(0), tiny_llama(1), salt=name) == 0


def test_one_weight_trained_a_little_makes_another_model(store: kvstore.Store, name: str) -> None:
    trained = tiny_llama()
    with torch.no_grad():
        trained.model.layers[0].self_attn.v_proj.weight.mul_(1.001)
    assert hits_across(store, tiny_llama(), trained, salt=name) == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"rms_norm_eps": 0.3},
        {"hidden_act": "relu"},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
        {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16},
    ],
    ids=str,
)
def test_the_same_weights_in_another_configuration_never_hit(
    changes: dict[str, Any], store: kvstore.Store, name: str
) -> None:
    model, other = tiny_llama(), tiny_llama(**changes)
    other.load_state_dict(model.state_dict())
    assert hits_across(store, model, other, salt=name) == 0


def test_the_same_weights_in_another_architecture_never_hit(
    store: kvstore.Store, name: str
) -> None:
    model = tiny_llama()
    other = seeded(lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None)))
    other.load_state_dict(model.state_dict())
    # Even if both are given one name.
    assert hits_across(store, model, other, salt=name, name="one") == 0


def test_a_configuration_saved_and_loaded_again_is_the_same_model(
    store: kvstore.Store, name: str, folder: Path
) -> None:
    model = tiny_llama()
    model.save_pretrained(folder)
    loaded = LlamaForCausalLM.from_pretrained(folder).eval()
    assert hits_across(store, model, loaded, salt=name, name="one") == 192


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_same_model_in_another_precision_never_hits(
    dtype: torch.dtype, store: kvstore.Store, name: str
) -> None:
    with Watched(tiny_llama(dtype=torch.float16), store, salt=name) as model:
        model.generate(prompt(200))
    with Watched(tiny_llama(dtype=dtype), store, salt=name) as model, model.counting() as counted:
        model.generate(prompt(200))
    assert counted.usage.hit().tokens == 0


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"salt": "a"}, {"salt": "b"}),
        ({"salt": "a"}, {"salt": ""}),
        ({"tenant": "a"}, {"tenant": "b"}),
    ],
    ids=str,
)
def test_another_salt_or_tenant_never_hits(
    first: dict[str, str], second: dict[str, str], store: kvstore.Store
) -> None:
    model = tiny_llama(seed=33)
    assert hits_across(store, model, model, first, second) == 0


def test_another_adapter_than_at_the_start_is_refused(store: kvstore.Store, name: str) -> None:
    model = tiny_llama()
    with Watched(model, store, salt=name) as watched:
        watched.generate(prompt(100))
        model._hf_peft_config_loaded = True
        model.active_adapters = lambda: ["legal"]
        with pytest.raises(UnsupportedModel, match=r"'legal'.*''"):
            watched.generate(prompt(100))
        with Watched(model, store, salt=name) as adapted, adapted.counting() as counted:
            adapted.check(prompt(100))
            assert adapted.cached.layout.adapter == "legal"
        assert counted.usage.hit().tokens == 0
        model.active_adapters = lambda: ["medical"]
        with pytest.raises(UnsupportedModel, match="'medical'"):
            adapted.generate(prompt(100))


def trained(model: Any) -> None:
    loss = model(input_ids=prompt(20), labels=prompt(20)).loss
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


CHANGES: dict[str, Any] = {
    "training": trained,
    "loading": lambda model: model.load_state_dict(tiny_llama(1).state_dict()),
    "casting": lambda model: model.bfloat16(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_weights_that_change_in_place_are_refused_until_the_model_is_wrapped_again(
    change: str, store: kvstore.Store, name: str
) -> None:
    model = tiny_llama()
    with Watched(model, store, salt=name) as watched:
        watched.check(prompt(200))
        CHANGES[change](model)
        with pytest.raises(UnsupportedModel, match="weights changed"):
            watched.generate(prompt(200))
    with Watched(model, store, salt=name) as watched:
        with watched.counting() as counted:
            watched.generate(prompt(200))
        assert counted.usage.hit().tokens == 0
        with watched.counting() as counted:
            watched.generate(prompt(200))
        assert counted.usage.hit().tokens == 192


def test_a_model_in_training_mode_neither_stores_its_dropout_nor_loads(
    store: kvstore.Store, name: str
) -> None:
    model = tiny_llama(attention_dropout=0.5)
    with Watched(model, store, salt=name) as watched:
        model.train()
        with watched.counting() as counted:
            watched.generate(prompt(200))
        assert counted.usage.requests == 0
        model.eval()
        for hits in (0, 192):
            with watched.counting() as counted:
                watched.check(prompt(200))
            assert counted.usage.hit().tokens == hits


def test_a_load_that_takes_too_long_is_broken_off_and_computed(
    store: kvstore.Store, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = prompt(300)
    with Watched(tiny_llama(), store, salt=name) as model:
        model.generate(ids)
        monkeypatch.setattr("engine.request.LOAD_TIMEOUT_S_MAX", 0.2)
        monkeypatch.setattr("engine.request.LOAD_TIMEOUT_S_MIN", 0.2)
        load = model.cached.session.namespace.load

        def slow(found: Any, sink: Any, **options: Any) -> Any:
            def waiting(position: int, view: memoryview) -> None:
                time.sleep(0.3 if position == 1 else 0)
                sink(position, view)

            return load(found, waiting, **options)

        model.cached.session.namespace.load = slow  # type: ignore[method-assign]
        with model.counting() as counted:
            model.check(ids)
        assert counted.hits(TierName.CPU) == 128
        assert counted.usage.misses[MissReason.TOO_SLOW].tokens == 128


# -- damage


def damage(server: ServerProcess, key: BlockKey) -> None:
    """Flips a bit of this block's payload in Valkey."""
    with redis.Redis(unix_socket_path=str(server.folder / "valkey" / "valkey.sock")) as client:
        (name,) = [name for name in client.scan_iter() if key in name and b"led" not in name]
        payload = bytearray(client.get(name))
        payload[len(payload) // 2] ^= 1
        client.set(name, bytes(payload))


def test_a_bit_flipped_in_valkey_is_computed_again(
    redis_server: ServerProcess, store: kvstore.Store, name: str
) -> None:
    ids = prompt(300)
    with Watched(tiny_llama(), store, salt=name) as model:
        model.generate(ids)
        store.clear(arena_only=True)
        keys = block_keys(model.cached.layout.fingerprint(), ids[0].numpy(), BLOCK)
        damage(redis_server, keys[2])
        with model.counting() as counted:
            model.check(ids)
        assert counted.hits(TierName.REDIS) == 128
        assert counted.usage.misses[MissReason.CORRUPT].tokens == 128
        assert counted.prefilled == 300 - 128
        with model.counting() as counted:  # it was stored again
            model.check(ids)
        assert counted.usage.hit().tokens == 256


@pytest.mark.parametrize("lost", [0, 1, 3])
def test_a_slot_overwritten_while_it_is_read_is_computed_again(
    lost: int, store: kvstore.Store, name: str
) -> None:
    ids = prompt(300)
    with Watched(tiny_llama(), store, salt=name) as model:
        model.generate(ids)
        load = model.cached.session.namespace.load

        def overwritten(found: Any, sink: Any, **options: Any) -> Any:
            arena = found.attached.arena
            offset = found.lease.offsets[lost]
            slot = arena[offset : offset + slots.slot_bytes(model.cached.layout.block_bytes)]
            before = bytes(slot)

            def racing(position: int, view: memoryview) -> None:
                if position == lost:
                    slots.payload(arena, offset, len(view))[:] = bytes(len(view))
                    slots.write_generation(arena, offset, found.lease.generations[lost] + 1)
                sink(position, view)

            try:
                return load(found, racing, **options)
            finally:
                slot[:] = before

        model.cached.session.namespace.load = overwritten  # type: ignore[method-assign]
        with model.counting() as counted:
            model.check(ids)
        assert counted.hits(TierName.CPU) == lost * BLOCK
        assert counted.usage.misses[MissReason.OVERWRITTEN].tokens == 256 - lost * BLOCK
        assert counted.prefilled == 300 - lost * BLOCK


def test_the_end_of_a_prefix_in_the_arena_and_its_start_in_redis_make_one_load(
    store: kvstore.Store, name: str
) -> None:
    """The arena is read first then, and both tiers' times are measured."""
    ids = prompt(300)
    with Watched(tiny_llama(), store, salt=name) as model:
        model.generate(ids)
        store.clear(arena_only=True)
        keys = block_keys(model.cached.layout.fingerprint(), ids[0].numpy(), BLOCK)
        namespace = model.cached.session.namespace
        found = namespace.lookup(keys[2:])
        assert namespace.load(found, lambda *_: None).runs == ((TierName.REDIS, 2),)
        found = namespace.lookup(keys)
        assert found.runs == ((TierName.REDIS, 2), (TierName.CPU, 2))
        namespace.release(found)
        with model.counting() as counted:
            model.check(ids)
        assert counted.hits(TierName.REDIS) == counted.hits(TierName.CPU) == 128


def test_blocks_evicted_between_lookup_and_load_are_computed(
    store: kvstore.Store, name: str
) -> None:
    """In the engine's own pool nothing is pinned."""
    with Watched(tiny_llama(), store, 1 << 20, salt=name) as model:
        model.generate(prompt(300))
        pool, load = model.cached.session.pool, model.cached._load
        assert pool is not None

        def evicting(requests: Any, pads: Any) -> Any:
            pool.evict(pool_info, requests[0].keys[2:])  # type: ignore[attr-defined]
            return load(requests, pads)

        pool_info = model.cached.session.namespace.info
        model.cached._load = evicting  # type: ignore[method-assign]
        with model.counting() as counted:
            model.check(prompt(300))
        assert counted.hits(TierName.GPU) == 128
        assert counted.usage.misses[MissReason.EVICTED].tokens == 128


# -- servers that are not there


def test_without_a_server_answers_are_the_models_and_the_reasons_are_counted(
    folder: Path,
) -> None:
    absent = ServerProcess(folder)
    with (
        kvstore.connect(absent.target, wait_s=0.1) as store,
        Watched(tiny_llama(), store) as model,
    ):
        for _ in range(2):
            with model.counting() as counted:
                model.check(prompt(200))
            assert counted.usage.misses[MissReason.SERVER_DOWN].tokens == 192
            assert counted.usage.skipped[SkipReason.SERVER_DOWN].blocks == 3


def test_a_server_that_appears_is_used_and_hears_of_the_requests_before_it(folder: Path) -> None:
    late = ServerProcess(folder, "--no-redis", cpu_bytes="16MiB")
    with (
        kvstore.connect(late.target, wait_s=0.1) as store,
        Watched(tiny_llama(), store, name="late") as model,
    ):
        model.check(prompt(200))
        with late:
            eventually(lambda: store.attached)
            model.check(prompt(200))
            with model.counting() as counted:
                model.check(prompt(200))
            assert counted.usage.hit().tokens == 192
            assert model_report(store, "late", 3)["hits"]["cpu"]["tokens"] == 192


def test_a_server_killed_and_restarted_costs_hits_and_nothing_else(folder: Path) -> None:
    ids = prompt(200)
    with (
        ServerProcess(folder, "--no-redis", cpu_bytes="16MiB") as server,
        kvstore.connect(server.target) as store,
        Watched(tiny_llama(), store, name="killed") as model,
    ):
        model.check(ids)
        # Killed between the lookup and the load: the mapping outlives the server.
        load = model.cached._load

        def killing(*arguments: Any) -> Any:
            server.kill()
            return load(*arguments)

        model.cached._load = killing  # type: ignore[method-assign]
        model.check(ids)
        model.cached._load = load  # type: ignore[method-assign]
        eventually(lambda: not store.attached)
        with model.counting() as counted:
            model.check(ids)
        assert counted.usage.misses[MissReason.SERVER_DOWN].tokens == 192
        server.start()
        eventually(lambda: store.attached)
        with model.counting() as counted:
            model.check(ids)
        assert counted.usage.hit().tokens == 0
        assert counted.usage.stored.blocks == 3
        with model.counting() as counted:
            model.check(ids)
        assert counted.usage.hit().tokens == 192
        # Killed while the blocks are written.
        split = model.cached._split

        def killing_split(block: torch.Tensor) -> Any:
            server.kill()
            return split(block)

        model.cached._split = killing_split  # type: ignore[method-assign]
        with model.counting() as counted:
            model.check(prompt(200, 1))
        assert sum(skipped.blocks for skipped in counted.usage.skipped.values()) == 3


# -- several at once


def test_two_engines_that_store_one_prefix_at_once_keep_one_copy(
    redis_server: ServerProcess, store: kvstore.Store, name: str
) -> None:
    barrier = threading.Barrier(2)
    engines: list[Watched] = []
    answers: list[Any] = []

    def engine(own_model: Any) -> None:
        with (
            kvstore.connect(redis_server.target) as own,
            Watched(own_model, own, salt=name) as model,
        ):
            engines.append(model)
            finish = model.cached._finish

            def together(*arguments: Any) -> None:
                barrier.wait(30)
                finish(*arguments)

            model.cached._finish = together  # type: ignore[method-assign]
            answers.append(model.generate(prompt(300)).tolist())

    threads = [threading.Thread(target=engine, args=(tiny_llama(),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(answers) == 2
    assert answers[0] == answers[1]
    assert sum(engine.usage.stored.blocks for engine in engines) == 4
    assert sum(engine.usage.already_present.blocks for engine in engines) == 4
    fingerprint = engines[0].cached.layout.fingerprint().hex()
    (namespace,) = [
        one for one in json.loads(store.report())["namespaces"] if one["fingerprint"] == fingerprint
    ]
    assert namespace["blocks"] == 4
    with Watched(tiny_llama(), store, salt=name) as model, model.counting() as counted:
        assert model.check(prompt(300)).tolist() == answers[0]
    assert counted.usage.hit().tokens == 256


def test_threads_that_share_one_model_get_the_answers_of_plain_generation(
    store: kvstore.Store, name: str
) -> None:
    shared = prompt(130)
    prompts = [torch.cat([shared, prompt(20 + 9 * index, index)], dim=1) for index in range(6)]
    with Watched(tiny_llama(), store, 1 << 20, salt=name) as model:
        plain = [model.plain(ids).tolist() for ids in prompts]
        answers: dict[int, Any] = {}

        def ask(index: int) -> None:
            for _ in range(2):
                answers[index] = model.generate(prompts[index]).tolist()

        threads = [threading.Thread(target=ask, args=(index,)) for index in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert [answers[index] for index in range(6)] == plain
        usage = model.cached.session.usage
        assert usage.requests == 12
        assert usage.prompt.tokens == usage.hit().tokens + usage.missed().tokens
