"""Checkpoints on disk: written aside, flushed, renamed; a half-written one is never picked.

checkpoints/step-000025/…           what the job wrote, and state.json with a manifest of it
checkpoints/step-000050.tmp-…/      being written, or left by a crash: removed by the next run
checkpoints/latest, best            names of folders
"""

import json
import logging
import os
import re
import shutil
import socket
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.errors import UserError
from launch.files import disk_is_full, free_bytes, human, sync_folder, sync_tree, write_atomic, write_json

log = logging.getLogger(__name__)

STATE = "state.json"
_NAME = re.compile(r"^step-(\d{6,})$")
_CHUNK = 1 << 22


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    path: Path
    step: int
    """Finished optimizer steps."""
    state: dict[str, Any]
    """What the job returned when it saved (JSON)."""
    run: dict[str, Any]
    """What the run itself keeps: W&B id, best validation so far."""
    size: int
    """Bytes of all files in the manifest."""


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        folder: `runs/<name>/checkpoints`, made when the first one is saved.
        keep: how many of the newest stay; the best one stays besides.
        checksums: put a CRC-32 of every file into the manifest; without it only sizes are known.
    """

    def __init__(self, folder: Path, keep: int = 2, checksums: bool = True) -> None:
        self.folder = Path(folder)
        self.keep = keep
        self.checksums = checksums

    def save(
        self,
        step: int,
        write: Callable[[Path], dict[str, Any] | None],
        state: dict[str, Any] | None = None,
        run: dict[str, Any] | None = None,
    ) -> Checkpoint:
        """Save a checkpoint; on return it is on disk and `latest` names it.

        Args:
            step: finished optimizer steps.
            write: puts its files into the folder that it is given; a dict that it returns is added to `state`.
            state, run: JSON.

        Raises:
            UserError: the disk is full. The partial folder is gone and former checkpoints are untouched.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.clean()
            name = f"step-{step:06d}"
            aside = self.folder / f"{name}.tmp-{socket.gethostname()}-{os.getpid()}"
            aside.mkdir()
            try:
                state = dict(state or {}) | (write(aside) or {})
                if (aside / STATE).exists():
                    raise ValueError(f"a job must not write {STATE} into its checkpoint; return a dict instead")
                files = _manifest(aside, self.checksums)
                content = {"format": 1, "step": step, "state": state, "run": run or {}, "files": files}
                write_json(aside / STATE, content)
                sync_tree(aside)
                self._discard(self.folder / name)  # of a run that was resumed further back
                aside.rename(self.folder / name)
            except BaseException:
                shutil.rmtree(aside, ignore_errors=True)
                raise
            sync_folder(self.folder)
            write_atomic(self.folder / "latest", name + "\n")
        except Exception as error:
            if disk_is_full(error):
                raise self._full(step, error) from error
            raise
        self.prune()
        saved = read_checkpoint(self.folder / name)
        log.info("checkpoint of step %d: %s (%s)", step, saved.path, human(saved.size))
        return saved

    def latest(self) -> Checkpoint | None:
        """The newest complete checkpoint; broken ones are named in the log and passed over."""
        for path in reversed(self._paths()):
            try:
                return read_checkpoint(path)
            except UserError as error:
                log.warning("checkpoint passed over: %s", error)
        return None

    def newest_sound(self) -> Checkpoint | None:
        """As `latest`, with the content of the files checked against the manifest as well."""
        for path in reversed(self._paths()):
            try:
                checkpoint = read_checkpoint(path)
            except UserError as error:
                log.warning("checkpoint passed over: %s", error)
                continue
            problems = verify(checkpoint)
            if not problems:
                return checkpoint
            log.warning("checkpoint passed over: %s: %s", path, "; ".join(problems))
        return None

    def steps(self) -> list[int]:
        """Steps of the checkpoints that are there, oldest first."""
        return [int(path.name.removeprefix("step-")) for path in self._paths()]

    def mark_best(self, step: int) -> None:
        """Keep this checkpoint whatever comes after it; `best` names it."""
        path = self.folder / f"step-{step:06d}"
        read_checkpoint(path)
        write_atomic(self.folder / "best", path.name + "\n")
        self.prune()

    def best(self) -> Checkpoint | None:
        """The checkpoint that `best` names."""
        pointer = self.folder / "best"
        path = self.folder / pointer.read_text().strip() if pointer.is_file() else None
        return read_checkpoint(path) if path is not None and path.is_dir() else None

    def prune(self) -> None:
        """Remove all but the newest `keep` and the best."""
        pointer = self.folder / "best"
        best = pointer.read_text().strip() if pointer.is_file() else None
        for path in self._paths()[: -self.keep]:
            if path.name != best:
                self._discard(path)

    def clean(self) -> None:
        """Remove what a crash left half-written. Only the run that owns the folder may call this."""
        if self.folder.is_dir():
            for path in self.folder.glob("*.tmp-*"):
                log.info("removing %s, left by a run that ended while writing", path)
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _paths(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        return sorted((path for path in self.folder.iterdir() if _NAME.match(path.name)), key=lambda p: int(p.name[5:]))

    def _discard(self, path: Path) -> None:
        """Remove a checkpoint; renamed first, so that one half-removed is not taken for one."""
        if path.exists():
            doomed = path.with_name(f"{path.name}.tmp-removed-{os.getpid()}")
            path.rename(doomed)
            shutil.rmtree(doomed)

    def _full(self, step: int, error: BaseException) -> UserError:
        last = self.latest()
        wanted = f"the last one took {human(last.size)}, " if last else ""
        stays = f"the checkpoint of step {last.step} stays the latest" if last else "there is no earlier checkpoint"
        return UserError(
            f"{self.folder}: the disk is full, the checkpoint of step {step} was not written ({wanted}"
            f"{human(free_bytes(self.folder.parent))} are free); {stays}; free space or lower checkpoint.keep "
            f"({self.keep}), then start the same command again"
        )


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint's state and check that its files are there in full length.

    Raises:
        UserError: no checkpoint, an unreadable state.json, a file missing or of another size.
    """
    path = Path(path)
    try:
        content = json.loads((path / STATE).read_text(encoding="utf-8"))
        step, state, run, files = content["step"], content["state"], content["run"], content["files"]
        size = sum(entry["size"] for entry in files.values())
    except FileNotFoundError:
        raise UserError(f"{path}: is no complete checkpoint, it has no {STATE}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path / STATE}: cannot be read ({type(error).__name__}: {error})") from error
    for name, entry in files.items():
        file = path / name
        found = file.stat().st_size if file.is_file() else None
        if found != entry["size"]:
            what = "is missing" if found is None else f"has {found} bytes"
            raise UserError(f"{file}: {what}; the checkpoint's manifest says {entry['size']} bytes")
    return Checkpoint(path, step, state, run, size)


def verify(checkpoint: Checkpoint) -> list[str]:
    """Compare every file's checksum with the manifest; one line a file that differs, an empty list if all is well."""
    files = json.loads((checkpoint.path / STATE).read_text(encoding="utf-8"))["files"]
    listed = [(name, entry["crc32"]) for name, entry in files.items() if "crc32" in entry]
    with ThreadPoolExecutor(max_workers=8) as pool:
        found = pool.map(lambda item: _crc32(checkpoint.path / item[0]), listed)
    return [
        f"{name}: checksum {now}, the manifest says {then}"
        for (name, then), now in zip(listed, found, strict=True)
        if now != then
    ]


def expect(state: dict[str, Any], key: str, value: Any, what: str) -> None:
    """Check one entry of a checkpoint's state against this run.

    Args:
        what: names the thing in the error, for example `checkpoint runs/a/checkpoints/step-000025: model`.

    Raises:
        UserError: the state has another value, or none.
    """
    if key not in state:
        raise UserError(f"{what}: the checkpoint does not say which {key} it has; this run has {value!r}")
    if state[key] != value:
        raise UserError(
            f"{what}: the checkpoint has {key} {state[key]!r}, this run has {value!r}; take the checkpoint's own "
            "configuration, or another run name"
        )


def _manifest(root: Path, checksums: bool) -> dict[str, dict[str, Any]]:
    paths = sorted(path for path in root.rglob("*") if path.is_file())
    if not checksums:
        return {str(path.relative_to(root)): {"size": path.stat().st_size} for path in paths}
    with ThreadPoolExecutor(max_workers=8) as pool:  # zlib releases the interpreter lock
        sums = list(pool.map(_crc32, paths))
    return {
        str(path.relative_to(root)): {"size": path.stat().st_size, "crc32": crc}
        for path, crc in zip(paths, sums, strict=True)
    }


def _crc32(path: Path) -> str:
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return f"{crc:08x}"
