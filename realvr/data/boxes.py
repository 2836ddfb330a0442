"""Boxes: spaces, checks, and which visual tokens a box covers (specification: ROI → visual tokens)."""

import math
from collections.abc import Iterable
from dataclasses import replace

from launch.errors import UserError
from realvr.data.examples import Box

Coords = tuple[float, float, float, float]
OVERSHOOT = 0.02  # share of a side (at least two pixels) that annotation tools are off by: clamped, not refused
OVERSHOOT_PIXELS = 2


def bounds(box: Box, width: int, height: int) -> Coords:
    """The whole image in the box's own space (x0, y0, x1, y1)."""
    if box.space == "normalised":
        return 0, 0, 1, 1
    if box.space == "pixel":
        return 0, 0, width, height
    if box.space == "thousand":
        return 0, 0, 1000, 1000
    side = max(width, height)
    left, top = (side - width) / 2 / side, (side - height) / 2 / side
    return left, top, 1 - left, 1 - top


def normalised(box: Box, width: int, height: int) -> Coords:
    """(x0, y0, x1, y1) in 0–1 of the original image of width × height pixels, whatever the box's space."""
    limits = bounds(box, width, height)
    x0, y0, x1, y1 = ((v - limits[i % 2]) / (limits[2 + i % 2] - limits[i % 2]) for i, v in enumerate(box.coords))
    return x0, y0, x1, y1


def checked(box: Box, width: int, height: int, where: str) -> tuple[Box, bool]:
    """The box clamped to the image, in its own space, and whether clamping changed it.

    Raises UserError (beginning with `where`) when the box is not finite, has no area, or lies outside the image by
    more than OVERSHOOT of a side: such a box is in another space or belongs to another image.
    """
    shown = f"box {list(box.coords)} ({box.space})"
    if len(box.coords) != 4 or not all(isinstance(v, int | float) and math.isfinite(v) for v in box.coords):
        raise UserError(f"{where}: {shown} is not four finite numbers x0, y0, x1, y1; mend or drop the record")
    limits = bounds(box, width, height)
    for axis, pixels in ((0, width), (1, height)):
        low, high = limits[axis], limits[axis + 2]
        slack = max(OVERSHOOT, OVERSHOOT_PIXELS / pixels) * (high - low)
        if min(box.coords[axis::2]) < low - slack or max(box.coords[axis::2]) > high + slack:
            raise UserError(
                f"{where}: {shown} lies outside {width}x{height}; it should lie within {_short(limits)}: "
                f"check the declared box space, or drop the record"
            )
    coords = tuple(min(max(v, limits[i % 2]), limits[2 + i % 2]) for i, v in enumerate(box.coords))
    if coords[0] >= coords[2] or coords[1] >= coords[3]:
        raise UserError(f"{where}: {shown} has no area inside {width}x{height}; it should have x0 < x1 and y0 < y1")
    return replace(box, coords=coords), coords != tuple(box.coords)


def roi_tokens(coords: Coords, rows: int, columns: int, merge: int) -> list[int]:
    """Indices of the image's visual tokens that a normalised box covers, ascending (row-major merged grid).

    rows × columns patches, merge × merge patches a token. Every touched token counts, at least one.
    """
    x0, y0, x1, y1 = coords
    left, right = _span(x0, x1, columns, merge)
    top, bottom = _span(y0, y1, rows, merge)
    return [row * (columns // merge) + column for row in range(top, bottom) for column in range(left, right)]


def union(rois: Iterable[Iterable[int]]) -> list[int]:
    """Every token of any box, once, ascending."""
    return sorted({int(token) for roi in rois for token in roi})


def grow(coords: Coords, factor: float) -> Coords:
    """A normalised box scaled about its centre and clipped to the image."""
    x0, y0, x1, y1 = coords
    x, y = (x0 + x1) / 2, (y0 + y1) / 2
    half_width, half_height = factor * (x1 - x0) / 2, factor * (y1 - y0) / 2
    return max(0.0, x - half_width), max(0.0, y - half_height), min(1.0, x + half_width), min(1.0, y + half_height)


def _span(low: float, high: float, patches: int, merge: int) -> tuple[int, int]:
    tokens = patches // merge
    first = min(max(math.floor(low * patches) // merge, 0), tokens - 1)
    last = min(max((math.ceil(high * patches) + merge - 1) // merge, first + 1), tokens)
    return first, last


def _short(limits: Coords) -> str:
    return "[" + ", ".join(f"{v:g}" for v in limits) + "]"
