"""What engines and server tell each other so that both decide well, over a real connection."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import kvstore
from kvstore.cli import cli
from kvstore.client import Store
from kvstore.testing import ServerProcess
from kvstore.types import Decision, MissReason, SkipReason, TierName, Usage
from tests.helpers import eventually
from tests.integration.support import chain, info_of, load, store

DECISION = Decision(
    prompt_tokens=1100, output_tokens=20, found_tokens=1024, loaded_tokens=0,
    load_reason=MissReason.NOT_WORTH_LOADING, load_expected_s=2.5, prefill_expected_s=1.5,
    load_s=0.0, prefill_s=1.6, total_s=2.0, storable_tokens=64, stored_tokens=0,
    skip_reason=SkipReason.GAIN_TOO_SMALL, reuse=0.25, gain_s=0.01, cost_s=0.0005, crowded=True,
)  # fmt: skip


def test_blocks_that_are_asked_for_again_are_expected_again(other: Store, name: str) -> None:
    namespace = other.open(info_of(name))
    once = [namespace.lookup(chain(f"{name} {turn}", 12)).outlook.reuse for turn in range(60)]
    assert once[0] == pytest.approx([0.5] * 12, abs=0.01)
    assert max(once[-1]) < 0.2
    for _ in range(60):
        again = namespace.lookup(chain(f"{name} again", 12)).outlook.reuse
    assert min(again) > 0.4


def test_of_a_request_that_asks_twice_only_the_first_time_counts(other: Store, name: str) -> None:
    """In vLLM, the scheduler asks first, and each worker again before it loads."""
    namespace = other.open(info_of(name))
    for turn in range(60):
        keys = chain(f"{name} {turn}", 12)
        outlook = namespace.lookup(keys).outlook
        assert namespace.lookup(keys, again=True).outlook.reuse == []
    assert max(outlook.reuse) < 0.2


def test_only_missing_blocks_have_an_outlook(other: Store, name: str) -> None:
    namespace, keys = other.open(info_of(name)), chain(name, 6)
    store(namespace, keys[:4])
    found = namespace.lookup(keys)
    assert (found.blocks, len(found.outlook.reuse)) == (4, 2)
    namespace.release(found)


def test_redis_is_not_asked_when_the_engine_has_no_use_for_it(folder: Path, name: str) -> None:
    with ServerProcess(folder, cpu_bytes="16MiB") as server, kvstore.connect(server.target) as one:
        namespace, keys = one.open(info_of(name)), chain(name, 6)
        store(namespace, keys)
        one.clear(arena_only=True)
        near = namespace.lookup(keys, near_only=True)
        assert (near.blocks, near.miss_reason) == (0, MissReason.NOT_WORTH_LOADING)
        # The server has written through, and asked, so it knows how fast Redis is.
        far = namespace.lookup(keys)
        assert far.runs == ((TierName.REDIS, 6),)
        assert far.outlook.far_bytes_per_s > 0
        assert far.outlook.far_latency_s > 0
        namespace.release(far)
        assert load(namespace, keys).blocks == 6


def test_a_full_arena_has_no_room_for_what_nobody_asked_for_before(folder: Path, name: str) -> None:
    with (
        ServerProcess(folder, "--no-redis", cpu_bytes="16MiB") as server,
        kvstore.connect(server.target) as one,
    ):
        namespace = one.open(info_of(name))
        hot = chain(f"{name} hot", 64)
        assert not namespace.lookup(hot).outlook.crowded
        for turn in range(150):
            for keys in (hot, chain(f"{name} {turn}", 64)):
                found = namespace.lookup(keys)
                namespace.release(found)
                store(namespace, keys)
        assert found.outlook.crowded
        assert max(found.outlook.reuse) == 0
        again = namespace.lookup(chain(f"{name} {turn - 10}", 64)).outlook
        assert not again.reuse or min(again.reuse) > 0


def test_what_an_engine_measured_is_there_for_the_next_one(other: Store, name: str) -> None:
    info = info_of(name)
    namespace = other.open(info)
    assert namespace.last_costs == ""
    namespace.keep('{"measured": 1}')

    def kept() -> bool:
        with kvstore.connect(other.target) as next_one:
            return next_one.open(info).last_costs == '{"measured": 1}'

    eventually(kept)
    with kvstore.connect(other.target) as stranger:
        assert stranger.open(info_of(f"{name} of another model")).last_costs == ""


def test_decisions_are_explained_the_latest_first(other: Store, name: str) -> None:
    namespace = other.open(info_of(name, model=name))
    for tokens in (1, 2, 3):
        told = dataclasses.replace(DECISION, prompt_tokens=tokens)
        namespace.record(Usage(), decision=told)
    eventually(lambda: len(_of(other, name)) == 3)
    explained = _of(other, name)
    assert [one["prompt_tokens"] for one in explained] == [3, 2, 1]
    assert (
        explained[0].items()
        >= dataclasses.asdict(dataclasses.replace(DECISION, prompt_tokens=3)).items()
    )

    run = CliRunner().invoke(cli, ["explain", other.target, "--last", "1", "--json"])
    assert run.exit_code == 0, run.output
    assert len(json.loads(run.stdout)) == 1
    words = CliRunner().invoke(cli, ["explain", other.target])
    assert "not_worth_loading" in words.stdout
    away = CliRunner().invoke(cli, ["explain", "127.0.0.1:1"])
    assert away.exit_code == 1
    assert "kvstore serve" in away.output


def _of(store: Store, model: str) -> list[dict[str, object]]:
    return [one for one in json.loads(store.explain()) if one["model"] == model]
