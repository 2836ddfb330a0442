"""Asked to stop: signals, a STOP file, or the program itself set a flag that the run reads at step boundaries."""

import os
import signal
import socket
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
STOP_FILE_VARIABLE = "LAUNCH_STOP_FILE"  # where a worker that is signalled asks for a stop
EXIT_AGAIN = 75
"""Exit status of a run that was stopped from outside (a signal, the time limit) and wants to go on: requeue it."""


class StopFlag:
    """Collects requests to stop; nothing is interrupted in the middle of a step.

    SIGTERM, SIGUSR1 (SLURM's warning before the time limit) and the first Ctrl-C ask for a stop; a second Ctrl-C raises
    KeyboardInterrupt. So does a file `STOP` in the run folder, from any machine (see `ask`). As a context manager it
    installs the handlers and restores the former ones; outside the main thread only `request` and the file work.

    Attributes:
        since: monotonic time at which the stop was asked for, or None.
        again: the machine wants the stop (SIGTERM, SIGUSR1, a time limit), not a person: the run should be requeued.

    Args:
        folder: the run folder, looked at for the STOP file; None looks at none.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.file = Path(folder) / "STOP" if folder is not None else None
        self.since: float | None = None
        self.again = False
        self._reason: str | None = None
        self._interrupts = 0
        self._former: dict[int, Any] = {}

    def __enter__(self) -> "StopFlag":
        if self.file is not None:
            self.file.unlink(missing_ok=True)  # it stopped a former attempt
        self.arm()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._former.clear()

    def arm(self) -> None:
        """Install the handlers, again if a library replaced them (`ray.init` takes SIGTERM for itself)."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            current = signal.getsignal(number)
            if current != self._handle:
                self._former.setdefault(number, current if current is not None else signal.SIG_DFL)
                signal.signal(number, self._handle)

    def request(self, reason: str, again: bool = False) -> None:
        """Ask for a stop at the next step boundary; the first reason stands."""
        if self._reason is None:
            self._reason, self.again, self.since = reason, again, time.monotonic()

    def reason(self) -> str | None:
        """Why the run should stop, or None. Every source of a request is read here."""
        if self._reason is None and self.file is not None and self.file.exists():
            reason, _, then = self.file.read_text(encoding="utf-8").partition("\n")
            self.request(reason or f"the file {self.file}", again=then.strip() == "again")
        return self._reason

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                raise KeyboardInterrupt
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        self.request(name, again=number != signal.SIGINT)


def ask(file: Path, reason: str, again: bool = False) -> None:
    """Write a STOP file: the first line is the reason, a second line `again` asks for a requeue."""
    aside = file.with_name(f"{file.name}.{socket.gethostname()}-{os.getpid()}")  # whole, or not there
    aside.write_text(f"{reason}\nagain\n" if again else f"{reason}\n", encoding="utf-8")
    aside.replace(file)
