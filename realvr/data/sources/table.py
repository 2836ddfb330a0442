"""Any table: JSON lines, parquet, arrow, CSV, TSV, or a data set on the hub, read through a field map.

`path` is a file, a folder of files or a glob pattern; `hub` is a hub id with options `subset`, `split`, `revision`.
`fields` says which column is what; columns with our own names need no entry. Pictures may be paths (below
`image_root`), structs of bytes and path as `datasets` writes them, bytes, or base64 text (`options.image_encoding`).
"""

from pathlib import Path
from typing import Literal

from launch.errors import UserError
from realvr.config import SourceSettings
from realvr.data.examples import Example
from realvr.data.fields import FIELDS, FieldMap, Target
from realvr.data.sources.arrow import open_hub, open_table
from realvr.data.sources.build import RowOptions, draft_of
from realvr.data.sources.records import Reader, image_root, read_options
from realvr.data.sources.rows import BadRecords, Row, Rows, read_json


class TableOptions(RowOptions):
    """`options` of the table reader."""

    subset: str | None = None
    """Subset (configuration) of a hub set."""
    split: str = "train"
    """Split of a hub set; `train[:1000]` takes a part."""
    revision: str | None = None
    """Commit or tag of a hub set."""
    image_encoding: Literal["file", "base64"] = "file"
    """How a text in the image column is read: as the path of a file, or as the picture itself."""


class Table(Reader):
    """The table at `settings.path` or `settings.hub`. More than `max_bad_records` bad records raise UserError."""

    usual: dict[str, Target] = {}
    """Field map of a published set; `settings.fields` wins."""

    def __init__(self, settings: SourceSettings, max_bad_records: int = 0):
        options = read_options(self.options_model(), settings)
        fields = self.usual | settings.fields
        rows = open_rows(settings, options, fields)
        label = settings.path or settings.hub or ""
        self._map = FieldMap(fields, rows.columns, label)
        self._root, self._source = image_root(settings), Path(label).stem
        super().__init__(rows, settings, options, BadRecords(max_bad_records))

    @classmethod
    def options_model(cls) -> type[TableOptions]:
        """The model of `options`."""
        return TableOptions

    def draft(self, row: Row) -> Example:
        return draft_of(self._map.apply(row), self.settings, self.options, self._root, self._source)


def open_rows(settings: SourceSettings, options: TableOptions, fields: dict[str, Target]) -> Rows:
    """Rows of the file, folder or hub set that the settings name."""
    if (settings.path is None) == (settings.hub is None):
        raise UserError("data: a table needs either `path` (a file, folder or pattern) or `hub` (a hub id); set one")
    base64_column = None
    if options.image_encoding == "base64":
        named = fields.get("images", FIELDS["images"])
        base64_column = named if isinstance(named, str) else named[0] if "images" in fields else "image"
    if settings.hub is not None:
        return open_hub(settings.hub, options.subset, options.split, options.revision, base64_column)
    path = Path(settings.path or "")
    suffixes = {p.suffix for p in path.iterdir()} if path.is_dir() else {path.suffix}
    if suffixes & {".jsonl", ".json"} and not suffixes & {".parquet", ".arrow"}:
        return read_json(settings.path)
    return open_table(settings.path or "", base64_column)
