"""A run's folder on disk: who owns it, its attempts, its configuration, its metrics.

runs/<name>/config.yaml, versions.json    of the latest attempt
            run.json                      W&B id, attempts, status, total steps
            metrics.jsonl  samples/  checkpoints/
            logs/attempt-001/             driver.log, workers/, config.yaml, versions.json, superseded.jsonl
            lock                          pid and host of the driver that owns the folder
"""

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import yaml
from pydantic import ValidationError

from launch.config import JobSettings, dump_config
from launch.config_files import from_yaml
from launch.errors import UserError
from launch.files import write_atomic, write_json

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Own a run folder while the block runs; the operating system lets go when the process dies, however it dies.

    Raises:
        UserError: another driver owns it, or it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = (folder / "lock").open("a+", encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"run folder {folder}: cannot be written ({error.strerror}); choose another runs_dir"
        ) from error
    with handle:
        try:
            _lock(handle)
        except BlockingIOError:
            raise UserError(
                f"run folder {folder}: another driver is at work in it ({owner(folder) or 'unknown'}); wait for it, "
                f"stop it with `touch {folder / 'STOP'}`, or choose another name"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            raise UserError(
                f"run folder {folder}: its file system has no file locks ({error.strerror}), so two drivers could mix "
                "their checkpoints; choose a runs_dir on one that has (Lustre: mounted with flock)"
            ) from error
        handle.truncate(0)
        handle.write(f"pid {os.getpid()} on {socket.gethostname()}\n")
        handle.flush()
        try:
            yield
        finally:
            handle.truncate(0)


def _lock(handle: TextIO) -> None:
    for wait in (0.1, 0.3, 0.6, None):  # `launch status` holds a shared lock for an instant
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if wait is None:
                raise
            time.sleep(wait)


def owner(folder: Path) -> str | None:
    """`pid N on HOST` of the driver that owns the folder now; None when nobody does (a dead one's note is stale)."""
    path = folder / "lock"
    if not path.is_file():
        return None
    with path.open("r", encoding="utf-8") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return handle.read().strip() or "unknown"
    return None


def read_record(folder: Path) -> dict[str, Any]:
    """Content of `run.json`, or an empty dict in a new folder."""
    path = folder / "run.json"
    if not path.is_file():
        return {}
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        record["wandb_id"], record["attempts"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); restore it, or choose another run name") from error
    return record


def update_record(folder: Path, **changes: Any) -> None:
    """Change entries of `run.json`."""
    write_json(folder / "run.json", read_record(folder) | changes)


def new_attempt(folder: Path) -> tuple[int, Path]:
    """Number and log folder of the next attempt."""
    logs = folder / "logs"
    numbers = [int(path.name[8:]) for path in logs.glob("attempt-*") if path.name[8:].isdigit()]
    number = max(numbers, default=0) + 1
    path = logs / f"attempt-{number:03d}"
    (path / "workers").mkdir(parents=True)
    return number, path


def write_settings(folder: Path, attempt: Path, settings: JobSettings, versions: dict[str, Any]) -> None:
    """Configuration and versions, in the run folder (latest) and in the attempt's logs (all)."""
    for place in (attempt, folder):
        write_atomic(place / "config.yaml", dump_config(settings))
        write_json(place / "versions.json", versions)


def check_same_mathematics(folder: Path, settings: JobSettings) -> None:
    """Refuse to continue a run with settings that change what a step computes.

    Raises:
        UserError: lists the fields that differ from `config.yaml` in the folder.
    """
    path = folder / "config.yaml"
    try:
        stored = from_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path}: cannot be read ({error}); restore it, or choose another run name") from error
    # Fields that the code did not have when the run began get their defaults; a file of quite other code is compared
    # as it stands.
    with suppress(ValidationError):
        stored = type(settings).model_validate(stored).model_dump(mode="json")
    then, now = _flat(stored), _flat(settings.model_dump(mode="json"))
    changed = [
        f"{name} was {then.get(name, 'absent')!r}, is now {now.get(name, 'absent')!r}"
        for name in {**then, **now}
        if then.get(name, "absent") != now.get(name, "absent") and not _may_change(name, settings)
    ]
    if changed:
        raise UserError(
            f"{path}: the run that is to be continued has other settings: {'; '.join(changed)}; give the former "
            "values, or another name for a new run"
        )


def supersede_metrics(folder: Path, step: int, attempt: Path) -> int:
    """Move the lines of steps that will be done again into the attempt's `superseded.jsonl`.

    Args:
        step: finished steps of the checkpoint that the run continues from.

    Returns:
        How many lines were moved; a line cut off by a crash counts.
    """
    path = folder / "metrics.jsonl"
    if not path.is_file():
        return 0
    kept, moved = [], []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        (kept if _step_of(line) <= step else moved).append(line + "\n")
    if moved:
        write_atomic(attempt / "superseded.jsonl", "".join(moved))
        write_atomic(path, "".join(kept))
    return len(moved)


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")


def _may_change(name: str, settings: JobSettings) -> bool:
    return any(name == allowed or name.startswith(allowed + ".") for allowed in settings.may_change)


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(values, dict) or not values:
        return {prefix: values}
    return {
        name: leaf
        for key, value in values.items()
        for name, leaf in _flat(value, f"{prefix}.{key}".lstrip(".")).items()
    }
