"""Tables on disk (parquet, arrow, CSV, TSV, hub sets) → rows, through `datasets` and memory-mapped Arrow files.

Pictures inside a table are never read here: a row holds a reference (`table:FILE#ROW:ITEM:COLUMN`) that
`realvr.data.images` resolves. `datasets` keeps the Arrow files in its cache (HF_DATASETS_CACHE), which workers on other
machines must see too.
"""

import csv
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launch.errors import UserError
from realvr.data.embedded import arrow_table, fingerprint, reference
from realvr.data.sources.rows import Row, Rows, files_of

SUFFIXES = {".parquet": "parquet", ".arrow": "arrow", ".csv": "csv", ".tsv": "csv"}


class ArrowRows(Rows):
    """Rows of Arrow files, read where they lie. `label` names the table in messages."""

    def __init__(self, files: list[str], label: str, base64_column: str | None = None):
        self.files, self.label, self._base64 = files, label, base64_column
        self._tables = [arrow_table(file) for file in files]
        self.columns = tuple(self._tables[0].column_names) if files else ()
        self._starts = [0]
        for table in self._tables:
            self._starts.append(self._starts[-1] + table.num_rows)

    def __len__(self) -> int:
        return self._starts[-1]

    def row(self, index: int) -> Row:
        part = next(i for i, start in enumerate(self._starts[1:]) if index < start)
        data = _Cells(self._tables[part], self.files[part], index - self._starts[part], self._base64)
        return Row(f"{self.label}[{index}]", index, data)


class _Cells(Mapping[str, Any]):
    """One row; a cell is converted when it is asked for, and the bytes of pictures never."""

    def __init__(self, table: Any, file: str, row: int, base64_column: str | None):
        self._table, self._file, self._row, self._base64 = table, file, row, base64_column

    def __getitem__(self, name: str) -> Any:
        if name not in self._table.column_names:
            raise KeyError(name)
        cell = self._table.column(name)[self._row]
        if name == self._base64 and not _nests(cell.type):
            return self._picture(cell, name, 0) if cell.is_valid else None
        if not _holds_bytes(cell.type):
            return cell.as_py()
        if not cell.is_valid:
            return None
        if _nests(cell.type):
            return [self._picture(cell.values[i], name, i) for i in range(len(cell.values))]
        return self._picture(cell, name, 0)

    def __iter__(self) -> Iterator[str]:
        return iter(self._table.column_names)

    def __len__(self) -> int:
        return len(self._table.column_names)

    def _picture(self, cell: Any, column: str, item: int) -> dict[str, Any]:
        content, name = cell, None
        if hasattr(cell, "keys"):  # struct<bytes, path>
            content = cell["bytes"] if cell.is_valid else None
            name = cell["path"].as_py() if cell.is_valid and "path" in cell else None
        if content is None or not content.is_valid:
            return {"reference": None, "path": name}
        found = reference(self._file, self._row, column, item)
        return {"reference": found, "path": name, "key": fingerprint(content.as_buffer())}


def open_table(path: str, base64_column: str | None = None) -> Rows:
    """Rows of a parquet, arrow, CSV or TSV file, of a folder of them, or of a glob pattern; else UserError."""
    files = files_of(path, SUFFIXES)
    kinds = {SUFFIXES.get(Path(file).suffix) for file in files}
    if len(kinds) != 1 or None in kinds:
        raise UserError(f"{path}: several kinds of file, or an unknown one; give {', '.join(SUFFIXES)} or JSON lines")
    for file in files:
        if not Path(file).is_file():
            raise UserError(f"{file}: cannot be read (No such file or directory); check data path")
        if not Path(file).stat().st_size:
            raise UserError(f"{file}: the file is empty; it should be a table")
    kind = kinds.pop()
    if kind == "arrow":
        with _told(path):
            return ArrowRows(files, path, base64_column)
    extra: dict[str, Any] = {}
    if kind == "csv":
        extra = _as_text(files)
    return _loaded(path, base64_column, kind, data_files=files, split="train", **extra)


def open_hub(hub: str, subset: str | None, split: str, revision: str | None, base64_column: str | None) -> Rows:
    """Rows of a data set on the Hugging Face hub (or in its cache, offline)."""
    return _loaded(hub, base64_column, hub, name=subset, split=split, revision=revision)


def _loaded(label: str, base64_column: str | None, *args: Any, **kwargs: Any) -> Rows:
    import datasets

    quiet = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        with _told(label):
            found = datasets.load_dataset(*args, **kwargs)
            files = [entry["filename"] for entry in found.cache_files]
            return ArrowRows(files, label, base64_column)
    finally:
        if quiet:
            datasets.enable_progress_bars()


@contextmanager
def _told(label: str) -> Iterator[None]:
    """Whatever a library says about a file it cannot read, as one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # parquet, csv, cast and hub errors have no common base
        cause = error.__cause__ if type(error).__name__ == "DatasetGenerationError" and error.__cause__ else error
        reason = " ".join(str(cause).split())[:240] or type(cause).__name__
        raise UserError(
            f"{label}: cannot be read as a table ({reason}); check the file, or hub id, subset and split"
        ) from error


def _as_text(files: list[str]) -> dict[str, Any]:
    """Arguments that keep every cell as it is written: `NA` and `007` are texts, an empty cell is an empty text."""
    import datasets

    separator = "\t" if Path(files[0]).suffix == ".tsv" else ","
    with Path(files[0]).open(encoding="utf-8-sig", newline="") as file:
        names = next(csv.reader(file, delimiter=separator), [])
    if not names or len(set(names)) != len(names) or not all(name.strip() for name in names):
        raise UserError(f"{files[0]}: its first line is {names!r}; it should name every column once")
    features = datasets.Features({name: datasets.Value("string") for name in names})
    plain = {"keep_default_na": False, "na_filter": False, "encoding": "utf-8-sig"}
    return {"sep": separator, "features": features, **plain}


def _nests(kind: Any) -> bool:
    import pyarrow as pa

    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _holds_bytes(kind: Any) -> bool:
    import pyarrow as pa

    kind = kind.value_type if _nests(kind) else kind
    if pa.types.is_struct(kind):
        return kind.get_field_index("bytes") >= 0
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
