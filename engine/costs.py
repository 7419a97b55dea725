"""What things cost, in seconds, as measured: prefill, decode, loading from a tier, storing.

Each cost is a sum of non-negative coefficients times amounts of work, fitted by
`engine.estimate`. Costs are values: `observe_*` returns a new one, the old stays valid.

Until `OBSERVATIONS_TO_KNOW` calls were seen, a cost is not `known`. Decisions then assume that
loading and storing pay, because what is never tried is never measured. The priors say the same:
slow computing, quick tiers.

Knows nothing of clocks, tiers' code or requests: seconds come in as arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Self

from engine.estimate import Estimate, checked_fields, given
from kvstore.errors import InvalidRequest
from kvstore.types import TierName


@dataclass(frozen=True, slots=True)
class _Cost:
    estimate: Estimate

    @property
    def known(self) -> bool:
        """Whether enough was measured to trust the numbers."""
        return self.estimate.known


@dataclass(frozen=True, slots=True)
class PrefillCost(_Cost):
    """Seconds to prefill n tokens after c: `fixed + linear * n + quadratic * n * (c + n / 2)`.

    The last term is attention: token number i looks at i others.
    """

    estimate: Estimate = Estimate((0.0, 0.0, 1e-3))
    """Coefficients in the order fixed, quadratic, linear."""

    @classmethod
    def of(cls, fixed_s: float, linear_s: float, quadratic_s: float) -> Self:
        """Return the cost with these constants, taken as known."""
        return cls(given(fixed_s, quadratic_s, linear_s))

    @staticmethod
    def _work(tokens: int, context: int) -> tuple[float, float, float]:
        return (1.0, tokens * (context + tokens / 2), float(tokens))

    def known_for(self, tokens: int) -> bool:
        """Whether calls of that size were measured, not only smaller ones.

        An engine whose prompts all hit computes a few tokens a call. From those, what a call
        costs and what a token costs can't be told apart, and a long prefill may look free.
        """
        longest = max((seen.work[-1] for seen in self.estimate.kept), default=float(tokens))
        return self.known and tokens <= longest

    def seconds(self, tokens: int, context: int) -> float:
        """Seconds of one call that computes `tokens` after `context` tokens."""
        return self.estimate.predict(*self._work(tokens, context)) if tokens > 0 else 0.0

    def marginal_s(self, tokens: int, context: int) -> float:
        """Seconds that the call is shorter without these tokens; it still is a call."""
        _, attention, count = self._work(tokens, context)
        return self.estimate.predict(0.0, attention, count)

    def observe(self, tokens: int, context: int, seconds: float) -> Self:
        """Return the cost after one more measured call."""
        return replace(self, estimate=self.estimate.observe(seconds, *self._work(tokens, context)))


@dataclass(frozen=True, slots=True)
class DecodeCost(_Cost):
    """Seconds of each generated token, as this request's share of the engine's time."""

    estimate: Estimate = Estimate((0.01,))

    @classmethod
    def of(cls, token_s: float) -> Self:
        """Return the cost with this constant, taken as known."""
        return cls(given(token_s))

    def seconds(self, tokens: int) -> float:
        """Seconds to generate `tokens`."""
        return self.estimate.predict(float(tokens))

    def observe(self, tokens: int, seconds: float) -> Self:
        """Return the cost after one more answer of `tokens`."""
        return replace(self, estimate=self.estimate.observe(seconds, float(tokens)))


@dataclass(frozen=True, slots=True)
class _BytesCost(_Cost):
    """Seconds to move bytes: `latency_s + bytes / bandwidth`."""

    @classmethod
    def of(cls, latency_s: float, bytes_per_s: float) -> Self:
        """Return the cost with these constants, taken as known."""
        return cls(given(latency_s, 1.0 / bytes_per_s))

    @classmethod
    def prior(cls, latency_s: float, bytes_per_s: float) -> Self:
        """Return the cost that is assumed before anything was measured."""
        return cls(Estimate((latency_s, 1.0 / bytes_per_s)))

    def seconds(self, size_bytes: int) -> float:
        """Seconds of one batch of `size_bytes`; nothing costs nothing."""
        return self.estimate.predict(1.0, float(size_bytes)) if size_bytes > 0 else 0.0

    def observe(self, size_bytes: int, seconds: float) -> Self:
        """Return the cost after one more measured batch."""
        return replace(self, estimate=self.estimate.observe(seconds, 1.0, float(size_bytes)))


class TierCost(_BytesCost):
    """Seconds to load one batch from a tier, queueing included."""

    __slots__ = ()


class StoreCost(_BytesCost):
    """Seconds that storing one batch adds to its request; what happens later costs nothing."""

    __slots__ = ()


PRIOR_TIERS: Mapping[TierName, TierCost] = MappingProxyType(
    {
        # The engine's own blocks are used where they are.
        TierName.GPU: TierCost.prior(0.0, 1e12),
        TierName.CPU: TierCost.prior(0.0005, 4e9),
        TierName.REDIS: TierCost.prior(0.001, 0.7e9),
    }
)
PRIOR_STORE = StoreCost.prior(0.0005, 4e9)


@dataclass(frozen=True, slots=True)
class CostModel:
    """All costs of one engine. The default is the cold start: nothing known, all optimistic."""

    prefill: PrefillCost = PrefillCost()
    decode: DecodeCost = DecodeCost()
    store: StoreCost = PRIOR_STORE
    tiers: Mapping[TierName, TierCost] = field(default_factory=lambda: dict(PRIOR_TIERS))

    def tier(self, tier: TierName) -> TierCost:
        """The tier's cost, or its prior."""
        return self.tiers.get(tier, PRIOR_TIERS[tier])

    def prefill_s(self, tokens: int, context: int = 0) -> float:
        """Seconds of a prefill call of `tokens` after `context` tokens."""
        return self.prefill.seconds(tokens, context)

    def saved_s(self, tokens: int, context: int) -> float:
        """Prefill seconds saved if these tokens' KV is there; at least one call remains."""
        return self.prefill.marginal_s(tokens, context)

    def decode_s(self, tokens: int) -> float:
        """Seconds to generate `tokens`."""
        return self.decode.seconds(tokens)

    def load_s(self, tier: TierName, size_bytes: int) -> float:
        """Seconds to load one batch of `size_bytes` from `tier`."""
        return self.tier(tier).seconds(size_bytes)

    def store_s(self, size_bytes: int) -> float:
        """Seconds that a request waits in order that `size_bytes` get stored."""
        return self.store.seconds(size_bytes)

    def observe_prefill(self, tokens: int, context: int, seconds: float) -> Self:
        """Return the model after one measured prefill call."""
        return replace(self, prefill=self.prefill.observe(tokens, context, seconds))

    def observe_decode(self, tokens: int, seconds: float) -> Self:
        """Return the model after one measured answer."""
        return replace(self, decode=self.decode.observe(tokens, seconds))

    def observe_load(self, tier: TierName, size_bytes: int, seconds: float) -> Self:
        """Return the model after one measured load."""
        return self._with_tier(tier, self.tier(tier).observe(size_bytes, seconds))

    def observe_store(self, size_bytes: int, seconds: float) -> Self:
        """Return the model after one measured wait for a store."""
        return replace(self, store=self.store.observe(size_bytes, seconds))

    def hinted(self, tier: TierName, latency_s: float, bytes_per_s: float) -> Self:
        """Return the model with these costs of a tier that it has not measured itself.

        As it is, if it has, or if `bytes_per_s` is 0: nobody knows.
        """
        if self.tier(tier).known or not bytes_per_s:
            return self
        return self._with_tier(tier, TierCost.of(latency_s, bytes_per_s))

    def after_refused_load(self, tier: TierName) -> Self:
        """Return the model after a decision not to load from `tier`.

        A refusal measures nothing. Without this step, a tier that was slow for a minute would
        never be asked again; with it, it gets another try after some tens of refusals.
        """
        eased = self.tier(tier).estimate.relaxed(PRIOR_TIERS[tier].estimate.coefficients)
        return self._with_tier(tier, TierCost(eased))

    def after_refused_store(self) -> Self:
        """Return the model after a decision that storing costs too much, for the same reason."""
        eased = self.store.estimate.relaxed(PRIOR_STORE.estimate.coefficients)
        return replace(self, store=StoreCost(eased))

    def _with_tier(self, tier: TierName, cost: TierCost) -> Self:
        return replace(self, tiers={**self.tiers, tier: cost})

    def to_dict(self) -> dict[str, Any]:
        """Return the model as JSON-able values."""
        return {
            "version": 1,
            "prefill": self.prefill.estimate.to_dict(),
            "decode": self.decode.estimate.to_dict(),
            "store": self.store.estimate.to_dict(),
            "tiers": {str(tier): cost.estimate.to_dict() for tier, cost in self.tiers.items()},
        }

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Rebuild what `to_dict` returned. Raises InvalidRequest for anything else."""
        given = checked_fields(data, {"version", "prefill", "decode", "store", "tiers"})
        if given["version"] != 1:
            raise InvalidRequest(f"unknown version of a cost model: {given['version']!r:.50}")
        if not isinstance(given["tiers"], dict) or not set(given["tiers"]) <= set(TierName):
            raise InvalidRequest(f"tiers must be among {[str(tier) for tier in TierName]}")
        return cls(
            PrefillCost(Estimate.from_dict(given["prefill"], 3)),
            DecodeCost(Estimate.from_dict(given["decode"], 1)),
            StoreCost(Estimate.from_dict(given["store"], 2)),
            {
                TierName(name): TierCost(Estimate.from_dict(cost, 2))
                for name, cost in given["tiers"].items()
            },
        )
