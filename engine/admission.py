"""Load or recompute, store or skip: two decisions by measured cost (D8).

Both are values with a reason and the numbers behind it, so that a report can show what they
saved or lost. What they weigh:

*Load* the beginning of the found prefix whose loading saves the most time. Blocks are worth more
the deeper they stand, because attention makes late tokens dearer, and a tier's latency is paid
at the first block of a run. So within a run of one tier the gain is lowest somewhere inside and
highest at one of its ends: only ends of runs need comparing, and a near run behind a far one can
pay for both.

*Store* the beginning of the new blocks for which  Σ reuse · (prefill saved - load)  less what the
request waits for the store is highest, if that is positive, and if the expected gain is at least
`StorePolicy.gain_share_min` of the whole request. The last condition is what keeps a short prompt
with a long answer out: its prefill is a hundredth part of its time, and memory spent on it is
taken from a document that saves seconds. *Reuse* is the probability that the block is asked for
again while it is kept. It is 0 for what would displace better: in a *crowded* arena, what nobody
asked for before.

Where the costs are not known yet, both decide to try (see `engine.costs`).

Knows nothing of tokens' values, keys, servers or clocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from engine.costs import CostModel
from kvstore.errors import InvalidRequest
from kvstore.types import MissReason, SkipReason, TierName

GAIN_SHARE_MIN = 0.01
"""Expected gain, as a share of the request's whole time, that is worth a store.

The same 1 % that storing may cost a request that can't gain (D9): what is too small to count as
a loss is too small to count as a gain.
"""

STORE_TIERS = (TierName.CPU, TierName.REDIS)
"""Tiers that a stored block may be loaded from."""


class Override(StrEnum):
    """What a request may say about a decision."""

    DEFAULT = "default"
    ALWAYS = "always"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class StorePolicy:
    """The settings of the store decision. Raises InvalidRequest for a share outside 0 to 1."""

    override: Override = Override.DEFAULT
    gain_share_min: float = GAIN_SHARE_MIN

    def __post_init__(self) -> None:
        if not 0.0 <= self.gain_share_min <= 1.0:
            raise InvalidRequest(f"gain_share_min is a share, 0 to 1, not {self.gain_share_min}")


@dataclass(frozen=True, slots=True)
class LoadDecision:
    """Load the first `blocks` of what was found."""

    blocks: int
    reason: MissReason | None
    """Why the found blocks after them are not loaded; None if there are none."""
    load_s: float
    """Expected seconds to load the blocks."""
    prefill_saved_s: float
    """Expected seconds of prefill that they save, loading not deducted."""
    found_load_s: float
    """Expected seconds to load all that was found."""
    found_saved_s: float
    """Expected seconds of prefill that all that was found would save."""


@dataclass(frozen=True, slots=True)
class StoreDecision:
    """Store the first `blocks` of those that could be. The numbers are theirs, or, where none is
    stored, those of all."""

    blocks: int
    reason: SkipReason | None
    """Why the blocks after them are not stored; None if there are none."""
    gain_s: float
    """Seconds that a request that finds the blocks saves: prefill less loading, at least 0."""
    cost_s: float
    """Seconds that this request waits for the store."""
    request_s: float
    """Seconds of the whole request, what the gain is compared with."""
    reuse: float
    """Probability that the gain is had: the mean over the blocks, by what each one gains."""

    @property
    def expected_gain_s(self) -> float:
        """The gain times the probability that it is had."""
        return self.gain_s * self.reuse


def decide_load(
    costs: CostModel,
    runs: Sequence[tuple[TierName, int]],
    block_bytes: int,
    block_tokens: int,
    first_token: int = 0,
    override: Override = Override.DEFAULT,
) -> LoadDecision:
    """Decide how many of the found blocks to load.

    `runs` are the found blocks as (tier, number of blocks), in the order of the prefix. Their
    first token is token `first_token` of the prompt; the tokens before it need not be computed.
    The override ALWAYS loads all, NEVER loads none.
    """
    chosen = best = (0, 0.0, 0.0)
    best_gain_s = gain_s = load_s = saved_s = 0.0
    blocks = 0
    for tier, count in runs:
        run_load_s = costs.load_s(tier, count * block_bytes)
        run_saved_s = costs.saved_s(count * block_tokens, first_token + blocks * block_tokens)
        run_gain_s = run_saved_s - run_load_s
        measured = costs.prefill.known_for((blocks + count) * block_tokens)
        if not (measured and costs.tier(tier).known):
            run_gain_s = max(run_gain_s, 0.0)  # not measured, so assumed to pay
        blocks, gain_s = blocks + count, gain_s + run_gain_s
        load_s, saved_s = load_s + run_load_s, saved_s + run_saved_s
        if gain_s >= best_gain_s:
            best, best_gain_s = (blocks, load_s, saved_s), gain_s
    if override is Override.ALWAYS:
        chosen = (blocks, load_s, saved_s)
    elif override is Override.DEFAULT:
        chosen = best
    refused = MissReason.NOT_WORTH_LOADING
    if override is Override.NEVER:
        refused = MissReason.BY_REQUEST
    reason = refused if chosen[0] < blocks else None
    return LoadDecision(chosen[0], reason, chosen[1], chosen[2], load_s, saved_s)


def decide_store(
    costs: CostModel,
    policy: StorePolicy,
    reuse: Sequence[float],
    context: int,
    block_bytes: int,
    block_tokens: int,
    request_s: float,
    crowded: bool = False,
    tiers: Sequence[TierName] = STORE_TIERS,
) -> StoreDecision:
    """Decide how many of these blocks to store, from the first one on.

    `reuse` has for each block the probability that it is asked for again; `crowded` says that it is
    0 where the block would displace better. The first one's first token has `context` tokens
    before it.
    `request_s` is the whole request's time, measured or from `expected_request_s`. `tiers` are
    those the blocks may be loaded from later; the quickest counts.
    """
    chosen = whole = StoreDecision(0, None, 0.0, 0.0, request_s, 0.0)
    expected_s = gain_s = 0.0
    best_s = -math.inf
    for end, chance in _runs_of(reuse):
        size_bytes = end * block_bytes
        load_s = min((costs.load_s(tier, size_bytes) for tier in tiers), default=0.0)
        run_gain_s = costs.saved_s(end * block_tokens, context) - load_s - gain_s
        gain_s += run_gain_s
        expected_s += chance * run_gain_s
        cost_s = costs.store_s(size_bytes)
        mean = min(max(expected_s / gain_s, 0.0), 1.0) if gain_s > 0 else 0.0
        whole = StoreDecision(end, None, max(gain_s, 0.0), cost_s, request_s, mean)
        if expected_s - cost_s >= best_s:
            chosen, best_s = whole, expected_s - cost_s
    reason: SkipReason | None = None
    if policy.override is Override.NEVER:
        reason = SkipReason.BY_REQUEST
    elif policy.override is Override.ALWAYS or not costs.prefill.known_for(
        len(reuse) * block_tokens
    ):
        return whole  # what was not measured is assumed to pay
    elif chosen.gain_s <= 0.0 < len(reuse):
        reason = SkipReason.COSTS_MORE_THAN_IT_SAVES
    elif crowded and not any(reuse):
        reason = SkipReason.DISPLACES_MORE
    elif chosen.expected_gain_s < policy.gain_share_min * request_s:
        reason = SkipReason.GAIN_TOO_SMALL
    elif best_s <= 0.0:
        reason = SkipReason.COSTS_MORE_THAN_IT_SAVES
    if reason is not None:
        return replace(whole, blocks=0, reason=reason)
    rest = SkipReason.DISPLACES_MORE if crowded else SkipReason.COSTS_MORE_THAN_IT_SAVES
    return replace(chosen, reason=rest if chosen.blocks < len(reuse) else None)


def _runs_of(reuse: Sequence[float]) -> list[tuple[int, float]]:
    """The ends of the runs of blocks with one probability, and the probability.

    Only there the best place to stop can be: within a run each block is worth more than the one
    before it.
    """
    ends = [at for at in range(1, len(reuse)) if reuse[at] != reuse[at - 1]]
    return [(end, reuse[end - 1]) for end in [*ends, len(reuse)] if reuse]


def expected_request_s(
    costs: CostModel, prompt_tokens: int, expected_output_tokens: int, context: int = 0
) -> float:
    """Return the seconds of a request: prefill of the prompt after `context`, then decoding.

    The first `context` tokens of the prompt are there already.
    """
    prefill_s = costs.prefill_s(prompt_tokens - context, context)
    return prefill_s + costs.decode_s(expected_output_tokens)
