"""Boxes: spaces agree, overshoot is clamped and nonsense refused, tokens follow the specification."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.errors import UserError
from realvr.data.boxes import checked, grow, normalised, roi_tokens, union
from realvr.data.examples import Box

side = st.integers(1, 40)
merges = st.sampled_from([1, 2, 3, 4])
unit = st.integers(0, 720).map(lambda n: n / 720)


@st.composite
def box_on_grid(draw: st.DrawFn) -> tuple[tuple[float, float, float, float], int, int, int]:
    merge = draw(merges)
    x0, x1 = sorted((draw(unit), draw(unit)))
    y0, y1 = sorted((draw(unit), draw(unit)))
    return (x0, y0, x1, y1), draw(side) * merge, draw(side) * merge, merge


@given(box_on_grid())
def test_tokens_are_those_the_specification_names(case: tuple) -> None:
    (x0, y0, x1, y1), rows, columns, merge = case
    width, height = columns // merge, rows // merge
    left, top = math.floor(x0 * columns) // merge, math.floor(y0 * rows) // merge
    right = (math.ceil(x1 * columns) + merge - 1) // merge
    bottom = (math.ceil(y1 * rows) + merge - 1) // merge
    left, top = min(left, width - 1), min(top, height - 1)
    right, bottom = min(max(right, left + 1), width), min(max(bottom, top + 1), height)
    wanted = [r * width + c for r in range(height) for c in range(width) if left <= c < right and top <= r < bottom]
    tokens = roi_tokens((x0, y0, x1, y1), rows, columns, merge)
    assert tokens == wanted
    assert tokens and tokens[0] >= 0 and tokens[-1] < width * height


@given(box_on_grid())
def test_every_overlapping_token_is_in_and_growing_never_loses_one(case: tuple) -> None:
    coords, rows, columns, merge = case
    tokens = set(roi_tokens(coords, rows, columns, merge))
    x0, y0, x1, y1 = map(Fraction, coords)
    width, height = columns // merge, rows // merge
    for row in range(height):
        for column in range(width):
            overlap_x = min(x1, Fraction(column + 1, width)) - max(x0, Fraction(column, width))
            overlap_y = min(y1, Fraction(row + 1, height)) - max(y0, Fraction(row, height))
            if overlap_x > Fraction(1, 10**9) and overlap_y > Fraction(1, 10**9):
                assert row * width + column in tokens
    assert tokens <= set(roi_tokens(grow(coords, 1.5), rows, columns, merge)) or x0 == x1 or y0 == y1


def test_quadrants_of_the_demo_grid() -> None:
    assert roi_tokens((0, 0, 0.5, 0.5), 8, 8, 2) == [0, 1, 4, 5]
    assert roi_tokens((0.5, 0.5, 1, 1), 8, 8, 2) == [10, 11, 14, 15]
    assert roi_tokens((0.3, 0.3, 0.3, 0.3), 8, 8, 2) == [5]  # a point is one token
    assert roi_tokens((0, 0, 1, 1), 6, 4, 2) == list(range(6))


@given(st.integers(20, 4000), st.integers(20, 4000), st.tuples(unit, unit, unit, unit))
def test_all_spaces_name_the_same_region(width: int, height: int, raw: tuple) -> None:
    x0, x1 = sorted(raw[::2])
    y0, y1 = sorted(raw[1::2])
    longest = max(width, height)
    square = [
        (v * side + (longest - side) / 2) / longest
        for v, side in zip((x0, y0, x1, y1), (width, height, width, height), strict=True)
    ]
    same = {
        "normalised": (x0, y0, x1, y1),
        "pixel": (x0 * width, y0 * height, x1 * width, y1 * height),
        "thousand": tuple(1000 * v for v in (x0, y0, x1, y1)),
        "square": tuple(square),
    }
    for space, coords in same.items():
        assert normalised(Box(coords, space), width, height) == pytest.approx((x0, y0, x1, y1), abs=1e-9)


def test_pad_to_square_is_not_plain_normalised() -> None:
    # Visual-CoT: [141, 87, 397, 298] on 500×357 is published as [0.282, 0.316, 0.794, 0.738].
    published = Box((0.282, 0.316, 0.794, 0.738), "square")
    x0, y0, x1, y1 = normalised(published, 500, 357)
    assert (x0 * 500, y0 * 357, x1 * 500, y1 * 357) == pytest.approx((141, 87, 397, 298), abs=1)


def test_overshoot_is_clamped_and_reported() -> None:
    inside, clamped = checked(Box((40, 10, 65, 49), "pixel"), 64, 48, "r")
    assert inside.coords == (40, 10, 64, 48) and clamped
    exact = Box((0, 0, 64, 48), "pixel")
    assert checked(exact, 64, 48, "r") == (exact, False)
    assert checked(Box((0.2, 0.2, 1.01, 0.9)), 640, 480, "r")[0].coords == (0.2, 0.2, 1, 0.9)
    assert checked(Box((10.2, 10.2, 10.7, 10.9), "pixel"), 64, 48, "r")[0].coords == (10.2, 10.2, 10.7, 10.9)


@pytest.mark.parametrize(
    ("box", "wanted"),
    [
        (Box((100, 80, 120, 95), "pixel"), "outside 64x48"),
        (Box((125, 125, 469, 583), "pixel"), "outside 64x48"),  # thousand, declared pixel
        (Box((0.1, 0.1, 0.5, 1.2)), "outside 64x48"),
        (Box((-5, 0, 10, 10), "pixel"), "outside 64x48"),
        (Box((0.1, 0.0, 0.9, 0.9), "square"), "outside 64x48"),  # reaches into the padding above
        (Box((30, 10, 20, 40), "pixel"), "no area"),
        (Box((30, 10, 30, 40), "pixel"), "no area"),
        (Box((64, 10, 65, 40), "pixel"), "no area"),
        (Box((1, 2, 3, math.nan), "pixel"), "four finite numbers"),
        (Box((1, 2, 3), "pixel"), "four finite numbers"),
    ],
)
def test_nonsense_is_refused_by_name(box: Box, wanted: str) -> None:
    with pytest.raises(UserError, match=wanted) as caught:
        checked(box, 64, 48, "record a1")
    assert str(caught.value).startswith("record a1: box [") and "\n" not in str(caught.value)


def test_union_and_grow() -> None:
    assert union([[3, 1], [1, 2], []]) == [1, 2, 3]
    assert grow((0.4, 0.4, 0.6, 0.6), 1.5) == pytest.approx((0.35, 0.35, 0.65, 0.65))
    assert grow((0.0, 0.8, 0.4, 1.0), 2) == pytest.approx((0.0, 0.7, 0.6, 1.0))
