"""Plain JSON lines: a user's own data.

Fields: `id` or `question_id` (else `file:line`), `image` or `images` (path or list), `question`, `answer`, `boxes` or
`bboxs` ([x0, y0, x1, y1] each, or {"image": i, "box": […]} with several images), `box_space` (or for the whole file in
the settings), `options` (multiple choice: the answer is a letter or the option's text), `kind`, `width`, `height`.
`<image>` tags before or after the question are dropped; where there are any, their number must be the pictures'.
Options are put below the question, one a line, as `A. text`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args, overload

from pydantic import ValidationError

from launch.config import Settings
from launch.errors import UserError
from realvr.config import SourceSettings
from realvr.data.boxes import checked
from realvr.data.examples import Box, BoxSpace, Example
from realvr.data.sources.rows import BadRecords, Row, read_rows, refuse_twice, resolve, stated_size, text_field

TAG = "<image>"
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class JsonlOptions(Settings):
    """`options` of the jsonl reader."""

    image_tags: Literal["auto", "required"] = "auto"
    """`required` refuses a record whose question has no `<image>` tag a picture."""
    source: str = "jsonl"
    """Name of the data set in reports; a record's own `dataset` field wins."""


class Records(Sequence[Example]):
    """Examples read into memory (pictures stay on disk). `bad` holds the messages of the records left out."""

    def __init__(self, examples: list[Example], bad: BadRecords):
        self.examples, self.bad = examples, bad

    def __len__(self) -> int:
        return len(self.examples)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: Any) -> Any:
        return self.examples[index]


class Jsonl(Records):
    """The file at `settings.path`. More than `max_bad_records` unreadable records raise UserError."""

    def __init__(self, settings: SourceSettings, max_bad_records: int = 0):
        self.settings, self.options = settings, read_options(JsonlOptions, settings)
        super().__init__([], BadRecords(max_bad_records))
        root = image_root(settings)
        seen: dict[str, str] = {}
        for row in read_rows(settings.path, self.bad):
            try:
                example = self._example(row, root)
                refuse_twice(seen, example.id, row)
            except UserError as error:
                self.bad.add(error)
            else:
                self.examples.append(example)
        if not self.examples:
            raise UserError(f"{settings.path}: no usable record; see the messages above")

    def _example(self, row: Row, root: Path) -> Example:
        data = row.data
        images = tuple(resolve(image, root, row) for image in _images(row))
        question = self._question(row, len(images))
        options = _options(row)
        answer = text_field(row, "answer")
        if options:
            answer = _letter(answer, options, row)
            question = "\n".join([question, *(f"{LETTERS[i]}. {text}" for i, text in enumerate(options))])
        size = stated_size(row)
        boxes, clamped = self._boxes(row, len(images), size)
        meta: dict[str, Any] = {"kind": data["kind"]} if "kind" in data else {}
        meta |= {"size": size} if size else {}
        meta |= {"clamped": clamped} if clamped else {}
        kind = "choice" if options else "math" if data.get("kind") == "math" else "text"
        source = str(data.get("dataset", self.options.source))
        return Example(_id(row), images, question, answer, boxes, source, kind, options, meta=meta)

    def _question(self, row: Row, pictures: int) -> str:
        question = text_field(row, "question")
        tags = question.count(TAG)
        if tags != pictures and (tags or self.options.image_tags == "required"):
            raise UserError(
                f"{row.where}: record {_id(row)} has {tags} {TAG} tags and {pictures} picture{'s' * (pictures != 1)}; "
                f"write a tag for each picture or none"
            )
        while question.startswith(TAG) or question.endswith(TAG):
            question = question.removeprefix(TAG).removesuffix(TAG).strip()
        if TAG in question:
            raise UserError(f"{row.where}: record {_id(row)} has {TAG} inside the question; pictures come before it")
        if not question:
            raise UserError(f"{row.where}: record {_id(row)} has no question beside its {TAG} tags; mend or drop it")
        return question

    def _boxes(self, row: Row, pictures: int, size: tuple[int, int] | None) -> tuple[tuple[Box, ...], int]:
        raw = _first(row, ("boxes", "bboxs", "bboxes", "bbox")) or []
        if not isinstance(raw, list):
            raise UserError(
                f"{row.where}: boxes are {raw!r}; they should be a list of [x0, y0, x1, y1]; mend or drop it"
            )
        raw = [raw] if raw and isinstance(raw[0], int | float) else raw
        space = row.data.get("box_space") or self.settings.box_space
        if raw and space not in get_args(BoxSpace):
            raise UserError(
                f"{row.where}: it has boxes but box_space is {space!r}; declare it in the settings or the record as "
                f"one of {', '.join(get_args(BoxSpace))}"
            )
        boxes, clamped = [], 0
        for entry in raw:
            box = _box(entry, space, pictures, row)
            if size and box.image == 0:
                box, moved = checked(box, *size, f"{row.where}: record {_id(row)}")
                clamped += moved
            boxes.append(box)
        return tuple(boxes), clamped


def read_options(model: type[Settings], settings: SourceSettings) -> Any:
    """The reader's own options, checked; an unknown or wrong one raises UserError naming those that exist."""
    try:
        return model(**settings.options)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise UserError(
            f"data: option {name!r} of {settings.kind}: {first['msg']}; options are {', '.join(model.model_fields)}"
        ) from None


def image_root(settings: SourceSettings) -> Path:
    """Folder that relative image paths start from."""
    return Path(settings.image_root) if settings.image_root else Path(settings.path or ".").parent


def _id(row: Row) -> str:
    name = _first(row, ("id", "question_id"))
    return str(name) if name is not None else f"{Path(row.where).name}"


def _first(row: Row, names: Sequence[str]) -> Any:
    return next((row.data[name] for name in names if row.data.get(name) is not None), None)


def _images(row: Row) -> list[Any]:
    images = _first(row, ("images", "image"))
    return [] if images is None else images if isinstance(images, list) else [images]


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
    image, coords = (entry.get("image"), entry.get("box")) if isinstance(entry, dict) else (None, entry)
    if image is None and pictures > 1:
        raise UserError(
            f"{row.where}: a box does not say which of {pictures} pictures it is on; "
            f'write {{"image": 0, "box": [x0, y0, x1, y1]}}'
        )
    numbers = isinstance(coords, list) and len(coords) == 4
    if not numbers or not all(isinstance(v, int | float) and not isinstance(v, bool) for v in coords):
        raise UserError(f"{row.where}: box {coords!r} is not four numbers [x0, y0, x1, y1]; mend or drop the record")
    index = 0 if image is None else image
    if not isinstance(index, int) or not 0 <= index < pictures:
        raise UserError(f"{row.where}: a box names picture {index!r} of {pictures}; count them from 0")
    return Box(tuple(coords), space, index)
