"""Pictures that lie inside an Arrow file: references to them, and their bytes when they are wanted."""

import base64
import binascii
import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Any

from launch.errors import UserError

PREFIX = "table:"
_SAMPLE = 2048  # bytes at the start, middle and end of a picture that stand for it


def reference(file: str, row: int, column: str, item: int) -> str:
    """`table:FILE#ROW:ITEM:COLUMN`."""
    return f"{PREFIX}{Path(file).absolute()}#{row}:{item}:{column}"


def read(ref: str) -> bytes:
    """The encoded picture (PNG, JPEG …) behind a reference. A reference that leads nowhere raises UserError."""
    file, _, place = ref.removeprefix(PREFIX).rpartition("#")
    try:
        row, item, column = place.split(":", 2)
        cell = arrow_table(file).column(column)[int(row)]
        if hasattr(cell, "values") and not hasattr(cell, "keys"):
            cell = cell.values[int(item)]
        content = (cell["bytes"] if hasattr(cell, "keys") else cell).as_py()
    except (ValueError, KeyError, IndexError) as error:
        raise UserError(f"image {ref}: not in {file}; the table was changed: open it again") from error
    if content is None:
        raise UserError(f"image {ref}: has no bytes; the table was changed: open it again")
    return _decoded(content, ref) if isinstance(content, str) else content


@lru_cache(maxsize=64)
def arrow_table(file: str) -> Any:
    """The memory-mapped table of an Arrow file (stream or file format); only what is read enters memory."""
    import pyarrow as pa

    if not Path(file).is_file():
        raise UserError(
            f"{file}: no such file; tables are kept in the cache of `datasets`: "
            f"set HF_DATASETS_CACHE to a folder that every machine of the run sees"
        )
    source = pa.memory_map(file)
    try:
        return pa.ipc.open_stream(source).read_all()
    except pa.ArrowInvalid:
        return pa.ipc.open_file(pa.memory_map(file)).read_all()


def fingerprint(content: Any) -> str:
    """Key of a picture's bytes from their length and three samples: equal for copies, cheap for large files."""
    view, size = memoryview(content), len(content)
    middle = max(0, size // 2 - _SAMPLE // 2)
    digest = hashlib.blake2b(str(size).encode(), digest_size=12)
    for start in (0, middle, max(0, size - _SAMPLE)):
        digest.update(view[start : start + _SAMPLE])
    return f"bytes-{digest.hexdigest()}"


def _decoded(text: str, ref: str) -> bytes:
    try:
        return base64.b64decode(text.rpartition(",")[2] if text.startswith("data:") else text, validate=True)
    except binascii.Error as error:
        raise UserError(f"image {ref}: not base64 ({error}); mend or drop the record") from error
