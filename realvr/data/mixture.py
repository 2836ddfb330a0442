"""Weighted mixtures of sources: what stands at a position depends on (seed, position) alone."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, overload

import numpy as np
from pydantic import Field

from launch.config import Settings
from realvr.config import SourceSettings
from realvr.data.examples import Example
from realvr.data.sources import open_source
from realvr.data.sources.records import read_options
from realvr.data.sources.rows import BadRecords


class MixtureOptions(Settings):
    """`options` of a mixture."""

    length: int | None = Field(default=None, ge=1)
    """Examples in one pass; None: as many as its parts have together."""


class Mixture(Sequence[Example]):
    """Examples of several sources in the shares of their weights.

    Every stretch of the mixture has the shares (to within about one example a part). A part is gone through in shuffled
    passes: none of its examples comes again before all have come. Ids get the part's number in front (`0/q7`).
    Memory: 6 bytes a position and 4 an example.
    """

    def __init__(self, settings: SourceSettings, max_bad_records: int = 0):
        options = read_options(MixtureOptions, settings)
        weights, parts = zip(*settings.parts(), strict=True)
        self.settings, self.bad = settings, BadRecords(max_bad_records)
        self.parts = []
        for part in parts:
            source = open_source(part, max_bad_records - len(self.bad.messages))
            self.parts.append(source)
            self.bad.messages.extend(getattr(getattr(source, "bad", None), "messages", ()))
        length = options.length or sum(len(source) for source in self.parts)
        self._part = interleave(np.array(weights), length, settings.seed)
        self._rank = np.zeros(length, dtype=np.uint32)
        for number in range(len(self.parts)):
            mine = self._part == number
            self._rank[mine] = np.arange(int(mine.sum()), dtype=np.uint32)
        self._orders: dict[tuple[int, int], np.ndarray] = {}

    def __len__(self) -> int:
        return len(self._part)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number, place = self.at(range(len(self))[index])
        example = self.parts[number][place]
        return replace(example, id=f"{number}/{example.id}")

    def at(self, position: int) -> tuple[int, int]:
        """(part, index in it) at a position."""
        number = int(self._part[position])
        turn, place = divmod(int(self._rank[position]), len(self.parts[number]))
        key = (number, turn)
        if key not in self._orders:
            if len(self._orders) > 4 * len(self.parts):
                self._orders.clear()
            seed = (self.settings.seed % 2**64, number, turn)
            self._orders[key] = np.random.default_rng(seed).permutation(len(self.parts[number])).astype(np.uint32)
        return number, int(self._orders[key][place])


def interleave(weights: np.ndarray, length: int, seed: int) -> np.ndarray:
    """Part at each position, uint16 [length]: low-discrepancy draws, so that every stretch has the weights' shares."""
    edges = np.cumsum(weights / weights.sum())
    start = np.random.default_rng(seed % 2**64).random()
    draws = (start + np.arange(length) * 0.6180339887498949) % 1.0  # golden ratio: the most even rotation
    return np.minimum(np.searchsorted(edges, draws, side="right"), len(weights) - 1).astype(np.uint16)
