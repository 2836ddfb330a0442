"""Real handwriting in scenes: writers kept apart, exact twins."""

import numpy as np
import pytest
from sklearn.datasets import load_digits

from launch.errors import UserError
from realvr.config import SourceSettings
from realvr.data.sources.digits import DIGITS, SPLITS, Digits, render
from realvr.data.sources.scenes import SIZE


def world(split: str = "train", **settings) -> Digits:
    return Digits(SourceSettings(kind="digits", options={"split": split}, **settings))


def handwriting(examples) -> set[int]:
    cells = [c.split(".") for e in examples for c in e.images[0].split("|")[1:] if c != "-"]
    return {int(c[2]) for c in cells}


def test_no_writer_is_in_both_splits():
    train, validation = handwriting(world(size=800)), handwriting(world("validation", size=800))
    assert max(train) < min(validation)
    # Every writer copied the same form, which begins 0…9, 0…9: the border is where a form begins.
    labels = load_digits().target
    border = SPLITS["validation"].start
    assert list(labels[border : border + 20]) == [*range(10), *range(10)]


def test_answers_follow_the_handwriting():
    labels = load_digits().target
    for e in world(size=300):
        known = {}
        for cell in e.images[0].split("|")[1:]:
            if cell != "-":
                digit, colour, image = cell.split(".")[:3]
                assert labels[int(image)] == int(digit)
                known[colour] = digit
        if e.meta["ask"] == "noun":
            assert e.question == f"what digit is the {e.meta['word']}?"
            assert e.answer == known.get(e.meta["word"], "none")
        assert e.answer in {*DIGITS, "red", "green", "blue", "yellow", "purple", "left", "right", "none"}
        assert len(e.boxes) == (e.answer != "none")


def test_rendering_is_deterministic_and_shows_ink():
    e = next(e for e in world(size=20) if e.boxes)
    first = np.asarray(render(e.images[0]))
    assert first.shape == (SIZE, SIZE, 3) and np.array_equal(first, np.asarray(render(e.images[0])))
    x0, y0, x1, y1 = (round(v * SIZE) for v in e.boxes[0].coords)
    assert first[y0:y1, x0:x1].std() > 20


def test_twins_change_only_the_edited_boxes():
    for t in world("validation", size=1, seed=2).twins(40):
        assert (t.before.answer != t.after.answer) == t.relevant
        assert handwriting([t.before, t.after]) <= set(SPLITS["validation"])
        before, after = (np.asarray(render(x.images[0])) for x in (t.before, t.after))
        outside = np.ones((SIZE, SIZE), dtype=bool)
        for x0, y0, x1, y1 in t.after.meta["edited"]:
            outside[round(y0 * SIZE) : round(y1 * SIZE), round(x0 * SIZE) : round(x1 * SIZE)] = False
        assert np.array_equal(before[outside], after[outside]) and not np.array_equal(before, after)


def test_bad_recipes_are_told_in_one_line():
    for ref in ("digits:1|7.red.0.0.0|-|-|-", "digits:1|0.red.5000.0.0|-|-|-", "digits:1|0.red.0.7.0|-|-|-", "digits:"):
        with pytest.raises(UserError, match="digits"):
            render(ref)
