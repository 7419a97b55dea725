"""Load or recompute, store or skip: two decisions by measured cost (D8).

Both are values with a reason and the numbers behind it, so that a report can show what they
saved or lost. What they weigh:

*Load* the beginning of the found prefix whose loading saves the most time. Blocks are worth more
the deeper they stand, because attention makes late tokens dearer, and a tier's latency is paid
at the first block of a run. So within a run of one tier the gain is lowest somewhere inside and
highest at one of its ends: only ends of runs need comparing, and a near run behind a far one can
pay for both.

*Store* if  reuse · (prefill saved - load) > what the request waits for the store,  and if that
expected gain is at least `StorePolicy.gain_share_min` of the whole request. The second condition
is what keeps a short prompt with a long answer out: its prefill is a hundredth part of its
time, and memory spent on it is taken from a document that saves seconds. For the same reason
tokens of the prompt and of the answer don't count alike, see `expected_reuse`.

Where the costs are not known yet, both decide to try (see `engine.costs`).

Knows nothing of tokens' values, keys, servers or clocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from engine.costs import CostModel
from kvstore.errors import InvalidRequest
from kvstore.types import MissReason, SkipReason, TierName

PROMPT_REUSE_PRIOR = 0.5
"""Probability that a block of prompt tokens is asked for again, before anything is known of it.

Laplace's rule for an event never tried: (0 + 1) / (0 + 2). It is meant to be optimistic. A wrong
store costs one copy beside the request; a wrong skip costs the prefill again.
"""

ANSWER_REUSE_PRIOR = 0.05
"""The same for generated tokens.

They come back only if this very conversation goes on, and then they come back in its next
prompt, where they count as prompt tokens. So a low value only delays their storing by one turn,
while a high one would store one-off answers, and the longer they are, the sooner.
"""

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


@dataclass(frozen=True, slots=True)
class StoreDecision:
    """Store the blocks, or skip them for `reason`."""

    store: bool
    reason: SkipReason | None
    gain_s: float
    """Seconds that a request that finds the blocks saves: prefill less loading, at least 0."""
    cost_s: float
    """Seconds that this request waits for the store."""
    request_s: float
    """Seconds of the whole request, what the gain is compared with."""
    reuse_probability: float

    @property
    def expected_gain_s(self) -> float:
        """The gain times the probability that it is had."""
        return self.gain_s * self.reuse_probability


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
    return LoadDecision(chosen[0], reason, chosen[1], chosen[2])


def decide_store(
    costs: CostModel,
    policy: StorePolicy,
    tokens_new: int,
    context: int,
    block_bytes: int,
    block_tokens: int,
    reuse_probability: float,
    request_s: float,
    tiers: Sequence[TierName] = STORE_TIERS,
) -> StoreDecision:
    """Decide whether to store the full blocks among `tokens_new` tokens after `context` tokens.

    `request_s` is the whole request's time, measured or from `expected_request_s`. `tiers` are
    those the blocks may be loaded from later; the quickest counts.
    """
    blocks = tokens_new // block_tokens
    size_bytes = blocks * block_bytes
    load_s = min((costs.load_s(tier, size_bytes) for tier in tiers), default=0.0)
    gain_s = max(costs.saved_s(blocks * block_tokens, context) - load_s, 0.0)
    cost_s = costs.store_s(size_bytes)
    expected_s = reuse_probability * gain_s
    reason: SkipReason | None = None
    if policy.override is Override.NEVER:
        reason = SkipReason.BY_REQUEST
    elif policy.override is Override.ALWAYS or not costs.prefill.known_for(tokens_new):
        pass  # what was not measured is assumed to pay
    elif gain_s <= 0.0 < blocks:
        reason = SkipReason.COSTS_MORE_THAN_IT_SAVES
    elif expected_s < policy.gain_share_min * request_s:
        reason = SkipReason.GAIN_TOO_SMALL
    elif expected_s <= cost_s:
        reason = SkipReason.COSTS_MORE_THAN_IT_SAVES
    return StoreDecision(reason is None, reason, gain_s, cost_s, request_s, reuse_probability)


def expected_reuse(first_token: int, prompt_tokens: int, end_token: int) -> float:
    """Return the mean reuse probability of tokens `first_token` to `end_token`, end excluded.

    Tokens from `prompt_tokens` on were generated. An estimate by depth and history can take the
    place of the two priors without a change to `decide_store`.
    """
    tokens = end_token - first_token
    if tokens <= 0:
        return 0.0
    prompt = min(max(prompt_tokens - first_token, 0), tokens)
    return (prompt * PROMPT_REUSE_PRIOR + (tokens - prompt) * ANSWER_REUSE_PRIOR) / tokens


def expected_request_s(
    costs: CostModel, prompt_tokens: int, expected_output_tokens: int, context: int = 0
) -> float:
    """Return the seconds of a request: prefill of the prompt after `context`, then decoding.

    The first `context` tokens of the prompt are there already.
    """
    prefill_s = costs.prefill_s(prompt_tokens - context, context)
    return prefill_s + costs.decode_s(expected_output_tokens)
