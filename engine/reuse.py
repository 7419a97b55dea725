"""How likely the blocks of a finished request are asked for again.

Of prompt tokens the server knows best: it sees what all engines ask for, and says so with each
lookup. Generated tokens nobody has asked for yet. They come back only if this very conversation
goes on, in its next prompt; how often that happens, an engine sees by itself.

Pure: knows nothing of servers, costs or clocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvstore.types import BlockKey

PROMPT_PRIOR = 0.5
"""Of a block of prompt tokens that nothing is known of.

Laplace's rule for an event never tried: (0 + 1) / (0 + 2). It is meant to be optimistic. A wrong
store costs one copy beside the request; a wrong skip costs the prefill again.
"""

ANSWER_PRIOR = 0.05
"""Of a block of generated tokens, before conversations were seen to go on.

A low value only delays their storing by one turn, since in the next prompt they are prompt
tokens; a high one would store one-off answers, and the longer they are, the sooner.
"""

ANSWER_PRIOR_ENDS = 20
"""How many requests have to end until what was seen of them counts as much as the prior."""

ENDS_KEPT = 4096
"""Ended requests whose return is waited for, in an hour or a day of one engine."""


class Answers:
    """Of how many requests the answer comes back in a later prompt. Not thread-safe."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[BlockKey, None] = OrderedDict()
        self._ended = self._returned = 0.0

    def note_prompt(self, keys: Sequence[BlockKey]) -> None:
        """A prompt has these blocks."""
        waiting = self._waiting
        for key in keys:
            if key in waiting:
                del waiting[key]
                self._returned += 1

    def note_end(self, last: BlockKey) -> None:
        """A request has ended; this block, its last one, has generated tokens."""
        self._waiting[last] = None
        self._ended += 1
        if len(self._waiting) > ENDS_KEPT:
            self._waiting.popitem(last=False)
        if self._ended > ENDS_KEPT:  # what was long ago counts less
            self._ended /= 2
            self._returned /= 2

    @property
    def probability(self) -> float:
        """That an answer is asked for again."""
        prior = ANSWER_PRIOR * ANSWER_PRIOR_ENDS
        return min((self._returned + prior) / (self._ended + ANSWER_PRIOR_ENDS), 1.0)


def reuse_of(
    first: int,
    end: int,
    prompt_tokens: int,
    block_tokens: int,
    known: Sequence[float],
    known_first: int,
    answer: float,
) -> list[float]:
    """The probability for each block from `first` to `end`, end excluded.

    Tokens from `prompt_tokens` on were generated, and come back with probability `answer`.
    `known` has the prompt's blocks from `known_first` on, as the server sees them; the ones after
    them are like the last of them. A block of both kinds of tokens counts by their shares.
    """
    chances = []
    for block in range(first, end):
        at = min(block - known_first, len(known) - 1)
        asked = known[at] if at >= 0 else PROMPT_PRIOR
        share = min(max(prompt_tokens / block_tokens - block, 0.0), 1.0)
        chances.append(share * asked + (1.0 - share) * answer)
    return chances
