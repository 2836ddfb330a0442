"""The shared folder of hard inputs, where it is present: every case comes out as its description says."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from launch.errors import UserError
from realvr.config import SourceSettings
from realvr.data.images import image_size, load_image
from realvr.data.prompts import PromptBuilder, usable
from realvr.data.sources import Source, open_source
from realvr.rewards.answers import normalise, plain
from realvr.rewards.grade_file import grade_file

CASES = Path(__file__).parents[4] / "shared" / "cases"
INPUTS = CASES / "inputs"
INDEX = json.loads((INPUTS / "cases.json").read_text())["cases"] if INPUTS.exists() else []

FIELDS = {
    "table_empty_cells": {"id": "index", "images": "image_path", "options": ("A", "B", "C", "D")},
    "table_": {"question": "problem"},
}

pytestmark = pytest.mark.skipif(not INDEX, reason="the shared cases are not here")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    import datasets

    datasets.config.HF_DATASETS_CACHE = tmp_path_factory.mktemp("datasets")


def _open(case: dict) -> Source:
    name = case["file"]
    options = {"image_tags": "required"} if "image_tag" in name else {}
    if name.startswith("table_"):
        fields = next(fields for key, fields in FIELDS.items() if name.startswith(key))
        settings = SourceSettings(kind="table", path=str(INPUTS / name), fields=fields, options=options)
    else:
        settings = SourceSettings(kind="jsonl", path=str(INPUTS / name), box_space="pixel", options=options)
    return open_source(settings)


def _load(case: dict, builder: PromptBuilder) -> Source:
    """As a run does: open, then look at every picture's header, box and token."""
    source = _open(case)
    usable(source, builder, 4096)
    for example in source:
        builder.images(example)
    return source


@pytest.fixture(scope="module")
def builder(tiny_qwen25: Path) -> PromptBuilder:
    return PromptBuilder(tiny_qwen25, 4, 40)


def _wanted(expect: str) -> str:
    """The expected error as a pattern: each thing that it names."""
    named = expect.removeprefix("error naming ")
    words = re.findall(r"[\w.|<>-]+", named.replace("(", " ").replace(")", " ").replace(",", " "))
    drop = {"and", "before", "decoding", "row", "lines", "without", "or", "id"}
    return "".join(f"(?=.*{re.escape(word)})" for word in words if word not in drop)


@pytest.mark.parametrize("case", INDEX, ids=lambda case: case["id"])
def test_case(case: dict, builder: PromptBuilder, tmp_path: Path) -> None:
    name, expect = case["file"], case["expect"]
    if name.startswith("preds_"):
        rows = grade_file(INPUTS / name, tmp_path / "out.jsonl", kind="choice", mode="eval").rows
        assert [int(row["verdict"]) for row in rows] == [int(n) for n in re.findall(r"\d", expect)]
        return
    run: Callable[[], object] = (
        (lambda: load_image(str(INPUTS / name), "r")) if name.startswith("img_") else (lambda: _load(case, builder))
    )
    if expect.startswith("error naming"):
        if "line 2" in expect:
            expect = expect.replace("line 2", f"{name}:2")
        if "lines 1 and 3" in expect:
            expect = expect.replace("lines 1 and 3", f"{name}:1 {name}:3")
        with pytest.raises(UserError, match=_wanted(expect)) as caught:
            run()
        assert "\n" not in str(caught.value) and (name in str(caught.value) or "record" in str(caught.value))
    elif name.startswith("img_"):
        picture = load_image(str(INPUTS / name))
        width, height = map(int, re.search(r"(\d+)x(\d+)", expect).groups())
        assert picture.size == (width, height) == image_size(str(INPUTS / name)) and picture.mode == "RGB"
        if "white" in case:
            left, top, right, bottom = case["white"]
            assert (np.asarray(picture)[top : bottom + 1, left : right + 1] == 255).all()
        if "0 and 255" in expect:
            assert set(np.unique(np.asarray(picture))) == {0, 255}
    else:
        assert len(_load(case, builder)) == case["rows"]


def _case(name: str) -> dict:
    return next(case for case in INDEX if case["file"].startswith(name))


def test_what_the_rows_hold(builder: PromptBuilder) -> None:
    assert [e.answer for e in _open(_case("rows_mixed"))] == ["2", "two", "2.0", "true"]
    assert [len(e.images) for e in _open(_case("rows_multi_image"))] == [1, 2, 3]
    assert _open(_case("rows_box_overshoot"))[0].boxes[0].coords == (40, 10, 64, 48)
    thin = builder.build(_open(_case("rows_box_subpixel"))[0])
    assert len(thin.roi[0]) == 1
    sizes = [[image_size(ref) for ref in e.images] for e in _open(_case("table_bytes_path"))]
    assert sizes == [[(64, 48)], [(80, 60)], [(64, 48), (48, 64)]]
    u1, u2, _, u4, _ = _open(_case("rows_unicode"))
    assert plain(normalise(u1.answer)).strip("()") == "a" and plain(u2.answer) == plain("café")
    assert plain(u4.answer) != plain("3 km2")


def test_tables_that_are_partly_bad() -> None:
    settings = SourceSettings(kind="table", path=str(INPUTS / "table_null_struct.parquet"), fields=FIELDS["table_"])
    assert [(e.id, e.images) for e in open_source(settings, 1)] == [("r1", ()), ("r2", ())]
    options = SourceSettings(
        kind="table", path=str(INPUTS / "table_empty_cells.tsv"), fields=FIELDS["table_empty_cells"]
    )
    one, two = open_source(options, 1)
    assert one.options == ("grey", "blue") and two.options == ("NA", "null", "None", "yes") and two.answer == "A"


def test_every_file_of_visual_cot() -> None:
    files = sorted((CASES / "visual_cot").glob("*/*.json*"))
    assert len(files) == 30
    for file in files:
        source = open_source(SourceSettings(kind="visual_cot", path=str(file)), max_bad_records=40)
        assert len(source) >= 6 and all(e.boxes for e in source), file


def test_real_box_defects_are_clamped_or_named(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (CASES / "visual_cot" / "real_box_defects.jsonl").read_text().splitlines()]
    assert len(rows) == 70
    lines = []
    for number, row in enumerate(rows):
        box = row.get("bboxs") or [row["bbox"]]
        picture = {"image": row.get("image") or row["img_path"], "width": row["width"], "height": row["height"]}
        lines.append(
            {"id": f"{number}", "question": "?", "answer": "x", "boxes": box, "dataset": row["_file"], **picture}
        )
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    settings = SourceSettings(
        kind="jsonl", path=str(tmp_path / "rows.jsonl"), box_space="pixel", options={"box_lint": "off"}
    )
    kept = open_source(settings, max_bad_records=70)
    defects = {str(i): row["_defect"] for i, row in enumerate(rows)}
    assert all(defects[e.id] == "out_of_range" and e.meta["clamped"] for e in kept)
    assert len(kept) + len(kept.bad.messages) == 70
    for example in kept:
        width, height = example.meta["size"]
        for box in example.boxes:
            assert 0 <= box.coords[0] < box.coords[2] <= width and 0 <= box.coords[1] < box.coords[3] <= height
    assert all(re.search(r"record \d+: box .*(no area|outside)", message) for message in kept.bad.messages)
