"""Weights on a node's own disk: copied there once, whatever number of processes of the node ask for them."""

import fcntl
import hashlib
import logging
import os
import shutil
import socket
import time
from pathlib import Path

from launch.errors import UserError
from launch.files import free_bytes, human

log = logging.getLogger(__name__)

STAGE_VARIABLE = "LAUNCH_STAGE"
"""Node-local folder for copies; unset, everything is read where it lies."""


def staged(path: str) -> str:
    """Where to load a checkpoint from: a copy on this node's disk if `LAUNCH_STAGE` is set, else `path` itself.

    Args:
        path: a local folder; anything else (a hub id) comes back as it is.

    Raises:
        UserError: the copy does not fit.
    """
    place, source = os.environ.get(STAGE_VARIABLE), Path(path)
    if not place or not source.is_dir():
        return path
    files = sorted(file for file in source.rglob("*") if file.is_file())
    listing = [(str(file.relative_to(source)), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    digest = hashlib.sha256(repr((str(source.resolve()), listing)).encode()).hexdigest()[:16]
    target, size = Path(place) / f"{source.name}-{digest}", sum(length for _, length, _ in listing)
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the others of this node wait here, then find the copy
        if not target.is_dir():
            _copy(source, target, size)
    return str(target)


def _copy(source: Path, target: Path, size: int) -> None:
    if (free := free_bytes(target.parent)) < size:
        raise UserError(
            f"{target.parent} on {socket.gethostname()}: {human(free)} are free, {source} takes {human(size)}; set "
            "stage: false in the profile, or another scratch"
        )
    aside, start = target.with_suffix(".part"), time.monotonic()
    shutil.rmtree(aside, ignore_errors=True)
    shutil.copytree(source, aside)
    aside.rename(target)
    seconds = time.monotonic() - start
    log.info("%s: copied to %s, %s in %.1f s", source, target, human(size), seconds)
