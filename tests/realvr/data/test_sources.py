"""Readers on small files of their own: what they read, and the one line that each bad record gives."""

import json
from pathlib import Path

import pytest

from launch.errors import UserError
from realvr.config import SourceSettings
from realvr.data.sources import open_source, open_twins
from realvr.data.sources.visual_cot import strip_request

SAMPLES = Path(__file__).parents[2] / "samples"
REQUEST = "Please provide the bounding box coordinate of the region that can help you answer the question better."


def _visual_cot(file: str, **extra: object) -> SourceSettings:
    return SourceSettings(kind="visual_cot", path=str(SAMPLES / "visual_cot" / file), image_root=str(SAMPLES), **extra)


def _jsonl(path: Path, rows: list[dict] | str, **extra: object) -> SourceSettings:
    text = rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(text.encode())
    return SourceSettings(kind="jsonl", path=str(path), box_space="pixel", **extra)


def _row(name: str = "a1", **changes: object) -> dict:
    row = {"id": name, "image": "a.png", "question": "What is it?", "answer": "a cup", "boxes": [[8, 6, 30, 28]]}
    return {**row, "width": 64, "height": 48, **changes}


def test_conversations() -> None:
    shed, plate, tallest = open_source(_visual_cot("benchmark/garden.json"))
    assert (shed.id, shed.question, shed.answer) == ("garden-3", "What is the shed made of?", "wood")
    assert shed.images == (str(SAMPLES / "pictures/yard.jpg"),)
    assert [(b.coords, b.space, b.image) for b in shed.boxes] == [((10, 100, 60, 150), "pixel", 0)]
    assert plate.answer == "The plate." and plate.source == "garden"
    assert [Path(ref).name for ref in tallest.images] == ["desk.png", "yard.jpg"]
    assert [(b.coords, b.image) for b in tallest.boxes] == [((70, 20, 110, 90), 1), ((20, 30, 70, 90), 0)]


def test_detection_rows_take_their_answers_from_the_conversations() -> None:
    shed, plate = open_source(_visual_cot("benchmark_det/garden.jsonl"))
    assert (shed.id, shed.question, shed.answer) == ("garden-3", "What is the shed made of?", "wood")
    assert shed.boxes[0].coords == (10.4, 100.2, 60.1, 150.0)
    assert plate.boxes[0].coords == (100, 20, 160, 60) and plate.meta == {"size": (160, 120), "clamped": 1}


def test_training_rows_and_a_box_of_another_page() -> None:
    settings = _visual_cot("train/garden_train.jsonl")
    with pytest.raises(UserError, match=r"garden_train.jsonl:3: record garden-3: box \[20, 500, .* outside 160x120"):
        open_source(settings)
    rows = open_source(settings, max_bad_records=1)
    assert [e.id for e in rows] == ["garden-1", "garden-2"] and len(rows[1].boxes) == 2
    assert len(rows.bad.messages) == 1


def test_the_request_for_a_box_goes_and_nothing_else() -> None:
    assert strip_request(f"<image>\nWhat is it? {REQUEST}") == "What is it?"
    assert strip_request("<image>\nWho can provide the box? And why?") == "Who can provide the box? And why?"
    assert strip_request("Please provide the bounding box coordinates of the cup. What colour is it?").endswith("it?")


def test_own_data() -> None:
    settings = SourceSettings(kind="jsonl", path=str(SAMPLES / "questions.jsonl"), box_space="pixel")
    rows = {e.id: e for e in open_source(settings)}
    assert len(rows) == 8
    assert rows["d2"].question == "How many sheets of paper are there?" and rows["d2"].answer == "1"
    choice = rows["d3"]
    assert choice.question == "Which thing is round?\nA. the book\nB. the plate\nC. the paper"
    assert (choice.kind, choice.answer, choice.options) == ("choice", "B", ("the book", "the plate", "the paper"))
    assert rows["y2"].boxes == () and len(rows["w1"].boxes) == 2
    assert [b.image for b in rows["m1"].boxes] == [1] and rows["t1"].images == ()
    assert rows["d1"].key == rows["d2"].key != rows["y1"].key


def test_forms_of_files(tmp_path: Path) -> None:
    lines = [json.dumps(_row(f"a{i}")) for i in range(3)]
    for name, text in {
        "bom": "\ufeff" + "\n".join(lines) + "\n",
        "crlf": "\r\n\r\n".join(lines),
        "blank": "\n \n" + "\n\n".join(lines),
        "array": "[" + ",\n".join(lines) + "]",
    }.items():
        assert [e.id for e in open_source(_jsonl(tmp_path / name, text))] == ["a0", "a1", "a2"], name


def test_fields_in_their_variants(tmp_path: Path) -> None:
    answers = [2, 2.0, True, "two", "（Ａ）", " שלום "]
    rows = [_row(f"a{i}", answer=answer) for i, answer in enumerate(answers)]
    found = open_source(_jsonl(tmp_path / "answers", rows))
    assert [e.answer for e in found] == ["2", "2.0", "true", "two", "（Ａ）", "שלום"]
    variants = [
        _row(images=["a.png", "b.png"], image=None, question="<image><image>\nWhich?", boxes=[]),
        _row("a2", question_id="ignored", boxes=[8, 6, 30, 28], image="shapes:0.0.1|-|-|-|-"),
        {"question_id": 0, "image": "a.png", "question": "Why?\n<image>", "answer": "so", "bboxs": None},
        {"image": "a.png", "question": "Why?", "answer": "so"},
        _row("c", options=["a cup", "a jug"], answer="a jug", boxes=[[0, 0, 65, 48]]),
        _row("m", kind="math", box_space="thousand", boxes=[[0, 0, 900, 900]]),
    ]
    found = open_source(_jsonl(tmp_path / "rows", variants))
    assert [len(e.images) for e in found] == [2, 1, 1, 1, 1, 1]
    assert [e.question for e in found][:4] == ["Which?", "What is it?", "Why?", "Why?"]
    assert [e.id for e in found][2:4] == ["0", "rows:4"]
    assert found[1].boxes[0].coords == (8, 6, 30, 28) and found[1].images == ("shapes:0.0.1|-|-|-|-",)
    assert found[0].images == (str(tmp_path / "a.png"), str(tmp_path / "b.png"))
    assert found[4].answer == "B" and found[4].boxes[0].coords == (0, 0, 64, 48) and found[4].meta["clamped"] == 1
    assert found[5].kind == "math" and found[5].boxes[0].space == "thousand"


BAD = {
    "nan": ('{"id": "a", "image": "a.png", "question": "q", "answer": "a", "boxes": [[0, 0, 1, NaN]]}', "NaN is not"),
    "control": ('{"id": "a", "question": "q\tq", "answer": "a"}', "Invalid control character"),
    "list": ("[1]\n2", "not valid JSON"),
    "word": ('"word"', "a str; it should be a JSON object"),
    "answer": (_row(answer=""), "answer is empty"),
    "null": (_row(answer=None), "answer is null"),
    "absent": ({"id": "a", "question": "q"}, "answer is missing"),
    "question": (_row(question=["q"]), "question is"),
    "tags": (_row(question="<image>\n<image>\nWhich?"), "record a1 has 2 <image> tags and 1 picture;"),
    "inside": (_row(question="Is <image> dark?"), "inside the question"),
    "only": (_row(question="<image>"), "no question beside"),
    "outside": (_row(boxes=[[100, 80, 120, 95]]), "record a1: box .* outside 64x48"),
    "four": (_row(boxes=[[1, 2, 3]]), "not four numbers"),
    "truth": (_row(boxes=[[1, 2, 3, True]]), "not four numbers"),
    "mapping": (_row(boxes={"x": 1}), "should be a list"),
    "which": (_row(images=["a.png", "b.png"]), "which of 2 pictures"),
    "third": (_row(boxes=[{"image": 2, "box": [1, 2, 3, 4]}]), "names picture 2 of 1"),
    "size": (_row(width=0), "width and height are 0 and 48"),
    "picture": (_row(image=[None]), "image is None"),
    "letter": (_row(options=["x", "y"], answer="C"), "none of the letters A–B"),
    "one": (_row(options=["x"], answer="A"), "1 options; a choice has 2 to 26"),
    "space": (_row(box_space="inches"), "box_space is 'inches'"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_record_is_named_with_its_line(name: str, tmp_path: Path) -> None:
    raw, wanted = BAD[name]
    line = raw if isinstance(raw, str) else json.dumps(raw)
    good = json.dumps(_row("good"))
    settings = _jsonl(tmp_path / "rows.jsonl", f"{good}\n{line}\n" if name != "list" else line)
    with pytest.raises(UserError, match=wanted) as caught:
        open_source(settings)
    assert "\n" not in str(caught.value) and "rows.jsonl" in str(caught.value)
    if name != "list":
        assert "rows.jsonl:2" in str(caught.value)
        assert [e.id for e in open_source(settings, max_bad_records=1)] == ["good"]


def test_bad_records_are_bounded(tmp_path: Path) -> None:
    rows = [_row(f"a{i}", answer="" if i % 2 else "x") for i in range(8)]
    settings = _jsonl(tmp_path / "rows.jsonl", rows)
    assert len(open_source(settings, max_bad_records=4)) == 4
    with pytest.raises(UserError, match=r"rows.jsonl:8.*bad record 4, data.max_bad_records allows 3"):
        open_source(settings, max_bad_records=3)
    with pytest.raises(UserError, match="no usable record"):
        open_source(_jsonl(tmp_path / "none.jsonl", [_row(answer="")]), max_bad_records=9)


def test_ids_must_be_unique(tmp_path: Path) -> None:
    settings = _jsonl(tmp_path / "rows.jsonl", [_row("q7"), _row("q8"), _row("q7")])
    with pytest.raises(UserError, match=r"rows.jsonl:3: id q7 is already used at .*rows.jsonl:1"):
        open_source(settings)


def test_settings_are_checked(tmp_path: Path) -> None:
    settings = _jsonl(tmp_path / "rows.jsonl", [_row()])
    undeclared = settings.model_copy(update={"box_space": None})
    with pytest.raises(UserError, match="box_space is None; declare it"):
        open_source(undeclared)
    with pytest.raises(UserError, match=r"record a1 has 0 <image> tags and 1 picture;"):
        open_source(settings.model_copy(update={"options": {"image_tags": "required"}}))
    with pytest.raises(UserError, match=r"option 'tags' of jsonl.*options are .*image_tags, source"):
        open_source(settings.model_copy(update={"options": {"tags": "required"}}))
    with pytest.raises(UserError, match="needs `path`"):
        open_source(SourceSettings(kind="jsonl"))
    with pytest.raises(UserError, match="cannot be read"):
        open_source(SourceSettings(kind="visual_cot", path=str(tmp_path / "no.json")))
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "latin").write_bytes("{'é'}".encode("latin-1"))
    for name, wanted in (("empty", "file is empty"), ("latin", "not UTF-8 at byte 2")):
        with pytest.raises(UserError, match=wanted):
            open_source(SourceSettings(kind="jsonl", path=str(tmp_path / name)))


def test_visual_cot_errors(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "That."}]
    for row, wanted in (
        ({"conversations": turns[:1], "image": "a.png"}, "human turn to a gpt turn"),
        ({"conversations": turns[::-1], "image": "a.png"}, "human turn to a gpt turn"),
        ({"conversations": turns, "image": "a.png###[1, 2"}, "not four numbers"),
        ({"conversations": turns, "image": [None]}, "image is None"),
        ({"question": "q", "answer": "a"}, "none of Visual-CoT's forms"),
        ({"expression": "q", "img_path": "a.png", "bbox": [0, 0, 1, 1], "question_id": 1}, "options.answers"),
        ({"question": f"{REQUEST}", "answer": "a", "image": "a.png", "bboxs": []}, "empty question"),
    ):
        (tmp_path / "rows.jsonl").write_text(json.dumps(row))
        with pytest.raises(UserError, match=wanted) as caught:
            open_source(SourceSettings(kind="visual_cot", path=str(tmp_path / "rows.jsonl")))
        assert "rows.jsonl" in str(caught.value) and "\n" not in str(caught.value)


def test_generated_sets_open_too_and_only_they_have_twins() -> None:
    settings = SourceSettings(kind="shapes", size=5, seed=1)
    assert len(open_source(settings)) == 5 and len(open_twins(settings, 8)) == 8
    with pytest.raises(UserError, match="no counterfactual twins; use shapes or digits"):
        open_twins(_visual_cot("benchmark/garden.json"), 2)
