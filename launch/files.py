"""Files that survive a crash: atomic replacement, fsync, and what a full disk looks like."""

import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_FULL = {errno.ENOSPC, errno.EDQUOT}
# Libraries that write in C++ or Rust keep only the text of the system's error.
_FULL_TEXTS = ("no space left on device", "disk quota exceeded", "pytorchstreamwriter failed writing")


def write_atomic(path: Path, text: str) -> None:
    """Write a small file so that a reader, or a crash, sees the old text or the new one and nothing between."""
    aside = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """`write_atomic` of indented JSON."""
    write_atomic(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def sync_folder(path: Path) -> None:
    """Flush a folder's entries: without it a renamed file may be gone after a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(root: Path) -> None:
    """Flush every file and folder below `root`, and `root`."""
    for folder, _, names in os.walk(root):
        for name in names:
            handle = os.open(Path(folder, name), os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        sync_folder(Path(folder))


def disk_is_full(error: BaseException | None) -> bool:
    """Whether an error, or one that led to it, says that the disk or the quota is full."""
    return any(
        (isinstance(link, OSError) and link.errno in _FULL) or any(text in str(link).lower() for text in _FULL_TEXTS)
        for link in _links(error)
    )


def free_bytes(folder: Path) -> int:
    """Free bytes of the file system that holds `folder`."""
    return shutil.disk_usage(folder).free


def human(size: float) -> str:
    """Bytes for people: `3.1 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def _links(error: BaseException | None) -> Iterator[BaseException]:
    """An error and everything it came from; Ray keeps the worker's error in `.cause`."""
    todo, seen = [error], set()
    while todo:
        link = todo.pop()
        if isinstance(link, BaseException) and id(link) not in seen:
            seen.add(id(link))
            yield link
            todo += [link.__cause__, link.__context__, getattr(link, "cause", None)]
