"""Turns a lookup's answer into what to load, compute and store, and into counts that add up.

Words: a *prefix* is a run of blocks from the prompt's first token. A *hit* is a block that was
loaded and used. The *loadable* blocks of a prompt are its full ones, but never all of its
tokens: a model needs at least one token to compute in order to give the next.

Every prompt token is counted once, as a hit of one tier or as a miss with one reason:

    |---- loaded ----|---- found, not loaded ----|---- not found ----|-- tail --|
      hits by tier     why loading ended there     why it isn't there   TAIL

Pure: knows nothing of keys, buffers, servers or clocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from engine.admission import LoadDecision, Override, decide_load
from engine.costs import CostModel
from kvstore.errors import InvalidRequest
from kvstore.types import BlockCount, MissReason, TierName

Run = tuple[TierName, int]
"""So many blocks of a prefix, one after the other, in one tier."""

Counts = tuple[dict[TierName, BlockCount], dict[MissReason, BlockCount]]
"""Hits and misses; their tokens, blocks and bytes add up to the prompt's."""


@dataclass(frozen=True, slots=True)
class PromptShape:
    """How long a prompt is, and in which blocks it is counted."""

    prompt_tokens: int
    block_tokens: int
    block_bytes: int

    def __post_init__(self) -> None:
        if self.prompt_tokens < 0 or self.block_tokens < 1 or self.block_bytes < 0:
            raise InvalidRequest(f"impossible sizes: {self}")

    @property
    def loadable_blocks(self) -> int:
        """Full blocks that leave at least one token to compute."""
        return max(self.prompt_tokens - 1, 0) // self.block_tokens

    def total(self) -> BlockCount:
        """The whole prompt: all tokens, the full blocks among them, those blocks' bytes."""
        blocks = self.prompt_tokens // self.block_tokens
        return BlockCount(self.prompt_tokens, blocks, blocks * self.block_bytes)

    def count(self, blocks: int) -> BlockCount:
        """So many full blocks."""
        return BlockCount(blocks * self.block_tokens, blocks, blocks * self.block_bytes)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What to load, and where computing begins if all of it arrives."""

    shape: PromptShape
    runs: tuple[Run, ...]
    """What to load, in prefix order."""
    first_computed_token: int
    found_blocks: int
    """Loadable blocks that the store has, whether they are to be loaded or not."""
    next_reason: MissReason | None
    """Why the block after the found ones isn't there; None if all loadable ones are."""
    decision: LoadDecision
    pool_tokens: int
    hits: Mapping[TierName, BlockCount]
    misses: Mapping[MissReason, BlockCount]

    @property
    def blocks(self) -> int:
        """How many blocks to load."""
        return count_of(self.runs)

    def settle(self, loaded: Sequence[Run], failed: MissReason | None = None) -> Counts:
        """Return hits and misses as they came out: `loaded` blocks arrived.

        `failed` is why the first planned block that didn't arrive didn't. It is ignored if all
        did; then the found blocks after them count as the decision said. Raises InvalidRequest
        if blocks are missing without a reason.
        """
        arrived = count_of(loaded)
        reason = failed if arrived < self.blocks else self.decision.reason
        return account(
            self.shape.prompt_tokens,
            self.shape.block_tokens,
            self.shape.block_bytes,
            loaded,
            reason,
            found_blocks=self.found_blocks,
            beyond=self.next_reason,
            pool_tokens=self.pool_tokens,
        )


def plan_load(
    prompt_tokens: int,
    block_tokens: int,
    block_bytes: int,
    runs: Sequence[Run],
    next_reason: MissReason | None,
    costs: CostModel,
    override: Override = Override.DEFAULT,
    pool_tokens: int = 0,
    settled_blocks: int = 0,
) -> LoadPlan:
    """Plan what to load of the found `runs`.

    `runs` is the found prefix from the prompt's first block, each block in its nearest tier; if
    it is longer than what is loadable, the rest is left out. `next_reason` is why the block
    after it isn't there. `pool_tokens` is given where the engine's own pool has smaller blocks
    and ends inside one of these; the runs begin with the pool's whole blocks. The first
    `settled_blocks` need no copying, and so no decision.

    Raises InvalidRequest if `next_reason` is None and loadable blocks are missing.
    """
    shape = PromptShape(prompt_tokens, block_tokens, block_bytes)
    found = cut_runs(runs, shape.loadable_blocks)
    found_blocks = count_of(found)
    open_runs = runs_after(found, settled_blocks)
    decision = decide_load(
        costs, open_runs, block_bytes, block_tokens, settled_blocks * block_tokens, override
    )
    decision = replace(decision, blocks=decision.blocks + found_blocks - count_of(open_runs))
    chosen = cut_runs(found, decision.blocks)
    hits, misses = account(
        prompt_tokens,
        block_tokens,
        block_bytes,
        chosen,
        decision.reason,
        found_blocks=found_blocks,
        beyond=next_reason,
        pool_tokens=pool_tokens,
    )
    first_computed = decision.blocks * block_tokens
    return LoadPlan(
        shape,
        chosen,
        first_computed,
        found_blocks,
        next_reason,
        decision,
        pool_tokens,
        hits,
        misses,
    )


def cut_runs(runs: Sequence[Run], blocks: int) -> tuple[Run, ...]:
    """Return the first `blocks` blocks of `runs`; empty runs are dropped."""
    cut: list[Run] = []
    for tier, count in runs:
        if count < 0:
            raise InvalidRequest(f"a run of {count} blocks")
        taken = min(count, blocks)
        if taken > 0:
            cut.append((tier, taken))
            blocks -= taken
    return tuple(cut)


def runs_after(runs: Sequence[Run], blocks: int) -> tuple[Run, ...]:
    """Return `runs` without their first `blocks` blocks."""
    left: list[Run] = []
    for tier, count in runs:
        dropped = min(count, blocks)
        blocks -= dropped
        if count > dropped:
            left.append((tier, count - dropped))
    return tuple(left)


def count_of(runs: Sequence[Run]) -> int:
    """Return how many blocks the runs have."""
    return sum(count for _, count in runs)


def tier_at(runs: Sequence[Run], position: int) -> TierName:
    """Return the tier of the block at `position`. Raises InvalidRequest beyond the runs' end."""
    for tier, count in runs:
        if position < count:
            return tier
        position -= count
    raise InvalidRequest(f"the runs end {position + 1} blocks before that position")


def account(
    prompt_tokens: int,
    block_tokens: int,
    block_bytes: int,
    loaded: Sequence[Run],
    reason: MissReason | None,
    *,
    found_blocks: int | None = None,
    beyond: MissReason | None = None,
    pool_tokens: int = 0,
) -> Counts:
    """Return hits by tier and misses by reason; together they are exactly the prompt.

    `loaded` are the blocks that arrived, `reason` is why the next one didn't. It counts for all
    loadable blocks after them, unless `found_blocks` says how many the store has: then those
    after the found ones count for `beyond`. What can never be loaded, the tokens after the last
    loadable block, counts as TAIL; if the prompt ends with a full block, that is a block. If
    the engine's own pool holds `pool_tokens`, more than whole blocks of them, the tokens that it
    has of the next block are its hits as well.

    Raises InvalidRequest for more blocks loaded than are loadable, or a missing reason.
    """
    shape = PromptShape(prompt_tokens, block_tokens, block_bytes)
    loadable = shape.loadable_blocks
    hits: dict[TierName, BlockCount] = {}
    for tier, count in cut_runs(loaded, loadable + 1):
        hits[tier] = hits.get(tier, BlockCount()) + shape.count(count)
    arrived = sum(hit.blocks for hit in hits.values())
    if arrived > loadable:
        raise InvalidRequest(f"more blocks loaded than the {loadable} that can be: {loaded!r}")

    found = loadable if found_blocks is None else max(arrived, min(found_blocks, loadable))
    misses: dict[MissReason, BlockCount] = {}
    for why, blocks in ((reason, found - arrived), (beyond, loadable - found)):
        if blocks == 0:
            continue
        if why is None:
            raise InvalidRequest(f"{blocks} blocks were not loaded, and no reason is given")
        misses[why] = misses.get(why, BlockCount()) + shape.count(blocks)
    tail_blocks = shape.total().blocks - loadable
    tail = BlockCount(
        prompt_tokens - loadable * block_tokens, tail_blocks, tail_blocks * block_bytes
    )
    if tail.tokens:
        misses[MissReason.TAIL] = misses.get(MissReason.TAIL, BlockCount()) + tail
    partial = BlockCount(pool_tokens % block_tokens, 0, 0)
    if partial.tokens:
        block = pool_tokens // block_tokens
        if block < arrived:
            tier = tier_at(loaded, block)
            hits[tier] += BlockCount(-partial.tokens)
        else:
            missed = reason if block < found else beyond if block < loadable else MissReason.TAIL
            if missed is None:
                raise InvalidRequest("a block was not loaded, and no reason is given")
            misses[missed] += BlockCount(-partial.tokens)
        hits[TierName.GPU] = hits.get(TierName.GPU, BlockCount()) + partial
    return hits, misses


def storable_blocks(
    sequence_tokens: int, computed_from: int, present_blocks: int, block_tokens: int
) -> tuple[int, int]:
    """Return the first block that a store could add, and how many from there.

    `sequence_tokens` have their KV in the engine, prompt and answer together; those before
    `computed_from` were loaded. `present_blocks` is how long a prefix the store has. Counted
    from the lower of the two: what the engine found in its own memory may be missing from the
    store, and a hole would make all that follows useless; and what the store has but could not
    deliver, being corrupt, slow or far, was computed again and is worth offering. The store
    answers "present" for what it does not need.
    """
    if min(sequence_tokens, computed_from, present_blocks) < 0 or block_tokens < 1:
        raise InvalidRequest("impossible sizes of a sequence to store")
    full = sequence_tokens // block_tokens
    first = min(computed_from // block_tokens, present_blocks, full)
    return first, full - first
