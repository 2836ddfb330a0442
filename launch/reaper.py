"""Runs beside a driver that started a local Ray, as its own process: when the driver goes, everything it started goes.

The driver holds the other end of standard input. It may end in order or by SIGKILL; either way the pipe closes, and
whatever still carries the driver's mark in its environment (Ray's agents, workers, their own children such as inference
engines) is ended and the temporary folder removed. Needs /proc and only the standard library.
"""

import os
import shutil
import signal
import sys
import time
from pathlib import Path

MARK = "LAUNCH_CLUSTER"
GRACE_S = 4.0  # Ray's own clean-up comes first
LIMIT_S = 20.0


def marked(mark: str) -> list[int]:
    """Process ids of this user whose environment says LAUNCH_CLUSTER=`mark`, this process excepted."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes()
        except OSError:  # ended meanwhile, or another user's
            continue
        if wanted in environment.split(b"\0") and int(folder.name) != os.getpid():
            found.append(int(folder.name))
    return found


def reap(mark: str, folder: Path) -> None:
    """End every marked process (SIGKILL after a grace) and remove `folder`."""
    start = time.monotonic()
    while (pids := marked(mark)) and time.monotonic() - start < LIMIT_S:
        if time.monotonic() - start > GRACE_S:
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        time.sleep(0.1)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # Ctrl-C and SLURM signal the whole process group
    sys.stdin.read()
    reap(sys.argv[1], Path(sys.argv[2]))
