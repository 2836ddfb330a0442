"""Files of JSON records → rows with their place in the file; bad records are named, counted and bounded.

A file is mapped into memory and indexed once (16 bytes a record); a record is parsed when it is asked for.
"""

import json
import logging
import math
import mmap
import re
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

from launch.errors import UserError

log = logging.getLogger(__name__)

_BOM = b"\xef\xbb\xbf"
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\]]', re.DOTALL)  # a whole string, or what nests


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
    """One record and where it stands: `file:line`, or `file[index]` in an array or a table.

    names: what the file calls a field where a field map renamed it (for messages).
    """

    where: str
    number: int
    data: Mapping[str, Any]
    names: Mapping[str, str] = field(default_factory=dict)


class Rows(Sequence[Row]):
    """Rows by index. Asking for one that cannot be parsed raises UserError."""

    columns: tuple[str, ...] = ()
    """Names of the columns where the file declares them."""

    def row(self, index: int) -> Row:
        raise NotImplementedError

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self.row(i) for i in range(*index.indices(len(self)))]
        return self.row(range(len(self))[index])


class JsonRows(Rows):
    """A JSON-lines file, or a file with one JSON array of objects. BOM, CRLF and blank lines are fine.

    A missing or empty file raises UserError; NaN and infinities, raw control characters, bytes that are not UTF-8 and
    anything but objects are bad records: asking for one raises UserError.
    """

    def __init__(self, path: str):
        self.path = path
        self._text = _mapped(path)
        self._starts, self._ends, self._numbers = array("Q"), array("Q"), array("Q")
        begin = len(_BOM) if self._text[: len(_BOM)] == _BOM else 0
        head = re.compile(rb"\s*").match(self._text, begin)
        if head is None or head.end() == len(self._text):
            raise UserError(f"{path}: the file is empty; it should hold one JSON object a line")
        self.array = self._text[head.end() : head.end() + 1] == b"["
        for number, start, end in self._elements(head.end()) if self.array else self._lines(begin):
            self._numbers.append(number)
            self._starts.append(start)
            self._ends.append(end)

    def __len__(self) -> int:
        return len(self._starts)

    def row(self, index: int) -> Row:
        start, number = self._starts[index], self._numbers[index]
        where = f"{self.path}[{number}]" if self.array else f"{self.path}:{number}"
        try:
            text = self._text[start : self._ends[index]].decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{where}: not UTF-8 at byte {start + error.start}; save the file as UTF-8") from error
        return Row(where, number, _object(text, where))

    def _lines(self, start: int) -> Iterator[tuple[int, int, int]]:
        number = 1
        while start < len(self._text):
            end = self._text.find(b"\n", start)
            end = len(self._text) if end < 0 else end
            if self._text[start:end].strip():
                yield number, start, end
            start, number = end + 1, number + 1

    def _elements(self, start: int) -> Iterator[tuple[int, int, int]]:
        """(index, start, end) of the elements of the array that begins at `start`."""
        depth, index, element, last = 0, 0, 0, start + 1
        for token in _TOKEN.finditer(self._text, start):
            mark = token.group() if token.end() - token.start() == 1 else b'"'
            if mark in b"{[":
                depth += 1
                element = token.start() if depth == 2 else element
            elif mark in b"}]":
                depth -= 1
                if depth == 1:
                    for span in self._between(last, element, index == 0):
                        yield index, *span
                        index += 1
                    yield index, element, token.end()
                    index, last = index + 1, token.end()
                elif depth == 0:
                    for span in self._between(last, token.start(), index == 0, closing=True):
                        yield index, *span
                        index += 1
                    rest = self._text[token.end() :].strip()
                    if rest:
                        raise UserError(f"{self.path}: not valid JSON (text after the array); mend the file")
                    return
        raise UserError(f"{self.path}: not valid JSON (the array is not closed: the file is cut?); mend the file")

    def _between(self, start: int, end: int, first: bool, closing: bool = False) -> Iterator[tuple[int, int]]:
        """Spans of what is no object between two elements; there should be nothing but a comma."""
        gap = self._text[start:end]
        if gap.strip() == (b"" if first or closing else b","):
            return
        middle = gap.strip(b", \t\r\n")
        if not middle:
            raise UserError(f"{self.path}: not valid JSON at byte {start} (a comma missing or too many); mend the file")
        at = start + gap.index(middle)
        yield at, at + len(middle)


class Chain(Rows):
    """Several files of rows, one after the other."""

    def __init__(self, parts: Sequence[Rows]):
        self.parts = parts
        self.columns = parts[0].columns if len(parts) == 1 else ()
        self._starts = [0]
        for part in parts:
            self._starts.append(self._starts[-1] + len(part))

    def __len__(self) -> int:
        return self._starts[-1]

    def part(self, index: int) -> int:
        """Which file a row is in."""
        return bisect_right(self._starts, index) - 1

    def row(self, index: int) -> Row:
        part = self.part(index)
        return self.parts[part].row(index - self._starts[part])


def read_json(path: str | None) -> Rows:
    """Rows of a file, of all `.jsonl` and `.json` files of a folder, or of a glob pattern."""
    if not path:
        raise UserError("data: the reader needs `path`, a JSON or JSON-lines file; set it in the source's settings")
    files = files_of(path, (".jsonl", ".json"))
    return JsonRows(files[0]) if len(files) == 1 else Chain([JsonRows(file) for file in files])


def files_of(path: str, suffixes: Iterable[str]) -> list[str]:
    """The file itself, or the files with these suffixes in a folder, or those that a glob pattern matches; sorted."""
    place = Path(path)
    if place.is_dir():
        found = sorted(str(p) for p in place.iterdir() if p.suffix in suffixes and not p.name.startswith("."))
        if not found:
            raise UserError(f"{path}: no {' or '.join(suffixes)} file in this folder; check data path")
        return found
    if not place.exists() and any(c in place.name for c in "*?"):
        found = sorted(map(str, place.parent.glob(place.name)))
        if not found:
            raise UserError(f"{path}: no file matches; check data path")
        return found
    return [path]


def _mapped(path: str) -> Any:
    try:
        with Path(path).open("rb") as file:
            if not file.seek(0, 2):
                return b""
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check data path") from error


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        data = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON ({error}); mend or drop the record") from error
    if not isinstance(data, dict):
        raise UserError(f"{where}: a {type(data).__name__}; it should be a JSON object; mend or drop the record")
    return data


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a JSON number")


def text_field(row: Row, name: str) -> str:
    """A non-empty string; numbers and booleans as JSON spells them (2.0 → `2.0`, true → `true`)."""
    value = row.data.get(name)
    if isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return json.dumps(value)
    if not isinstance(value, str) or not value.strip():
        called = f"{name} (field {row.names[name]})" if name in row.names else name
        absent = value is None and name not in row.data
        got = "missing" if absent else "empty" if isinstance(value, str) else "null" if value is None else repr(value)
        raise UserError(f"{row.where}: {called} is {got[:80]}; it should be a text or number; mend or drop the record")
    return value.strip()


def stated_size(row: Row) -> tuple[int, int] | None:
    """(width, height) where the record gives both."""
    size = (row.data.get("width"), row.data.get("height"))
    if size == (None, None):
        return None
    numbers = all(isinstance(side, int | float) and not isinstance(side, bool) for side in size)
    if not numbers or not all(math.isfinite(side) and side >= 1 for side in size):
        raise UserError(
            f"{row.where}: width and height are {size[0]!r} and {size[1]!r}; they should be pixels, both or neither"
        )
    return int(size[0]), int(size[1])


def resolve(image: Any, root: Path, row: Row) -> str:
    """Image reference: recipes, embedded pictures and absolute paths as they are, others below `root`."""
    if isinstance(image, Mapping):  # what `datasets` writes: a name, bytes, or both
        if image.get("reference"):
            return str(image["reference"])
        image = image.get("path")
        if image is None:
            raise UserError(f"{row.where}: a picture without bytes or path; mend or drop the record")
    if not isinstance(image, str) or not image.strip():
        raise UserError(f"{row.where}: image is {image!r}; it should be a path or a recipe; mend or drop the record")
    if image.startswith(("data:", "http://", "https://")):
        raise UserError(
            f"{row.where}: image is {image[:40]!r}; it should be a path: save the picture beside the file, "
            f"or keep pictures inside a parquet file"
        )
    return image if image.startswith(("shapes:", "digits:")) else str(root / image)
