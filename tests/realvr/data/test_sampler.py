"""The sampler: every example once an epoch, and any step without replaying the ones before."""

import pytest

from launch.errors import UserError
from realvr.data.sampler import Sampler


def test_epochs_are_permutations_though_batches_straddle_them() -> None:
    sampler = Sampler(size=10, batch=4, seed=3)
    seen = [i for step in range(25) for i in sampler.batch(step)]  # ten epochs
    epochs = [seen[i : i + 10] for i in range(0, 100, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 10


def test_any_step_is_arithmetic() -> None:
    first = [Sampler(7, 3, seed=1).batch(step) for step in range(40)]
    resumed = Sampler(7, 3, seed=1)
    assert [resumed.batch(step) for step in reversed(range(40))] == first[::-1]
    assert Sampler(7, 3, seed=2).batch(0) != first[0] or Sampler(7, 3, seed=2).batch(1) != first[1]


def test_a_batch_may_exceed_the_data() -> None:
    batch = Sampler(size=3, batch=8, seed=0).batch(2)
    assert len(batch) == 8 and set(batch) == {0, 1, 2}


@pytest.mark.parametrize(("size", "batch", "wanted"), [(0, 4, "no usable example"), (4, 0, "at least 1")])
def test_nothing_to_train_on_is_an_error(size: int, batch: int, wanted: str) -> None:
    with pytest.raises(UserError, match=wanted):
        Sampler(size, batch, seed=0)
