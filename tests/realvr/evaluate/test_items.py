"""From completions to numbers: a constructed case whose every figure is known by hand."""

import numpy as np
import pytest

from launch.errors import UserError
from realvr.data.examples import Example
from realvr.data.twins import Twin
from realvr.evaluate.edits import wrong_candidates
from realvr.evaluate.items import (
    Values,
    decoded,
    replacement_values,
    transplant_values,
    twin_values,
    validation_values,
)
from realvr.evaluate.latents import Replaced, Transplanted
from realvr.evaluate.statistics import mean, proportion
from realvr.rollout.records import Rollout

SPAN = "<|lvr_start|><|lvr|><|lvr|><|lvr_end|>"


def read(text, gold, latents=(), name="e", image="a.png", **more):
    z = np.array(latents, dtype=np.float32).reshape(-1, 2)
    nothing = np.zeros(0)
    rollout = Rollout(nothing, nothing, z, nothing, nothing, text, "stop")
    return decoded(Example(name, (image,), "what?", gold, **more), rollout)


def test_one_completion_is_read_strictly_and_leniently():
    good = read(f"{SPAN}<answer>Red</answer>", "red", [[1, 0], [0, 1]])
    assert good.right and good.right_lenient and good.closed and good.strict == "Red" and good.said == "red"
    assert good.mean_latent.tolist() == [0.5, 0.5]
    twice = read("<answer>red</answer><answer>blue</answer>", "blue")
    assert not twice.right and twice.strict is None and twice.right_lenient and not twice.closed
    assert twice.mean_latent is None
    unclosed = read("<|lvr_start|><|lvr|><|lvr|><answer>red</answer>", "red", [[1, 0], [0, 1]])
    assert not unclosed.closed and unclosed.mean_latent is None
    assert read("red", "red").said is None


def twin(name, edit, relevant, before, after):
    sides = [Example(f"{name}-{when}", (f"{name}.png",), "what?", gold) for when, gold in (("b", before), ("a", after))]
    return Twin(edit, relevant, *sides)


def test_flips_and_distances_by_hand():
    x, y = [[1, 0], [1, 0]], [[0, 1], [0, 1]]
    say = "{}<answer>{}</answer>".format
    rows = [  # twin, completion before, completion after, latents before, latents after
        (twin("1", "recolour", True, "red", "blue"), say(SPAN, "red"), say(SPAN, "blue"), x, y),  # strict flip
        (twin("2", "recolour", True, "red", "blue"), say(SPAN, "red"), say(SPAN, "red"), x, x),  # did not follow
        (twin("3", "swap", True, "left", "left"), say(SPAN, "left"), say(SPAN, "left"), x, x),  # gold unchanged
        (twin("4", "recolour", False, "red", "red"), say(SPAN, "red"), say(SPAN, "blue"), x, x),  # false flip
        (twin("5", "recolour", False, "red", "red"), say("", "blue"), say("", "Blue."), [], []),  # same, no latents
    ]
    values = Values()
    before = [read(a, t.before.answer, z, t.before.id) for t, a, _, z, _ in rows]
    after = [read(b, t.after.answer, z, t.after.id) for t, _, b, _, z in rows]
    twin_values(values, [r[0] for r in rows], before, after)
    got = {name: values.estimate(name, 1000, 0) for name in values.by_metric}
    assert (got["strict_flip"].value, got["strict_flip"].n) == (pytest.approx(1 / 3), 3)
    assert (got["strict_flip_changed"].value, got["strict_flip_changed"].n) == (0.5, 2)
    assert (got["false_flip"].value, got["false_flip"].n) == (pytest.approx(1 / 3), 3)
    assert (got["distance_relevant"].value, got["distance_relevant"].n) == (pytest.approx(1 / 3), 3)
    assert (got["distance_irrelevant"].value, got["distance_irrelevant"].n) == (pytest.approx(0), 1)
    assert got["distance_relevant/recolour"].value == pytest.approx(0.5) and got["strict_flip/swap"].value == 0
    assert got["strict_flip_changed"] == proportion([True, False])
    assert values.estimate("p_right", 1000, 0) is None


def test_questions_about_one_image_are_one_cluster():
    values = Values()
    hits = [True] * 10 + [False] * 10
    items = [
        read(f"<answer>{'red' if hit else 'blue'}</answer>", "red", name=str(i), image=f"{i // 10}.png")
        for i, hit in enumerate(hits)
    ]
    validation_values(values, items)
    got = values.estimate("accuracy", 1000, 0)
    assert (got.value, got.low, got.high, got.n) == (0.5, 0.0, 1.0, 20)
    assert values.estimate("closed_span", 1000, 0).value == 0
    with pytest.raises(UserError, match="record 3 occurs twice"):
        validation_values(values, items[3:4])


def test_interventions_by_hand():
    values = Values()
    drops = {("contrast", "donor", 1): (0.25, 0.5)}
    rows = [Replaced(str(i), f"{i}.png", float(np.log(p)), None, drops) for i, p in enumerate((0.5, 1.0))]
    replacement_values(values, rows)
    assert values.estimate("p_right", 100, 0).value == pytest.approx(0.75)
    assert values.estimate("drop_p/contrast/donor/1", 100, 0) == mean([0.25, 0.25], resamples=100)
    assert values.estimate("cos_roi", 100, 0) is None
    gold = ("left", "right")
    outcomes = transplant_values(
        values,
        [
            Transplanted("a", "swap", gold, {0: "left", 4: "right"}, {0: -1.0, 4: 2.0}),
            Transplanted("b", "swap", gold, {0: "left", 4: "left"}, {0: -1.0, 4: -1.0}),
            Transplanted("c", "swap", gold, {0: "right", 4: "right"}, {0: 1.0, 4: 1.0}),  # A was wrong: not counted
        ],
    )
    assert outcomes == {"a": "B", "b": "A"}
    got = values.estimate("donor_answer", 100, 0)
    assert (got.value, got.n) == (0.5, 2)
    shift = values.estimate("donor_margin_shift", 100, 0)
    assert (shift.value, shift.n) == (pytest.approx(1.0), 3)


def test_wrong_candidates_begin_with_what_was_said():
    said = read("<answer>green</answer>", "red", name="1")
    rest = [
        read("<answer>x</answer>", gold, name=gold + str(i)) for i, gold in enumerate(["blue", "blue", "Red", "left"])
    ]
    assert wrong_candidates([said], [said, *rest]) == [["green", "blue", "left"]]
    choice = read("<answer>C</answer>", "B", name="2", kind="choice", options=("cat", "dog", "cow"))
    assert wrong_candidates([choice], [choice, *rest]) == [["C", "A"]]
