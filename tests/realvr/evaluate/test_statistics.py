"""Intervals against scipy, by hand, and by coverage."""

import numpy as np
import pytest
from scipy import stats

from realvr.evaluate import statistics as s


@pytest.mark.parametrize(("hits", "n"), [(0, 7), (3, 10), (50, 100), (200, 200), (1, 1)])
def test_wilson_equals_scipy(hits, n):
    got = s.proportion(np.arange(n) < hits)
    want = stats.binomtest(hits, n).proportion_ci(method="wilson")
    assert (got.value, got.n) == (hits / n, n)
    assert got.low == pytest.approx(want.low, abs=1e-12) and got.high == pytest.approx(want.high, abs=1e-12)


def test_bootstrap_equals_scipy():
    x = np.random.default_rng(3).exponential(size=80)
    got = s.mean(x)
    want = stats.bootstrap((x,), np.mean, n_resamples=10_000, method="percentile", rng=1).confidence_interval
    assert got.value == pytest.approx(x.mean())
    assert got.low == pytest.approx(want.low, abs=0.02) and got.high == pytest.approx(want.high, abs=0.02)
    assert s.mean(x) == got and s.mean(x, seed=1) != got


def test_paired_difference_is_much_narrower_than_unpaired():
    rng = np.random.default_rng(0)
    base = rng.normal(size=100) * 5
    a, b = base + 0.5 + 0.1 * rng.normal(size=100), base
    got = s.difference(a, b)
    assert 0.45 < got.low < got.value < got.high < 0.55
    wide = s.mean(a)
    assert wide.high - wide.low > 10 * (got.high - got.low)
    with pytest.raises(ValueError, match="100 and 99"):
        s.difference(a, b[:99])


def test_clusters_of_copies_count_once():
    x = np.random.default_rng(1).normal(size=30)
    copies, labels = np.repeat(x, 10), np.repeat(np.arange(30), 10).tolist()
    one, many = s.mean(x), s.mean(copies, labels)
    assert many.n == 300 and many.value == pytest.approx(one.value)
    assert many.high - many.low == pytest.approx(one.high - one.low, rel=0.05)
    naive = s.mean(copies)
    assert naive.high - naive.low < 0.5 * (many.high - many.low)


def test_unequal_clusters_pool_their_items():
    got = s.mean([1.0, 1.0, 1.0, 0.0], ["a", "a", "a", "b"])
    assert got.value == 0.75 and (got.low, got.high) == (0.0, 1.0)
    resampled = s.bootstrap_means(np.array([1.0, 1.0, 1.0, 0.0]), ["a", "a", "a", "b"], 200)
    assert set(resampled.tolist()) == {0.0, 0.75, 1.0}


def test_coverage_of_the_intervals():
    rng = np.random.default_rng(5)
    wilson = normal = 0
    for i in range(400):
        e = s.proportion(rng.random(60) < 0.3)
        wilson += e.low <= 0.3 <= e.high
        e = s.mean(rng.normal(size=60), resamples=1000, seed=i)
        normal += e.low <= 0 <= e.high
    assert 0.91 <= wilson / 400 <= 0.985 and 0.91 <= normal / 400 <= 0.985


def test_rate_chooses_the_interval_by_clusters():
    hits = [True, False, True, True]
    assert s.rate(hits, "abcd") == s.proportion(hits)
    assert s.rate([True, True, False, False], "aabb").low == 0.0
    all_right = s.rate([True] * 40, ["a"] * 20 + ["b"] * 20)
    assert all_right.low == s.proportion([True, True]).low and all_right.n == 40


@pytest.mark.parametrize(("only_a", "only_b"), [(0, 0), (5, 1), (9, 9), (0, 12)])
def test_mcnemar_is_the_exact_binomial(only_a, only_b):
    a = np.array([True] * only_a + [False] * only_b + [True] * 4)
    b = np.array([False] * only_a + [True] * only_b + [True] * 4)
    got = s.mcnemar(a, b)
    want = stats.binomtest(only_a, only_a + only_b).pvalue if only_a + only_b else 1.0
    assert (got.only_first, got.only_second, got.n) == (only_a, only_b, only_a + only_b + 4)
    assert got.p == pytest.approx(want)


def test_holm_by_hand():
    assert s.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


def test_no_items_is_no_number():
    assert s.proportion([]) is None and s.mean([]) is None and s.rate([], []) is None
    with pytest.raises(ValueError, match="1 of 2 values are not finite"):
        s.mean([1.0, float("nan")])
