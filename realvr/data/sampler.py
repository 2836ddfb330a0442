"""Which examples a step sees: a function of (seed, step) alone, so that resuming is arithmetic."""

from functools import lru_cache

import numpy as np

from launch.errors import UserError


class Sampler:
    """Shuffled passes over `size` examples in batches; a batch may reach into the next epoch, nothing is dropped."""

    def __init__(self, size: int, batch: int, seed: int):
        if size < 1:
            raise UserError("data: no usable example is left to train on; see the counts of what was left out")
        if batch < 1:
            raise UserError(f"data: a batch of {batch} examples; it should be at least 1")
        self.size, self.batch_size, self.seed = size, batch, seed

    def at(self, epoch: int, position: int) -> int:
        """Index of the example at a position (0 ≤ position < size) of an epoch's order."""
        return int(_order(self.seed % 2**64, epoch, self.size)[position])

    def batch(self, step: int) -> list[int]:
        """Indices of step `step` (counted from 0)."""
        start = step * self.batch_size
        return [self.at(*divmod(i, self.size)) for i in range(start, start + self.batch_size)]

    def epoch(self, step: int) -> float:
        """Passes over the data completed before this step."""
        return step * self.batch_size / self.size


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, size: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(size)
