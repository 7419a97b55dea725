"""One estimator for all costs: non-negative coefficients times amounts of work, robustly fitted.

An estimate is a value: `observe` returns a new one, the old stays valid, and the same
observations in the same order give the same estimate on every host.

How an estimate follows measurements, and why:

- *Relative errors.* A 20 ms request must count as much as a 20 s one, or the short lengths,
  which are the close decisions, would never be fitted.
- *The first observation is thrown away.* It pays for compilation, page faults, connections and
  growing allocators, sometimes a hundredfold, and nothing is known yet that could expose it.
- *Outliers lose their weight.* Times are disturbed in one direction, by a few slow calls. The
  weights are Cauchy's, around a width that is the median error; so a few calls are ignored,
  while a new regime, once it makes up the weighted half, is followed.
- *The past fades.* An observation's weight halves every `HALF_LIFE` observations, but not below
  `WEIGHT_MIN`, and a few of each size class are kept: a day of short prompts must not make the
  engine forget what a long one costs.
- *What can't be told apart stays as it was.* If all prompts are equally long, then fixed and
  linear parts can't be separated. The fit scales the last shape and moves away from it only as
  far as the data asks.

Knows nothing of what the work is, or of clocks: seconds come in as arguments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidRequest

Floats = npt.NDArray[np.float64]

OBSERVATIONS_TO_KNOW = 4
"""Calls after which an estimate is trusted: one is thrown away, a median needs three."""

HALF_LIFE = 8
"""Observations after which one's weight has halved."""

WEIGHT_MIN = 0.02
"""Weight that the last observations of a size class keep, however old they are."""

KEPT_PER_SIZE = 8
"""Observations kept of each size class; a class spans a factor of two."""

KEPT_MAX = 64
"""Observations kept in all."""

RELAX_SHARE = 0.05
"""Share of the way back to its prior that an estimate goes at each refusal."""

_SECONDS_MIN = 1e-9
_ERROR_WIDTH_MIN = 0.1
_SHAPE_WEIGHT = 1e-3
_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Observation:
    """One measured call: `seconds` for `work`, the `index`-th that was seen."""

    work: tuple[float, ...]
    seconds: float
    index: int

    def size_class(self) -> int:
        """The power of two that the call's size, its last amount of work, is below."""
        return int(self.work[-1]).bit_length()


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds as `Σ coefficient · work`, learnt from observations."""

    coefficients: tuple[float, ...]
    seen: int = 0
    kept: tuple[Observation, ...] = ()

    @property
    def known(self) -> bool:
        """Whether enough was seen to trust the coefficients."""
        return self.seen >= OBSERVATIONS_TO_KNOW

    def predict(self, *work: float) -> float:
        """Seconds for `work`, one amount for each coefficient."""
        return math.fsum(c * w for c, w in zip(self.coefficients, work, strict=True))

    def observe(self, seconds: float, *work: float) -> Self:
        """Return the estimate after one more call. Raises InvalidRequest for impossible values."""
        if not (math.isfinite(seconds) and seconds >= 0):
            raise InvalidRequest(f"a duration is finite and not negative, not {seconds}")
        if not all(math.isfinite(amount) and amount >= 0 for amount in work) or work[-1] <= 0:
            raise InvalidRequest(f"an observed call has a finite, positive size, not {work}")
        if self.seen == 0:
            return replace(self, seen=1)
        # A coarse clock may say zero; a relative error needs a positive time.
        new = Observation(work, max(seconds, _SECONDS_MIN), self.seen)
        kept = _remember(self.kept, new)
        return replace(
            self, coefficients=_fit(kept, self.coefficients), seen=self.seen + 1, kept=kept
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists and numbers that `from_dict` accepts."""
        kept = [[one.index, one.seconds, *one.work] for one in self.kept]
        return {"coefficients": list(self.coefficients), "seen": self.seen, "kept": kept}

    @classmethod
    def from_dict(cls, data: object, width: int) -> Self:
        """Rebuild an estimate of `width` coefficients. Raises InvalidRequest for anything odd."""
        given = checked_fields(data, {"coefficients", "seen", "kept"})
        seen, rows = given["seen"], given["kept"]
        if not isinstance(seen, int) or isinstance(seen, bool) or seen < 0:
            raise InvalidRequest(f"seen must be a count, not {seen!r}")
        if not isinstance(rows, list) or len(rows) > KEPT_MAX:
            raise InvalidRequest(f"kept must be a list of at most {KEPT_MAX} observations")
        kept = []
        for row in rows:
            index, seconds, *work = checked_numbers(row, width + 2)
            if seconds <= 0 or work[-1] <= 0 or index != int(index):
                raise InvalidRequest(f"not an observation: {row!r}")
            kept.append(Observation(tuple(work), seconds, int(index)))
        order = [one.index for one in kept]
        if order != sorted(set(order)) or (order and order[-1] >= seen):
            raise InvalidRequest("observations must be in order, each below the number seen")
        return cls(tuple(checked_numbers(given["coefficients"], width)), seen, tuple(kept))

    def relaxed(self, prior: tuple[float, ...]) -> Self:
        """Return an estimate one small step nearer to `prior`, where that is lower."""
        moved = tuple(
            c + RELAX_SHARE * min(p - c, 0.0) for c, p in zip(self.coefficients, prior, strict=True)
        )
        return replace(self, coefficients=moved)


def _remember(kept: tuple[Observation, ...], new: Observation) -> tuple[Observation, ...]:
    """Append `new`; drop the oldest of its class, then the oldest of all, over the limits."""
    peers = [one.index for one in kept if one.size_class() == new.size_class()]
    if len(peers) >= KEPT_PER_SIZE:
        kept = tuple(one for one in kept if one.index != peers[0])
    return (*kept, new)[-KEPT_MAX:]


def _fit(kept: tuple[Observation, ...], start: tuple[float, ...]) -> tuple[float, ...]:
    """Non-negative coefficients with robustly small relative errors, near the shape of `start`."""
    # Divided by its seconds, each row should predict 1: that makes the errors relative.
    rows = np.array([[amount / one.seconds for amount in one.work] for one in kept])
    age = kept[-1].index - np.array([one.index for one in kept], dtype=np.float64)
    recency = np.maximum(0.5 ** (age / HALF_LIFE), WEIGHT_MIN)
    shape = np.array(start)
    guess = shape / math.exp(_weighted_median(_log_errors(rows, shape), recency))
    shape = guess
    for _ in range(_ROUNDS):
        errors = _log_errors(rows, guess)
        width = max(_ERROR_WIDTH_MIN, 1.5 * _weighted_median(np.abs(errors), recency))
        guess = _solve(rows, recency / (1.0 + (errors / width) ** 2), shape)
    return tuple(float(value) for value in guess)


def _log_errors(rows: Floats, coefficients: Floats) -> Floats:
    logs: Floats = np.log(np.maximum(rows @ coefficients, 1e-12))
    return logs


def _weighted_median(values: Floats, weights: Floats) -> float:
    order = np.argsort(values)
    cumulated = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(cumulated, cumulated[-1] / 2)])


def _solve(rows: Floats, weights: Floats, shape: Floats) -> Floats:
    """Minimise `Σ weight · (row · x - 1)² + pull towards shape`, over `x >= 0`.

    With at most three unknowns the non-negative optimum is found by trying every set of
    coefficients that are not zero.
    """
    scale = 1.0 / np.sqrt(np.maximum(weights @ rows**2, 1e-300))
    scaled = rows * scale
    matrix = ((scaled.T * weights) @ scaled + _SHAPE_WEIGHT * np.eye(len(shape))).tolist()
    vector = (weights @ scaled + _SHAPE_WEIGHT * shape / scale).tolist()
    best, lowest = [0.0] * len(shape), 0.0
    for size in range(len(shape), 0, -1):
        for chosen in combinations(range(len(shape)), size):
            values = _eliminate(matrix, vector, chosen)
            # At a set's optimum the loss is a constant less this product.
            loss = -sum(value * vector[i] for value, i in zip(values, chosen, strict=True))
            if min(values) >= 0 and loss < lowest:
                best, lowest = [0.0] * len(shape), loss
                for value, i in zip(values, chosen, strict=True):
                    best[i] = value
        if size == len(shape) and lowest < 0:
            break  # optimal without any bound: no smaller set is better
    return np.array(best) * scale


def _eliminate(
    matrix: list[list[float]], vector: list[float], chosen: tuple[int, ...]
) -> list[float]:
    """Solve the chosen rows and columns by Gauss: for 3 x 3, a tenth of numpy's time.

    The matrix is positive definite by the pull on its diagonal, so pivoting isn't needed.
    """
    rows = [[*(matrix[i][j] for j in chosen), vector[i]] for i in chosen]
    count = len(rows)
    for pivot in range(count):
        for low in range(pivot + 1, count):
            factor = rows[low][pivot] / rows[pivot][pivot]
            for column in range(pivot, count + 1):
                rows[low][column] -= factor * rows[pivot][column]
    values = [0.0] * count
    for i in reversed(range(count)):
        known = sum(rows[i][j] * values[j] for j in range(i + 1, count))
        values[i] = (rows[i][count] - known) / rows[i][i]
    return values


def checked_fields(data: object, names: set[str]) -> dict[str, Any]:
    """The same dict, if it has exactly these fields; else raises InvalidRequest."""
    if not isinstance(data, dict) or set(data) != names:
        raise InvalidRequest(f"expected the fields {sorted(names)}, got {data!r:.200}")
    return data


def checked_numbers(data: object, count: int) -> list[float]:
    """So many finite numbers from 0 up, as floats; else raises InvalidRequest."""
    if not isinstance(data, list | tuple) or len(data) != count:
        raise InvalidRequest(f"expected {count} numbers, got {data!r:.200}")
    for value in data:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise InvalidRequest(f"expected a number, got {value!r:.200}")
        if not (math.isfinite(value) and value >= 0):
            raise InvalidRequest(f"expected a finite number that is not negative, got {value}")
    return [float(value) for value in data]


def given(*coefficients: float) -> Estimate:
    """An estimate that counts as known, for constants measured elsewhere."""
    return Estimate(tuple(checked_numbers(coefficients, len(coefficients))), OBSERVATIONS_TO_KNOW)
