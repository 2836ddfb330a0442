"""Field maps: which column of a user's file is the question, which the answer … and rows under our own names."""

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any

from launch.errors import UserError, did_you_mean
from realvr.data.sources.rows import Row

# Our name of a field → the names it is found under where no map says otherwise, first match.
FIELDS: dict[str, tuple[str, ...]] = {
    "id": ("id", "question_id"),
    "images": ("images", "image"),
    "question": ("question",),
    "answer": ("answer",),
    "boxes": ("boxes", "bboxs", "bboxes", "bbox"),
    "box_space": ("box_space",),
    "options": ("options",),
    "kind": ("kind",),
    "source": ("dataset", "source"),
    "width": ("width",),
    "height": ("height",),
    "negative_key": ("negative_key",),
    "meta": ("meta",),
}
_LISTS = ("images", "boxes", "options")
Target = str | Sequence[str]


class FieldMap:
    """`fields` of a source: our name → column, or a list of columns (options A, B, C, D; several images).

    A column may be a path into nested values: `reward_model.ground_truth`, `conversations.0.value`. Fields that the map
    does not name are found under their usual names.
    """

    def __init__(self, fields: Mapping[str, Target], columns: Sequence[str], label: str):
        for name in fields:
            if name not in FIELDS:
                raise UserError(f"{label}: fields.{name} is unknown; {did_you_mean(name, FIELDS)}")
        self.fields = dict(fields)
        if not columns:
            return
        for name, target in self.fields.items():
            for column in [target] if isinstance(target, str) else target:
                if column not in columns and column.split(".")[0] not in columns:
                    raise UserError(
                        f"{label}: fields.{name} is {column!r}, which is no column; {did_you_mean(column, columns)}"
                    )
        for name in ("question", "answer"):
            if name not in self.fields and not set(FIELDS[name]) & set(columns):
                raise UserError(
                    f"{label}: no column `{name}`; columns are {', '.join(columns)}: say which it is with "
                    f"`fields: {{{name}: COLUMN}}`"
                )

    def apply(self, row: Row) -> Row:
        """The row under our names; its place also names the id where a map or the file gives one."""
        data: dict[str, Any] = {}
        for name, usual in FIELDS.items():
            target = self.fields.get(name)
            if target is None:
                value = next((row.data[column] for column in usual if row.data.get(column) is not None), None)
                if value is None and not any(column in row.data for column in usual):
                    continue
            elif isinstance(target, str):
                value = _inside(row.data, target)
            else:
                value = _filled([_inside(row.data, column) for column in target], name, row)
            data[name] = _listed(value, name, row) if name in _LISTS else value
        names = {name: target for name, target in self.fields.items() if isinstance(target, str) and target != name}
        where = row.where
        if data.get("id") not in (None, ""):
            column = self.fields.get("id", "id")
            where = f"{where} ({column if isinstance(column, str) else 'id'} {data['id']})" if "[" in where else where
        return Row(where, row.number, data, names)


def _inside(data: Any, path: str) -> Any:
    """The value at a column, else at a dotted path; None where there is none."""
    if path in data:
        return data[path]
    for part in path.split("."):
        if isinstance(data, Mapping):
            data = data.get(part)
        elif isinstance(data, list) and part.lstrip("-").isdigit() and -len(data) <= int(part) < len(data):
            data = data[int(part)]
        else:
            return None
    return data


def _filled(values: list[Any], name: str, row: Row) -> list[Any]:
    """Several columns as a list: empty ones at the end are absent, one in between is an error."""
    empty = [value is None or value == "" for value in values]
    while empty and empty[-1]:
        empty.pop()
    if any(empty):
        raise UserError(
            f"{row.where}: {name} {empty.index(True) + 1} is empty, a later one is not; mend or drop the record"
        )
    return values[: len(empty)]


def _listed(value: Any, name: str, row: Row) -> Any:
    """A list written as text, as files without list columns have it."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return None if value == "" else value
    for read in (json.loads, ast.literal_eval):
        try:
            found = read(value)
        except (ValueError, SyntaxError):
            continue
        if isinstance(found, list):
            return found
    raise UserError(f"{row.where}: {name} is {value[:60]!r}, which is no list; mend or drop the record")
