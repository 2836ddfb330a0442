"""Pictures hold what they are given, whatever the texts."""

import io

import pytest
from PIL import Image

from realvr.evaluate import figures, pictures
from realvr.evaluate.statistics import Estimate

LOOK = {"answer": "a $x_{ \x1f", "right": [0.1, 0.2], "wrong": [0.0, 0.3], "similarity": [[0.1, 0.2], [0.3, -0.4]]}


def case(answers):
    white, black = Image.new("RGB", (64, 64), "white"), Image.new("RGB", (90, 40), "black")
    entry = {"transplant": {"answers": answers}, "looks": [LOOK, LOOK]}
    box = [(0.1, 0.1, 0.6, 0.5)]
    return pictures.Case(
        "recolour", "what $5^{ is?", ("left", "right"), (white, black), (box, []), box, {"one": entry, "two": None}
    )


def pixels(data):
    return Image.open(io.BytesIO(data)).convert("RGB")


def colour(name):
    return tuple(int(name[i : i + 2], 16) for i in (1, 3, 5))


@pytest.mark.parametrize(("said", "tint"), [("left", figures.BLUE), ("Right.", figures.ORANGE), ("up", figures.GREY)])
def test_a_chip_is_coloured_by_whose_answer_it_is(said, tint):
    image = pixels(pictures.transplant_cases([case({"0": "left", "4": said})], ["one", "two"]))
    counts = {c: n for n, c in image.getcolors(1 << 24)}
    chip = counts[colour(figures.BLUE)] / (2 if said == "left" else 1)  # its own latents say left
    assert chip > 1000 and counts[colour(tint)] == pytest.approx(chip * (2 if said == "left" else 1), rel=0.1)


def test_edit_pairs_draw_hostile_text_and_missing_arms():
    image = pixels(pictures.edit_pairs([case({"0": "$\\frac", "4": ""})] * 2, ["one", "two"]))
    assert image.width > 600 and image.height > 600


def test_charts_say_what_is_missing():
    some = Estimate(0.3, 0.2, 0.4, 50)
    bars = figures.transplant_bars({"a": None, "b": {"A": 30, "B": 15, "other": 5}}, {"a": None, "b": some})
    assert pixels(bars).getbbox()
    dots = figures.dots({"edit": {"a": None, "b": some}}, {"a": "#000000", "b": figures.BLUE}, "distance")
    assert pixels(dots).getbbox()
    assert figures.curves({"a": [{"step": 1, "x/y": 1.0}]}, [("no/such", "t")], {"a": "#000000"}) is None
    drawn = figures.curves({"a": [{"step": 1, "x/y": 1.0}, {"step": 2, "x/y": None}]}, [("x/y", "t")], {"a": "#000000"})
    assert pixels(drawn).getbbox()


def test_smoothing_knows_no_future():
    import numpy as np

    y = np.array([1.0, 3.0, 5.0, 100.0])
    assert figures._smooth(y, width=2).tolist() == [1.0, 2.0, 4.0, 52.5]
