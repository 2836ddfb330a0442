"""One row under our names → an example: tags counted, options listed, boxes in their declared space, answer checked."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from launch.errors import UserError
from realvr.config import SourceSettings
from realvr.data.examples import Box, BoxSpace, Example
from realvr.data.sources.records import ReaderOptions
from realvr.data.sources.rows import Row, resolve, stated_size, text_field

TAG = "<image>"
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_BOX = re.compile(r"\\boxed\s*\{")


class RowOptions(ReaderOptions):
    """`options` of readers of plain records."""

    image_tags: Literal["auto", "required"] = "auto"
    """`required` refuses a record whose question has no `<image>` tag a picture."""
    source: str = ""
    """Name of the data set in reports; a record's own `dataset` field wins."""
    inner_tags: Literal["refuse", "number"] = "refuse"
    """`<image>` inside a question: refuse the record, or write `[image 1]` there; pictures come before the question."""
    kind: Literal["text", "choice", "math"] | None = None
    """Kind of all answers; None takes the record's own, `choice` where there are options, else `text`."""
    boxed: bool = False
    """The answer is what stands in the last `\\boxed{}` of the answer field."""


def draft_of(row: Row, settings: SourceSettings, options: RowOptions, root: Path, source: str) -> Example:
    """The example of a row under our names; boxes not yet compared with the picture. UserError where it is bad."""
    data = row.data
    name = id_of(row)
    pictures = _images(row)
    images = tuple(resolve(image, root, row) for image in pictures)
    question = read_question(row, len(images), options, name)
    choices = _options(row)
    answer = text_field(row, "answer")
    if options.boxed:
        answer = unboxed(answer, row)
    own = data.get("kind") if data.get("kind") in ("math", "choice") else "text"
    kind = options.kind or ("choice" if choices else own)
    if choices:
        answer = _letter(answer, choices, row)
        question = f"{question}\n{option_lines(choices)}"
    size = stated_size(row)
    meta = _meta(row) | ({"size": size} if size else {})
    boxes = read_boxes(row, data.get("boxes"), len(images), settings.box_space)
    key = str(data.get("negative_key") or "") or next((p["key"] for p in pictures[:1] if _embedded(p)), "")
    source = str(data.get("source") or options.source or source)
    return Example(name, images, question, answer, boxes, source, kind, choices, key, meta)


def id_of(row: Row) -> str:
    """The record's own id, else its place in the file."""
    name = row.data.get("id")
    return str(name) if name not in (None, "") else Path(row.where).name


def option_lines(options: Sequence[str]) -> str:
    """`A. text`, an option a line: what stands below the question."""
    return "\n".join(f"{LETTERS[i]}. {text}" for i, text in enumerate(options))


def read_question(row: Row, pictures: int, options: RowOptions, name: str) -> str:
    """The question without its `<image>` tags, whose number must be the pictures' where there are any."""
    question = text_field(row, "question")
    tags = question.count(TAG)
    if tags != pictures and (tags or options.image_tags == "required"):
        raise UserError(
            f"{row.where}: record {name} has {tags} {TAG} tags and {pictures} picture{'s' * (pictures != 1)}; "
            f"write a tag for each picture or none"
        )
    before = 0
    while question.startswith(TAG):
        question, before = question.removeprefix(TAG).strip(), before + 1
    while question.endswith(TAG):
        question = question.removesuffix(TAG).strip()
    if TAG in question:
        if options.inner_tags == "refuse":
            raise UserError(
                f"{row.where}: record {name} has {TAG} inside the question; pictures come before it: move the tag, "
                f"or set options.inner_tags: number"
            )
        for number in range(before + 1, before + question.count(TAG) + 1):
            question = question.replace(TAG, f"[image {number}]", 1)
    if not question:
        raise UserError(f"{row.where}: record {name} has no question beside its {TAG} tags; mend or drop it")
    return question


def read_boxes(row: Row, raw: Any, pictures: int, declared: BoxSpace | None) -> tuple[Box, ...]:
    """The boxes of a record: [x0, y0, x1, y1], a list of them, or {"image": i, "box": […], "space": …} each."""
    raw = raw if raw is not None else []
    if not isinstance(raw, list):
        raise UserError(f"{row.where}: boxes are {raw!r}; they should be a list of [x0, y0, x1, y1]; mend or drop it")
    raw = [raw] if raw and isinstance(raw[0], int | float) else raw
    space = row.data.get("box_space") or declared
    boxes = []
    for entry in raw:
        own = entry.get("space") if isinstance(entry, Mapping) else None
        if (own or space) not in get_args(BoxSpace):
            raise UserError(
                f"{row.where}: it has boxes but box_space is {own or space!r}; declare it in the settings or the "
                f"record as one of {', '.join(get_args(BoxSpace))}"
            )
        boxes.append(_box(entry, own or space, pictures, row))
    return tuple(boxes)


def unboxed(answer: str, row: Row) -> str:
    """What the last `\\boxed{}` holds; the answer itself where there is no box. An unclosed or empty box is bad."""
    starts = list(_BOX.finditer(answer))
    if not starts:
        return answer
    start, depth = starts[-1].end(), 1
    for i in range(start, len(answer)):
        if answer[i] in "{}" and answer[i - 1] != "\\":
            depth += 1 if answer[i] == "{" else -1
        if not depth:
            if inner := answer[start:i].strip():
                return inner
            break
    raise UserError(f"{row.where}: answer is {answer[:80]!r}, an empty or unclosed box; mend or drop the record")


def _embedded(picture: Any) -> bool:
    return isinstance(picture, Mapping) and bool(picture.get("key")) and bool(picture.get("reference"))


def _images(row: Row) -> list[Any]:
    images = row.data.get("images")
    return [] if images is None else images if isinstance(images, list) else [images]


def _meta(row: Row) -> dict[str, Any]:
    meta = row.data.get("meta")
    if isinstance(meta, str) and meta:
        try:
            meta = json.loads(meta)
        except ValueError:
            meta = {"meta": meta}
    meta = dict(meta) if isinstance(meta, Mapping) else {}
    return meta | ({"kind": row.data["kind"]} if row.data.get("kind") else {})


def _options(row: Row) -> tuple[str, ...]:
    options = row.data.get("options") or []
    if not isinstance(options, list) or not all(isinstance(o, str) and o.strip() for o in options):
        raise UserError(
            f"{row.where}: options are {options!r}; they should be a list of texts; mend or drop the record"
        )
    if len(options) == 1 or len(options) > len(LETTERS):
        raise UserError(
            f"{row.where}: {len(options)} options; a choice has 2 to {len(LETTERS)}; mend or drop the record"
        )
    return tuple(o.strip() for o in options)


def _letter(answer: str, options: tuple[str, ...], row: Row) -> str:
    letters = LETTERS[: len(options)]
    if answer in letters and len(answer) == 1:
        return answer
    if options.count(answer) == 1:
        return letters[options.index(answer)]
    raise UserError(
        f"{row.where}: answer {answer!r} is none of the letters {letters[0]}–{letters[-1]} nor one option's text; "
        f"mend or drop the record"
    )


def _box(entry: Any, space: Any, pictures: int, row: Row) -> Box:
    image, coords = (entry.get("image"), entry.get("box")) if isinstance(entry, Mapping) else (None, entry)
    if image is None and pictures > 1:
        raise UserError(
            f"{row.where}: a box does not say which of {pictures} pictures it is on; "
            f'write {{"image": 0, "box": [x0, y0, x1, y1]}}'
        )
    index = 0 if image is None else image
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < pictures:
        raise UserError(f"{row.where}: a box names picture {index!r} of {pictures}; count them from 0")
    return Box(four_numbers(coords, row), space, index)


def four_numbers(coords: Any, row: Row) -> tuple[float, float, float, float]:
    """(x0, y0, x1, y1) of a raw box; anything else is bad."""
    numbers = isinstance(coords, list | tuple) and len(coords) == 4
    if not numbers or not all(isinstance(v, int | float) and not isinstance(v, bool) for v in coords):
        raise UserError(f"{row.where}: box {coords!r} is not four numbers [x0, y0, x1, y1]; mend or drop the record")
    return tuple(coords)
