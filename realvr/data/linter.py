"""Which space are these boxes in? Evidence from where boxes lie and where they stop, set against the declared space.

A space is *fitted* when nearly all boxes lie inside its picture. Fitting is not enough: pad-to-square boxes also lie in
0–1, and small pictures' pixel boxes in 0–1000. Then the border decides: annotators' boxes often end exactly at the
picture's edge, so edges pile up just inside the true space's border and none lies just outside.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import get_args

import numpy as np

from realvr.data.boxes import OVERSHOOT, OVERSHOOT_PIXELS, bounds
from realvr.data.examples import Box, BoxSpace

SPACES: tuple[BoxSpace, ...] = get_args(BoxSpace)
LIMIT = 20_000  # boxes kept; beyond, every second one is dropped and the stride doubles
LEAST = 8  # boxes or edges that a contradiction needs
OUTSIDE = 0.25  # share of boxes outside the picture that no defective data set reaches
_BAND = 0.02  # of a side: what counts as at the border
_STRAY = 0.05  # share of boxes that may be defective under the true space
NAMES = {
    "normalised": "0–1 of the picture",
    "pixel": "pixels",
    "thousand": "0–1000 of the picture",
    "square": "0–1 of the picture padded to a square",
}


@dataclass(frozen=True)
class Lint:
    """What the boxes say. outside: share of boxes outside the picture by space. likely: the spaces that the evidence
    leaves, best first. contradiction: why the declared space cannot be, or empty. notes: the evidence in words."""

    boxes: int
    declared: BoxSpace | None
    outside: dict[BoxSpace, float]
    likely: tuple[BoxSpace, ...]
    contradiction: str = ""
    notes: tuple[str, ...] = ()


@dataclass
class Evidence:
    """Raw boxes of one declared space with their pictures' sizes, a bounded even sample in the order they came."""

    boxes: list[tuple[float, float, float, float, float, float]] = field(default_factory=list)
    _seen: int = 0
    _stride: int = 1

    def add(self, coords: Sequence[float], size: tuple[int, int]) -> None:
        """coords: four numbers as the file has them. size: (width, height) of their picture in pixels."""
        if self._seen % self._stride == 0 and np.isfinite(coords).all():
            self.boxes.append((*coords, *size))
            if len(self.boxes) > LIMIT:
                self.boxes, self._stride = self.boxes[::2], self._stride * 2
        self._seen += 1


def lint(evidence: Evidence, declared: BoxSpace | None) -> Lint:
    """Compare every space with the boxes; `declared` None asks which it is."""
    rows = np.array(evidence.boxes, dtype=float).reshape(-1, 6)
    if not len(rows):
        return Lint(0, declared, dict.fromkeys(SPACES, 0.0), SPACES)
    coords = rows[:, :4]
    limits = {space: _limits(space, rows[:, 4:]) for space in SPACES}
    outside = {space: float(_outside(coords, limits[space], rows[:, 4:]).mean()) for space in SPACES}
    tiny = float((coords.max(axis=1) <= 1.01).mean())  # nobody marks single pixels
    fitting = [s for s in SPACES if outside[s] <= _STRAY and not (s in ("pixel", "thousand") and tiny > 0.5)]
    kept = [s for s in fitting if not any(_stops(coords, limits[s], limits[t])[2] for t in fitting if t != s)]
    likely = tuple(sorted(kept, key=lambda s: outside[s]))
    notes = [f"{outside[s]:.1%} of {len(rows)} boxes lie outside the picture if they are {NAMES[s]}" for s in SPACES]
    reason = ""
    if declared is not None and declared not in likely:
        reason = _contradiction(declared, coords, limits, outside, fitting, likely, tiny)
    return Lint(len(rows), declared, outside, likely, reason, tuple(notes))


def _contradiction(
    declared: BoxSpace, coords: np.ndarray, limits: dict, outside: dict, fitting: list, likely: tuple, tiny: float
) -> str:
    n = len(coords)
    if n < LEAST:
        return ""
    wish = f"; they look like `{likely[0]}` ({NAMES[likely[0]]})" if len(likely) == 1 else ""
    if outside[declared] > OUTSIDE or (outside[declared] > _STRAY and fitting):
        return f"{outside[declared]:.0%} of {n} boxes lie outside the picture if they are {NAMES[declared]}{wish}"
    if declared in ("pixel", "thousand") and tiny > 0.5:
        return f"{tiny:.0%} of {n} boxes lie within 0–1: nobody marks single {NAMES[declared]}{wish}"
    for other in fitting:
        inside, beyond, stops = _stops(coords, limits[declared], limits[other]) if other != declared else (0, 0, False)
        if stops:
            return (
                f"{inside} box edges stop at the border that {NAMES[other]} would have and {beyond} lie beyond it"
                f"; they look like `{other}`"
            )
    return ""


def _limits(space: BoxSpace, sizes: np.ndarray) -> np.ndarray:
    """[n, 4]: the whole picture in a space."""
    known: dict[tuple[float, float], tuple[float, ...]] = {}
    for width, height in {(w, h) for w, h in sizes.tolist()}:
        known[width, height] = bounds(Box((0, 0, 1, 1), space), int(width), int(height))
    return np.array([known[w, h] for w, h in sizes.tolist()], dtype=float)


def _outside(coords: np.ndarray, limits: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """bool [n]: beyond what annotation tools overshoot by."""
    low, high = limits[:, :2], limits[:, 2:]
    slack = np.maximum(OVERSHOOT, OVERSHOOT_PIXELS / sizes) * (high - low)
    least, most = np.minimum(coords[:, :2], coords[:, 2:]), np.maximum(coords[:, :2], coords[:, 2:])
    return ((least < low - slack) | (most > high + slack)).any(axis=1)


def _stops(coords: np.ndarray, wide: np.ndarray, narrow: np.ndarray) -> tuple[int, int, bool]:
    """(edges just inside a border of the narrow space, edges beyond it, whether that says: not the wide space).

    Only borders of `narrow` that lie well inside `wide` count. Where the wide space is true, a border that means
    nothing to the annotator has about as many edges just beyond it as just inside.
    """
    side = np.maximum(wide[:, 2:] - wide[:, :2], 1e-9)
    inside = beyond = 0
    for axis in (0, 1):
        for edge, border, limit, sign in (
            (coords[:, axis], narrow[:, axis], wide[:, axis], 1),
            (coords[:, 2 + axis], narrow[:, 2 + axis], wide[:, 2 + axis], -1),
        ):
            real = sign * (border - limit) > 2 * _BAND * side[:, axis]
            ahead = sign * (edge - border) / np.abs(narrow[:, 2 + axis] - narrow[:, axis])
            inside += int((real & (ahead >= -0.004) & (ahead <= _BAND)).sum())
            beyond += int((real & (ahead < -0.004)).sum())
    return inside, beyond, inside >= LEAST and beyond <= 0.05 * inside
