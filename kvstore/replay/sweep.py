"""One trace at several capacities, by several policies and admission rules: the table of results.

How things are counted. Hits are the blocks of each request's longest present prefix. The first
`warmup` share of the requests fills the store and is not counted, neither its hits nor its
writes. By tokens, a block counts as many as the prompt has in it, so that a partly filled last
block counts for less, and all prompt tokens are the whole; by blocks, each counts one. The share
of the optimal is that of the chosen weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

from kvstore.eviction import DEFAULT, POLICIES
from kvstore.replay.admission import ADMISSIONS
from kvstore.replay.model import ModelShape
from kvstore.replay.optimal import Future, infinite_hits, optimal_hits
from kvstore.replay.simulator import replay
from kvstore.replay.trace import Numbers, Trace

Weight = Literal["tokens", "blocks"]

DEFAULT_NAME, OPTIMAL_NAME = "default", "optimal"
SHARES = (0.01, 0.05, 0.1, 0.25, 0.5)
"""Capacities when none are given, as shares of the trace's different blocks."""


class Rates(TypedDict):
    """Hit rates, counted in blocks and in tokens."""

    block_hit_rate: float
    token_hit_rate: float


class Result(Rates):
    """One policy with one admission rule at one capacity."""

    policy: str
    admission: str
    capacity_blocks: int
    blocks_written: int
    share_of_optimal: float


class Document(TypedDict):
    """What `kvstore replay --json` prints."""

    trace: str
    requests: int
    blocks: int
    unique_blocks: int
    infinite: Rates
    results: list[Result]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run."""

    capacities_blocks: Sequence[int]
    policies: Sequence[str] = (DEFAULT,)
    admissions: Sequence[str] = ("all",)
    ttl_s: float | None = None
    warmup: float = 0.0
    weight: Weight = "tokens"

    def steps(self, trace: Trace) -> int:
        """Requests that will be replayed in all."""
        runs = len(_unique(self.policies)) * len(self.admissions) + 1
        return trace.requests * runs * len(self.capacities_blocks)


@dataclass(frozen=True, slots=True)
class Swept:
    """The document, and what a reader wants beside it."""

    document: Document
    saved_s: Sequence[float]
    """Prefill seconds that each result saved."""
    infinite_saved_s: float
    block_bytes: int
    cost_model: str
    """What the seconds and bytes are of, in a sentence or two."""


def default_capacities(trace: Trace) -> list[int]:
    """Some shares of the trace's different blocks."""
    return sorted({max(1, round(share * trace.unique_blocks)) for share in SHARES})


def block_bytes(trace: Trace, model: ModelShape) -> int:
    """KV bytes of one of the trace's blocks: the trace's own word, or the model's."""
    return trace.block_bytes or model.kv_bytes_per_token * trace.block_tokens


def _unique(policies: Sequence[str]) -> list[str]:
    return list(dict.fromkeys((*policies, DEFAULT)))


class _Counted:
    """The part of a trace that counts."""

    def __init__(self, trace: Trace, plan: Plan, model: ModelShape):
        self._trace = trace
        self._plan = plan
        self._model = model
        self._first = trace.first_counted(plan.warmup)
        self._blocks = int(trace.lengths[self._first :].sum())
        self._tokens = int(trace.prompt_tokens[self._first :].sum())

    def rates(self, hits: Numbers) -> Rates:
        tokens = int(self._trace.tokens_of(hits)[self._first :].sum())
        return {
            "block_hit_rate": self._share(int(hits[self._first :].sum()), self._blocks),
            "token_hit_rate": self._share(tokens, self._tokens),
        }

    def saved_s(self, hits: Numbers) -> float:
        return float(self._model.prefill_s(self._trace.tokens_of(hits)[self._first :]).sum())

    def result(
        self,
        policy: str,
        admission: str,
        capacity_blocks: int,
        hits: Numbers,
        stored: Numbers,
        optimal: Rates,
    ) -> Result:
        rates = self.rates(hits)
        best = self._weighted(optimal)
        return {
            "policy": policy,
            "admission": admission,
            "capacity_blocks": capacity_blocks,
            **rates,
            "blocks_written": int(stored[self._first :].sum()),
            "share_of_optimal": self._weighted(rates) / best if best else 1.0,
        }

    def _weighted(self, rates: Rates) -> float:
        by_tokens = self._plan.weight == "tokens"
        return rates["token_hit_rate"] if by_tokens else rates["block_hit_rate"]

    @staticmethod
    def _share(part: int, whole: int) -> float:
        return part / whole if whole else 0.0


def sweep(
    trace: Trace,
    plan: Plan,
    model: ModelShape,
    advance: Callable[[int], None] = lambda requests: None,
) -> Swept:
    """Replays the trace by the plan. `advance` hears of requests done, `plan.steps` in all."""
    counted = _Counted(trace, plan, model)
    infinite = infinite_hits(trace)
    future = Future(trace)
    results: list[Result] = []
    saved_s: list[float] = []
    for capacity in plan.capacities_blocks:
        best, stored = optimal_hits(future, capacity, advance)
        optimal = counted.rates(best)
        results.append(counted.result(OPTIMAL_NAME, OPTIMAL_NAME, capacity, best, stored, optimal))
        saved_s.append(counted.saved_s(best))
        for policy in _unique(plan.policies):
            for admission in plan.admissions:
                done = replay(
                    trace, POLICIES[policy], ADMISSIONS[admission], capacity, plan.ttl_s, advance
                )
                for name in (policy, DEFAULT_NAME) if policy == DEFAULT else (policy,):
                    results.append(
                        counted.result(name, admission, capacity, done.hits, done.stored, optimal)
                    )
                    saved_s.append(counted.saved_s(done.hits))
    document: Document = {
        "trace": trace.name,
        "requests": trace.requests,
        "blocks": trace.blocks,
        "unique_blocks": trace.unique_blocks,
        "infinite": counted.rates(infinite),
        "results": results,
    }
    size = block_bytes(trace, model)
    origin = "the recording's" if trace.block_bytes else f"{model.name}'s"
    stated = f"{model.cost_model} Bytes are {origin}, {size:,} a block."
    return Swept(document, saved_s, counted.saved_s(infinite), size, stated)
