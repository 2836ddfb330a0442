"""Files of JSON records → rows with their place in the file; bad records are named, counted and bounded."""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.errors import UserError

log = logging.getLogger(__name__)


@dataclass
class BadRecords:
    """Collects what could not be read. Beyond `allowed` the reader stops with the last reason."""

    allowed: int = 0
    messages: list[str] = field(default_factory=list)

    def add(self, error: UserError) -> None:
        self.messages.append(str(error))
        if len(self.messages) > self.allowed:
            more = f" (bad record {len(self.messages)}, data.max_bad_records allows {self.allowed})"
            raise UserError(f"{error}{more if self.allowed else ''}") from error
        log.warning("left out: %s", error)


@dataclass(frozen=True)
class Row:
    """One record and where it stands: `file:line`, or `file[index]` in a JSON array."""

    where: str
    number: int
    data: dict[str, Any]


def read_rows(path: str | None, bad: BadRecords) -> Iterator[Row]:
    """Records of a JSON-lines file or of a file with one JSON array. BOM, CRLF and blank lines are fine.

    NaN and infinities, raw control characters and anything but objects are bad records. A missing, empty or non-UTF-8
    file raises UserError.
    """
    if not path:
        raise UserError("data: the reader needs `path`, a JSON or JSON-lines file; set it in the source's settings")
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check data path") from error
    if not text.strip():
        raise UserError(f"{path}: the file is empty; it should hold one JSON object a line")
    if text.lstrip().startswith("["):
        yield from _array(path, text, bad)
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            yield Row(where, number, _object(line.strip("\r"), where))
        except UserError as error:
            bad.add(error)


def _array(path: str, text: str, bad: BadRecords) -> Iterator[Row]:
    try:
        rows = json.loads(text, parse_constant=_refuse)
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error}); mend the file") from error
    for index, data in enumerate(rows):
        where = f"{path}[{index}]"
        if isinstance(data, dict):
            yield Row(where, index, data)
        else:
            bad.add(UserError(f"{where}: a {type(data).__name__}; it should be a JSON object; mend or drop the record"))


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        data = json.loads(line, parse_constant=_refuse)
    except ValueError as error:
        raise UserError(f"{where}: not valid JSON ({error}); mend or drop the line") from error
    if not isinstance(data, dict):
        raise UserError(f"{where}: a {type(data).__name__}; it should be a JSON object; mend or drop the line")
    return data


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a JSON number")


def text_field(row: Row, name: str) -> str:
    """A non-empty string; numbers and booleans as JSON spells them (2.0 → `2.0`, true → `true`)."""
    value = row.data.get(name)
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    if not isinstance(value, str) or not value.strip():
        got = "missing" if name not in row.data else "empty" if isinstance(value, str) else json.dumps(value)
        raise UserError(f"{row.where}: {name} is {got}; it should be a text or number; mend or drop the record")
    return value.strip()


def stated_size(row: Row) -> tuple[int, int] | None:
    """(width, height) where the record gives both."""
    if "width" not in row.data and "height" not in row.data:
        return None
    size = (row.data.get("width"), row.data.get("height"))
    if not all(isinstance(side, int | float) and not isinstance(side, bool) and side >= 1 for side in size):
        raise UserError(
            f"{row.where}: width and height are {size[0]!r} and {size[1]!r}; they should be pixels, both or neither"
        )
    return int(size[0]), int(size[1])


def refuse_twice(seen: dict[str, str], name: str, row: Row) -> None:
    """UserError when the id was used by an earlier row; `seen` maps ids to places."""
    if name in seen:
        raise UserError(f"{row.where}: id {name} is already used at {seen[name]}; ids must be unique: rename one")
    seen[name] = row.where


def resolve(image: Any, root: Path, row: Row) -> str:
    """Image reference: recipes and absolute paths as they are, others below `root`."""
    if not isinstance(image, str) or not image.strip():
        raise UserError(f"{row.where}: image is {image!r}; it should be a path or a recipe; mend or drop the record")
    return image if image.startswith(("shapes:", "digits:")) else str(root / image)
