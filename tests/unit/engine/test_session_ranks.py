"""A session for an engine that decides in one place and computes in others, one a rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from engine.admission import Override
from engine.hashing import block_keys
from engine.request import Timing
from engine.session import EngineSession
from engine.transfer import Arrived, StoreJob
from kvstore.client import Loaded, Stored
from kvstore.errors import InvalidRequest
from kvstore.types import MissReason, NamespaceInfo, TierName

from .test_session import BLOCK, LAYOUT, FakeNamespace

CPU, REDIS, GPU = TierName.CPU, TierName.REDIS, TierName.GPU
TIMING = Timing(1.0, 1.0, 2.0, alone=False)
TOKENS = list(range(10 * BLOCK + 1))


class Ranks:
    """A store of two namespaces, and what a session wants stored."""

    def __init__(self) -> None:
        self.namespaces: list[FakeNamespace] = []
        self.jobs: list[StoreJob[str]] = []
        layouts = [
            dataclasses.replace(LAYOUT, tensor_rank=rank, tensor_size=2) for rank in range(2)
        ]
        self.session: EngineSession[None] = EngineSession(
            self,  # type: ignore[arg-type]
            layouts,
            storing=self,
        )

    def open(self, info: NamespaceInfo) -> FakeNamespace:
        self.namespaces.append(FakeNamespace(info))
        return self.namespaces[-1]

    def store(self, job: StoreJob[str]) -> bool:
        self.jobs.append(job)
        return True

    def flush(self, timeout_s: float | None = None) -> bool:
        return True

    def close(self) -> None:
        pass

    def keep(self, rank: int, tiers: Sequence[TierName]) -> None:
        namespace = self.namespaces[rank]
        keys = block_keys(namespace.info.fingerprint, TOKENS, BLOCK)
        for key, tier in zip(keys, tiers, strict=False):
            namespace.blocks[key] = (tier, b"")

    def plan(self, pool_tokens: int = 0, load: Override = Override.ALWAYS) -> Any:
        session = self.session
        looked_up = session.look_up(len(TOKENS), session.keys_of(TOKENS))
        return session.plan(looked_up, pool_tokens, load)

    @property
    def leases(self) -> int:
        return sum(namespace.leases for namespace in self.namespaces)


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


def test_ranks_name_their_blocks_apart(ranks: Ranks) -> None:
    first, second = ranks.session.keys_of(TOKENS)
    assert not set(first) & set(second)
    assert ranks.session.block_bytes == 2 * LAYOUT.block_bytes


def test_ranks_of_different_blocks_are_refused(ranks: Ranks) -> None:
    other = dataclasses.replace(LAYOUT, block_tokens=2 * BLOCK, tensor_rank=1, tensor_size=2)
    with pytest.raises(InvalidRequest, match="same number of tokens"):
        EngineSession(ranks, [LAYOUT, other], storing=ranks)  # type: ignore[arg-type]


def test_a_prefix_counts_as_far_as_all_ranks_have_it_from_its_farthest_tier(ranks: Ranks) -> None:
    ranks.keep(0, [CPU, CPU, REDIS, CPU, CPU])
    ranks.keep(1, [CPU, REDIS, CPU, CPU])
    request = ranks.plan()
    assert request.plan.runs == ((CPU, 1), (REDIS, 2), (CPU, 1))
    assert ranks.leases == 2
    request.release()
    request.release()
    assert ranks.leases == 0


def test_a_rank_that_has_nothing_leaves_nothing(ranks: Ranks) -> None:
    ranks.keep(0, [CPU] * 5)
    request = ranks.plan()
    assert request.plan.blocks == 0
    request.cancel()
    assert ranks.leases == 0


def test_what_the_engine_has_itself_is_neither_loaded_nor_decided(ranks: Ranks) -> None:
    for rank in range(2):
        ranks.keep(rank, [CPU] * 5)
    for load, blocks in ((Override.ALWAYS, 5), (Override.NEVER, 2)):
        request = ranks.plan(2 * BLOCK + 1, load)
        assert request.pooled_blocks == 2
        assert request.plan.blocks == blocks
        assert request.plan.hits[GPU].tokens == 2 * BLOCK + 1
        request.cancel()


def test_a_whole_request_counts_every_token_once(ranks: Ranks) -> None:
    for rank in range(2):
        ranks.keep(rank, [CPU] * 6)
    request = ranks.plan(2 * BLOCK)
    request.take_pool(2)
    # Of four blocks that were to come, two did.
    request.arrived(Arrived(Loaded(((CPU, 2),), MissReason.CORRUPT), 0.5, ((CPU, 100, 0.5),)))
    request.finish([*TOKENS, *range(2 * BLOCK)], "pages", TIMING, override=Override.ALWAYS)
    usage = ranks.session.usage
    assert {tier: hit.blocks for tier, hit in usage.hits.items()} == {GPU: 2, CPU: 2}
    assert {why: miss.blocks for why, miss in usage.misses.items()} == {
        MissReason.CORRUPT: 2,
        MissReason.NEVER_SEEN: 4,
        MissReason.TAIL: 0,
    }
    assert usage.prompt.tokens == usage.hit().tokens + usage.missed().tokens == len(TOKENS)
    assert usage.load_s == 0.5

    # Stored is what was computed, from where both the engine and the store had it.
    (job,) = ranks.jobs
    assert (job.first, job.source) == (4, "pages")
    for namespace, keys, parent in zip(ranks.namespaces, job.keys, job.parents, strict=True):
        whole = block_keys(namespace.info.fingerprint, [*TOKENS, *range(2 * BLOCK)], BLOCK)
        assert list(keys) == whole[4:]
        assert parent == whole[3]
    assert job.size_bytes == len(job.keys[0]) * 2 * LAYOUT.block_bytes
    job.done(Stored(stored=6, present=2))
    assert (ranks.session.usage.stored.blocks, ranks.session.usage.already_present.blocks) == (6, 2)


def test_of_a_prompt_that_was_cut_short_only_whole_blocks_are_stored(ranks: Ranks) -> None:
    request = ranks.plan()
    request.take_pool(0)
    request.finish(TOKENS[: 3 * BLOCK + 1], "pages", TIMING, override=Override.ALWAYS)
    (job,) = ranks.jobs
    whole = block_keys(ranks.namespaces[0].info.fingerprint, TOKENS, BLOCK)
    assert (job.first, list(job.keys[0])) == (0, whole[:3])
    request = ranks.plan()
    request.take_pool(0)
    request.finish([], "pages", TIMING, override=Override.ALWAYS)
    assert len(ranks.jobs) == 1


def test_extras_of_generated_blocks_are_in_their_keys(ranks: Ranks) -> None:
    request = ranks.plan()
    request.take_pool(0)
    answer = list(range(BLOCK))
    request.finish(
        [*TOKENS, *answer], "pages", TIMING, override=Override.ALWAYS, extras={10: [b"adapter"]}
    )
    (job,) = ranks.jobs
    expected = block_keys(
        ranks.namespaces[0].info.fingerprint, [*TOKENS, *answer], BLOCK, {10: [b"adapter"]}
    )
    assert list(job.keys[0]) == expected
