"""Generated scenes of shapes: deterministic pictures, right answers, exact twins."""

import pickle
from collections import Counter

import numpy as np
import pytest

from launch.errors import UserError
from realvr.config import SourceSettings
from realvr.data.sources.scenes import COLOURS, EDITS, HALF, SIZE
from realvr.data.sources.shapes import SHAPES, Shapes, render


def world(**settings) -> Shapes:
    return Shapes(SourceSettings(kind="shapes", **settings))


def test_same_seed_same_examples_other_seed_other_scenes():
    first, again, other = (list(world(size=40, seed=s)) for s in (3, 3, 4))
    assert first == again
    assert not {e.images for e in first} & {e.images for e in other}
    assert np.array_equal(render(first[0].images[0]), render(again[0].images[0]))


def test_length_slices_and_pickling():
    w = world(size=5)
    assert len(w) == 5 and len(list(w)) == 5 and w[-1] == w[4] and w[1:3] == [w[1], w[2]]
    with pytest.raises(IndexError):
        w[5]
    assert pickle.loads(pickle.dumps(w))[3] == w[3]


def test_picture_shows_the_colour_in_the_box():
    for e in world(size=60, options={"absent": 0.0}):
        pixels = np.asarray(render(e.images[0]), dtype=float) / 255
        assert pixels.shape == (SIZE, SIZE, 3)
        x0, y0, x1, y1 = (round(v * SIZE) for v in e.boxes[0].coords)
        cell = pixels[y0:y1, x0:x1]
        assert cell.shape[:2] == (HALF, HALF)
        colour = e.answer if e.meta["ask"] == "colour" else e.negative_key.removeprefix("shapes:").split()[0]
        ink = cell[abs(cell - 0.5).sum(2) > 0.4]
        nearest = min(COLOURS, key=lambda c: float(((np.median(ink, axis=0) - COLOURS[c]) ** 2).sum()))
        assert nearest == colour


def test_answers_absent_things_and_mix():
    examples = list(world(size=1500))
    asks = Counter(e.meta["ask"] for e in examples)
    assert set(asks) == {"colour", "noun", "side"} and min(asks.values()) > 400
    absent = [e for e in examples if e.answer == "none"]
    assert 0.04 < len(absent) / len(examples) < 0.13
    assert all(not e.boxes for e in absent) and all(e.boxes for e in examples if e.answer != "none")
    for e in examples:
        assert e.meta["word"] in e.question and len(e.question.removesuffix("?").split()) == 5
        cells = [c.split(".") for c in e.images[0].split("|")[1:] if c != "-"]
        known = {c[0]: c[1] for c in cells}
        assert 2 <= len(cells) <= 3 and len(known) == len(set(known.values())) == len(cells)
        if e.meta["ask"] == "colour":
            assert e.answer == known.get(e.meta["word"], "none")


def test_locations_and_questions_per_scene():
    examples = list(world(size=400, options={"locations": 0.5, "questions_per_scene": 8}))
    places = [e for e in examples if e.meta["ask"].endswith("_at")]
    assert 120 < len(places) < 280
    assert len({e.images for e in examples}) == 50 and len({e.images for e in examples[:8]}) == 1
    assert {e.answer for e in places} <= {*SHAPES, *COLOURS, "none"}


def test_twins_relevant_edits_flip_the_answer_and_only_edited_pixels_differ():
    twins = world(size=1, seed=9).twins(80)
    assert Counter((t.edit, t.relevant) for t in twins) == {(e, r): 10 for e in EDITS for r in (True, False)}
    for t in twins:
        assert t.before.question == t.after.question
        assert (t.before.answer != t.after.answer) == t.relevant
        before, after = (np.asarray(render(x.images[0])) for x in (t.before, t.after))
        outside = np.ones((SIZE, SIZE), dtype=bool)
        for x0, y0, x1, y1 in t.after.meta["edited"]:
            outside[round(y0 * SIZE) : round(y1 * SIZE), round(x0 * SIZE) : round(x1 * SIZE)] = False
        assert np.array_equal(before[outside], after[outside])
        assert not np.array_equal(before, after)
        touched = [b.coords in t.after.meta["edited"] for b in t.before.boxes]
        assert touched == [t.relevant]


def test_bad_recipes_and_options_are_told_in_one_line():
    for ref in (
        "shapes:1",
        "shapes:1|a|-|-|-",
        "shapes:x|-|-|-|-",
        "shapes:1|star.red.0.0.0|-|-|-",
        "shapes:-1|-|-|-|-",
    ):
        with pytest.raises(UserError, match="shapes") as error:
            render(ref)
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="shapes"):
        render("shapes:1|circle.red.9.0.0|-|-|-")
    with pytest.raises(UserError, match="abscent"):
        world(options={"abscent": 0.5})
