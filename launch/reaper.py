"""A small process beside a driver or a worker: when that process is gone, everything it started goes too.

However it ended, in order or by SIGKILL, whatever carries its mark in the environment (Ray's agents and workers, the
processes of an inference engine) is killed and its temporary folder removed. It watches by polling: a pipe would stay
open in forked children. Needs /proc and only the standard library.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

CLUSTER_MARK = "LAUNCH_CLUSTER"  # what a driver's local Ray and all below it carry
WORKER_MARK = "LAUNCH_WORKER"  # what one worker and all below it carry
POLL_S = 0.2
LIMIT_S = 20.0


def start(mark: str, grace_s: float, folder: Path | None = None, detach: bool = False) -> subprocess.Popen:
    """Watch over this process.

    Args:
        mark: `NAME=VALUE` in the environment of what is to end with it (also found in this process, which is spared as
            long as it lives).
        grace_s: seconds that they get to end by themselves.
        folder: a temporary folder to remove at the end.
        detach: become no child of this process (Ray kills the children of a worker that exits).
    """
    environment = {k: v for k, v in os.environ.items() if k not in (CLUSTER_MARK, WORKER_MARK)}
    arguments = [str(os.getpid()), mark, str(grace_s), str(folder or ""), "detach" if detach else ""]
    null = subprocess.DEVNULL
    watcher = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, *arguments],
        env=environment,
        start_new_session=True,
        stdin=null,
        stdout=null,
        stderr=null,
    )
    if detach:
        watcher.wait(LIMIT_S)
    return watcher


def finish(watcher: subprocess.Popen) -> None:
    """Let the watcher (not a detached one) clean up now, while its parent lives, and wait for it."""
    watcher.send_signal(signal.SIGUSR2)
    try:
        watcher.wait(LIMIT_S + 10)
    except subprocess.TimeoutExpired:
        watcher.kill()


def marked(mark: str) -> list[int]:
    """Process ids of this user whose environment has `mark` (`NAME=VALUE`), this process excepted."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes()
        except OSError:  # ended meanwhile, or another user's
            continue
        if mark.encode() in environment.split(b"\0") and int(folder.name) != os.getpid():
            found.append(int(folder.name))
    return found


def reap(mark: str, grace_s: float) -> None:
    """End the processes that carry the mark: by themselves within `grace_s`, then by SIGKILL."""
    start_s = time.monotonic()
    while (pids := marked(mark)) and time.monotonic() - start_s < LIMIT_S:
        if time.monotonic() - start_s > grace_s:
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        time.sleep(POLL_S / 2)


def _birth(pid: int) -> str | None:
    """When a process started (clock ticks), which tells it from a later one of the same id; None if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def main(parent: int, mark: str, grace_s: float, folder: str, detach: str) -> None:
    """Wait for the parent's end (or SIGUSR2), then clean up."""
    birth = _birth(parent)
    if detach and os.fork():
        os._exit(0)
    now = threading.Event()
    signal.signal(signal.SIGUSR2, lambda *_: now.set())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # SLURM signals every process of a step; the parent decides
    while not now.wait(POLL_S) and birth is not None and _birth(parent) == birth:
        continue
    reap(mark, grace_s)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4], sys.argv[5])
