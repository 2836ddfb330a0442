"""Intervals and tests for everything that is reported. Plain numpy; every resampling is seeded.

Nothing here invents a number: no items gives None, which reports show as “–”.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import comb, sqrt
from statistics import NormalDist

import numpy as np

RESAMPLES = 10_000
LEVEL = 0.95
_CHUNK = 4_000_000  # random indices drawn at once


@dataclass(frozen=True)
class Estimate:
    """A value, its confidence interval [low, high] and the number of items n behind it."""

    value: float
    low: float
    high: float
    n: int

    def as_dict(self) -> dict[str, float]:
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: dict[str, float] | None) -> "Estimate | None":
        return None if raw is None else cls(float(raw["value"]), float(raw["low"]), float(raw["high"]), int(raw["n"]))


@dataclass(frozen=True)
class PairedTest:
    """Exact McNemar test: `only_first`, `only_second` items right under one of the two alone, of n pairs."""

    only_first: int
    only_second: int
    n: int
    p: float


def proportion(hits: Sequence[bool] | np.ndarray, level: float = LEVEL) -> Estimate | None:
    """Share of true items with the Wilson score interval; items must be independent (see `rate`)."""
    x = np.asarray(hits, dtype=bool)
    n = x.size
    if n == 0:
        return None
    z = NormalDist().inv_cdf(0.5 + level / 2)
    p = float(x.mean())
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return Estimate(p, max(0.0, min(centre - half, p)), min(1.0, max(centre + half, p)), n)


def bootstrap_means(
    values: np.ndarray, clusters: Sequence | None = None, resamples: int = RESAMPLES, seed: int = 0
) -> np.ndarray:
    """Means of `resamples` resamples of values [n], float64 [resamples].

    With `clusters` [n] (any hashable labels) whole clusters are drawn and the mean is pooled: Σ sums / Σ sizes.
    """
    x = np.asarray(values, dtype=np.float64)
    if clusters is None:
        sums, sizes = x, np.ones(x.size)
    else:
        if len(clusters) != x.size:
            raise ValueError(f"{x.size} values but {len(clusters)} cluster labels")
        codes: dict = {}
        index = np.array([codes.setdefault(label, len(codes)) for label in clusters], dtype=np.int64)
        sums = np.bincount(index, weights=x, minlength=len(codes))
        sizes = np.bincount(index, minlength=len(codes)).astype(np.float64)
    rng = np.random.default_rng(seed)
    rows = max(1, _CHUNK // sums.size)
    means = [
        sums[drawn].sum(1) / sizes[drawn].sum(1)
        for start in range(0, resamples, rows)
        for drawn in [rng.integers(0, sums.size, (min(rows, resamples - start), sums.size))]
    ]
    return np.concatenate(means)


def mean(
    values: Sequence[float] | np.ndarray,
    clusters: Sequence | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
    level: float = LEVEL,
) -> Estimate | None:
    """Mean with a percentile bootstrap interval, over items or over whole `clusters` (labels, one an item)."""
    x = np.asarray(values, dtype=np.float64)
    if x.size == 0:
        return None
    if not np.isfinite(x).all():
        raise ValueError(f"{int((~np.isfinite(x)).sum())} of {x.size} values are not finite")
    low, high = np.quantile(bootstrap_means(x, clusters, resamples, seed), [(1 - level) / 2, (1 + level) / 2])
    return Estimate(float(x.mean()), float(low), float(high), x.size)


def difference(
    first: Sequence[float] | np.ndarray,
    second: Sequence[float] | np.ndarray,
    clusters: Sequence | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
    level: float = LEVEL,
) -> Estimate | None:
    """Mean of first − second over the same items in the same order, with a paired bootstrap interval."""
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if a.shape != b.shape:
        raise ValueError(f"paired values differ in number: {a.size} and {b.size}")
    return mean(a - b, clusters, resamples, seed, level)


def rate(hits: Sequence[bool] | np.ndarray, clusters: Sequence, resamples: int = RESAMPLES, seed: int = 0):
    """Share of true items: Wilson where every cluster holds one item, else a cluster bootstrap.

    An observed share of 0 or 1 gives the bootstrap no spread, so Wilson with one item a cluster (the cautious n) is
    used there.
    """
    x = np.asarray(hits, dtype=bool)
    distinct = len(set(clusters))
    if x.size == distinct:
        return proportion(x)
    if x.size and x.all() | ~x.any():
        cautious = proportion(np.full(distinct, x[0]))
        return Estimate(cautious.value, cautious.low, cautious.high, x.size)
    return mean(x.astype(np.float64), clusters, resamples, seed)


def mcnemar(first: Sequence[bool] | np.ndarray, second: Sequence[bool] | np.ndarray) -> PairedTest:
    """Exact two-sided McNemar test of paired right/wrong: a fair coin on the pairs where just one is right."""
    a, b = np.asarray(first, dtype=bool), np.asarray(second, dtype=bool)
    if a.shape != b.shape:
        raise ValueError(f"paired outcomes differ in number: {a.size} and {b.size}")
    only_a, only_b = int((a & ~b).sum()), int((~a & b).sum())
    m = only_a + only_b
    tail = sum(comb(m, i) for i in range(min(only_a, only_b) + 1))
    return PairedTest(only_a, only_b, a.size, min(1.0, float(2 * tail / 2**m)))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjusted p-values, in the order given."""
    order = np.argsort(p_values)
    adjusted, running = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        running = max(running, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = running
    return adjusted
