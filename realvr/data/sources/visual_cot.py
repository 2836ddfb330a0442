"""Visual-CoT's three published forms: conversations (benchmark), detection rows, and training metadata.

Conversations: the pixel box stands in an image string (`path###[x0, y0, x1, y1]`), which also says whose box it is;
the answer is the last turn. The box that the first answer turn repeats is pad-to-square and not read.
Detection rows have sizes and exact boxes but no answers: these come from the conversation file of the same questions.
Training rows: question, answer, image, pixel `bboxs`, sizes; `image_root` is the folder of their data set's pictures.
"""

import json
import re
from pathlib import Path
from typing import Any, Literal

from launch.errors import UserError
from realvr.config import SourceSettings
from realvr.data.examples import Box, Example
from realvr.data.sources.build import TAG, four_numbers
from realvr.data.sources.records import Reader, ReaderOptions, image_root, read_options
from realvr.data.sources.rows import BadRecords, Chain, JsonRows, Row, read_json, resolve, stated_size, text_field

_REQUEST = re.compile(r"\s*Please provide the bounding box coordinates?\b[^.?!]*[.?!]?\s*$", re.IGNORECASE)


class VisualCotOptions(ReaderOptions):
    """`options` of the visual_cot reader."""

    answers: str | None = None
    """Conversation file with the answers to detection rows; None looks for `../benchmark/NAME.json`."""
    ids: Literal["question_id", "position"] = "question_id"
    """What an id is made of; `position` where a file repeats its question ids."""
    folders: dict[str, str] = {}
    """Picture folder of each data set below `image_root`, for training rows, which give bare file names."""
    prefixes: dict[str, str] = {}
    """Beginnings of picture paths to replace, for example `cot/` by the folder that the release unpacks to."""


class VisualCot(Reader):
    """The file (or folder of files) at `settings.path`, any of the three forms, told apart by its fields."""

    def __init__(self, settings: SourceSettings, max_bad_records: int = 0):
        self.root, self._answers = image_root(settings), None
        options = read_options(VisualCotOptions, settings)
        super().__init__(read_json(settings.path), settings, options, BadRecords(max_bad_records))

    def draft(self, row: Row) -> Example:
        if "conversations" in row.data:
            return self._conversation(row)
        if "expression" in row.data:
            return self._detection(row)
        if "bboxs" in row.data:
            return self._training(row)
        raise UserError(
            f"{row.where}: none of Visual-CoT's forms; a record has conversations, expression or bboxs; "
            f"for other files use kind: jsonl"
        )

    def _conversation(self, row: Row) -> Example:
        plain, boxed = _split_images(row)
        names = list(dict.fromkeys([*plain, *(name for name, _ in boxed)]))
        turns = _turns(row)
        boxes = tuple(Box(coords, "pixel", names.index(name)) for name, coords in boxed)
        return self._build(row, names, strip_request(turns[0]), turns[-1].strip(), boxes)

    def _detection(self, row: Row) -> Example:
        key = str(row.data.get("question_id"))
        answers = self._answer_table()
        if key not in answers:
            raise UserError(
                f"{row.where}: no answer to question_id {key} in {self._answer_file()}; mend or drop the row"
            )
        boxes = (_pixel_box(row.data.get("bbox"), row),)
        return self._build(row, [row.data.get("img_path")], text_field(row, "expression"), answers[key], boxes)

    def _training(self, row: Row) -> Example:
        boxes = tuple(_pixel_box(coords, row) for coords in row.data["bboxs"] or [])
        question = strip_request(text_field(row, "question"))
        return self._build(row, [row.data.get("image")], question, text_field(row, "answer"), boxes)

    def _build(self, row: Row, images: list[Any], question: str, answer: str, boxes: tuple[Box, ...]) -> Example:
        if not question or not answer:
            raise UserError(f"{row.where}: an empty {'answer' if question else 'question'}; mend or drop the record")
        size = stated_size(row)
        dataset = str(row.data.get("dataset") or Path(self.settings.path or "").stem)
        number = row.data.get("question_id", row.number) if self.options.ids == "question_id" else row.number
        if self.options.ids == "position" and isinstance(self.rows, Chain):
            number = f"{Path(row.where).stem}-{number}"
        references = tuple(resolve(self._place(image, dataset), self.root, row) for image in images)
        meta = {"size": size} if size else {}
        return Example(f"{dataset}-{number}", references, question, answer, boxes, dataset, meta=meta)

    def _place(self, image: Any, dataset: str) -> Any:
        if not isinstance(image, str):
            return image
        for old, new in self.options.prefixes.items():
            if image.startswith(old):
                return new + image.removeprefix(old)
        folder = self.options.folders.get(dataset)
        return f"{folder}/{image}" if folder else image

    def _answer_file(self) -> Path:
        path = Path(self.settings.path or "")
        return (
            Path(self.options.answers)
            if self.options.answers
            else path.parent.parent / "benchmark" / f"{path.stem}.json"
        )

    def _answer_table(self) -> dict[str, str]:
        if self._answers is None:
            file = self._answer_file()
            if not file.is_file():
                raise UserError(
                    f"{self.settings.path}: detection rows have no answers and {file} is missing; "
                    f"set options.answers to the conversation file of the same questions"
                )
            rows = JsonRows(str(file))
            self._answers = {str(row.data.get("question_id")): _turns(row)[-1].strip() for row in rows}
        return self._answers


def strip_request(question: str) -> str:
    """The question without image tags and without the closing request for a bounding box."""
    return _REQUEST.sub("", question.replace(TAG, "").strip()).strip()


def _turns(row: Row) -> list[str]:
    turns = row.data["conversations"] if isinstance(row.data.get("conversations"), list) else []
    values = [t.get("value") if isinstance(t, dict) else None for t in turns]
    speakers = [t.get("from") if isinstance(t, dict) else None for t in turns]
    if len(turns) < 2 or not all(isinstance(v, str) for v in values) or speakers[0] != "human" or speakers[-1] != "gpt":
        raise UserError(
            f"{row.where}: conversations should run from a human turn to a gpt turn; mend or drop the record"
        )
    return values


def _split_images(row: Row) -> tuple[list[str], list[tuple[str, Any]]]:
    images = row.data.get("image")
    images = images if isinstance(images, list) else [images]
    plain: list[str] = []
    boxed: list[tuple[str, Any]] = []
    for entry in images:
        if not isinstance(entry, str):
            raise UserError(f"{row.where}: image is {entry!r}; it should be a path; mend or drop the record")
        name, *raw = entry.split("###")
        if not raw:
            plain.append(name)
        for text in raw:
            try:
                coords = json.loads(text)
            except ValueError:
                coords = text
            boxed.append((name, _pixel_box(coords, row).coords))
    return plain, boxed


def _pixel_box(coords: Any, row: Row) -> Box:
    return Box(four_numbers(coords, row), "pixel")
