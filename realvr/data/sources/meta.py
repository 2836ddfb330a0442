"""The format of published latent-reasoning code: a meta file that lists data files, and conversations with boxes.

Meta file: a JSON array of {`ds_name`, `data_path`, `image_folder`, …}, paths relative to the meta file where they do
not exist as written. Data file: JSON array or lines of {`image`: path or list, `conversations`: [{`from`, `value`}, …],
`bboxes`: [[x0, y0, x1, y1], …] normalised, `dataset`, `question_id` or `id`}. The last assistant turn is
`… <lvr> … <answer> text </answer>`, a `<lvr>` a box. A path to a data file itself works as well.

Earlier turns of a record become lines before the question. The turn as written is kept in `meta["response"]` where it
holds more than spans and the answer. Ids are `ds_name:position`: question ids repeat in these files.
"""

import re
from pathlib import Path
from typing import Any

from launch.errors import UserError
from realvr.config import SourceSettings
from realvr.data.examples import Example
from realvr.data.sources.build import RowOptions, read_boxes, read_question
from realvr.data.sources.records import Reader, image_root, read_options
from realvr.data.sources.rows import BadRecords, Chain, JsonRows, Row, read_json, resolve, stated_size

SPAN = "<lvr>"
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class MetaOptions(RowOptions):
    """`options` of the meta reader."""

    strip: tuple[str, ...] = ()
    """Sentences to take out of questions, for example `Provide a short and direct response.`"""


class Meta(Reader):
    """All data files of the meta file at `settings.path`, one after the other."""

    def __init__(self, settings: SourceSettings, max_bad_records: int = 0):
        options = read_options(MetaOptions, settings)
        self._parts = list(_parts(settings))
        self._chain = Chain([rows for _, rows, _ in self._parts])
        self._owner = {rows.path: (name, root) for name, rows, root in self._parts}
        super().__init__(self._chain, settings, options, BadRecords(max_bad_records))

    def draft(self, row: Row) -> Example:
        path = row.where[: row.where.rindex("[" if row.where.endswith("]") else ":")]
        name, root = self._owner[path]
        images = row.data.get("image", row.data.get("images"))
        images = [] if images is None else images if isinstance(images, list) else [images]
        refs = tuple(resolve(image, root, row) for image in images)
        turns = _turns(row)
        label = f"{name}:{row.number}"
        text = "\n".join(turns[:-1])
        for sentence in self.options.strip:
            text = text.replace(sentence, "")
        question = read_question(Row(row.where, row.number, {"question": text}), len(refs), self.options, label)
        raw = row.data.get("bboxes") or row.data.get("boxes") or []
        boxes = read_boxes(row, raw, len(refs), self.settings.box_space or "normalised")
        response, spans = turns[-1], turns[-1].count(SPAN)
        if spans and spans != len(boxes):
            raise UserError(
                f"{row.where}: {spans} {SPAN} tags in the last turn and {len(boxes)} boxes; give a box for each tag"
            )
        answer = _answer(response, row)
        size = stated_size(row)
        meta: dict[str, Any] = {"size": size} if size else {}
        if _ANSWER.sub("", response.replace(SPAN, "")).strip():
            meta["response"] = response
        source = str(row.data.get("dataset") or name)
        return Example(label, refs, question, answer, boxes, source, self.options.kind or "text", meta=meta)


def _parts(settings: SourceSettings) -> list[tuple[str, JsonRows, Path]]:
    """(name, rows, image folder) of every data file."""
    rows = read_json(settings.path)
    here = Path(settings.path or "").parent
    first = rows[0].data if len(rows) else {}
    if not isinstance(rows, JsonRows) or "data_path" not in first:
        files = rows.parts if isinstance(rows, Chain) else [rows]
        return [(Path(part.path).stem, part, image_root(settings)) for part in files]
    parts = []
    for row in rows:
        name, data, folder = (row.data.get(key) for key in ("ds_name", "data_path", "image_folder"))
        if not all(isinstance(value, str) and value for value in (name, data, folder)):
            raise UserError(f"{row.where}: an entry needs ds_name, data_path and image_folder, texts; complete it")
        root = Path(settings.image_root) if settings.image_root else _found(folder, here)
        parts.append((name, JsonRows(str(_found(data, here))), root))
    names = [name for name, _, _ in parts]
    if len(set(names)) < len(names):
        twice = max(names, key=names.count)
        raise UserError(f"{settings.path}: ds_name {twice} is there twice; name each data set once")
    return parts


def _found(path: str, here: Path) -> Path:
    return Path(path) if Path(path).exists() else here / path


def _turns(row: Row) -> list[str]:
    """Texts of the turns, human first, assistant last."""
    turns = row.data.get("conversations")
    turns = turns if isinstance(turns, list) and all(isinstance(t, dict) for t in turns) else []
    speakers = [turn.get("from") for turn in turns]
    values = [turn.get("value") for turn in turns]
    if speakers[:1] == ["system"]:
        speakers, values = speakers[1:], values[1:]
    wanted = ["human", "gpt"] * (len(values) // 2)
    if not values or speakers != wanted or not all(isinstance(value, str) for value in values):
        raise UserError(f"{row.where}: conversations should be human and gpt turns by turns; mend or drop the record")
    return [*(_plain(value) if i % 2 else value for i, value in enumerate(values[:-1])), values[-1]]


def _plain(turn: str) -> str:
    """An earlier assistant turn as text."""
    found = _ANSWER.search(turn)
    return (found.group(1) if found else turn.replace(SPAN, "")).strip()


def _answer(turn: str, row: Row) -> str:
    found = _ANSWER.findall(turn)
    answer = found[0].strip() if len(found) == 1 else turn.replace(SPAN, "").strip() if not found else ""
    if not answer:
        raise UserError(
            f"{row.where}: the last turn has {len(found)} answers that are not empty; it should have one; "
            f"mend or drop the record"
        )
    return answer
