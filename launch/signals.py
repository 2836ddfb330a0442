"""Asked to stop: signals, a STOP file, or the program itself set a flag that the run reads at step boundaries."""

import signal
import threading
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopFlag:
    """Collects requests to stop; nothing is interrupted in the middle of a step.

    SIGTERM, SIGUSR1 (SLURM's warning before the time limit) and the first Ctrl-C ask for a stop; a second Ctrl-C raises
    KeyboardInterrupt. So does a file `STOP` in the run folder, from any machine. As a context manager it installs the
    handlers and restores the former ones; outside the main thread only `request` and the file work.

    Args:
        folder: the run folder, looked at for the STOP file; None looks at none.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.file = Path(folder) / "STOP" if folder is not None else None
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

    def request(self, reason: str) -> None:
        """Ask for a stop at the next step boundary."""
        self._reason = self._reason or reason

    def reason(self) -> str | None:
        """Why the run should stop, or None. Every source of a request is read here."""
        if self._reason is None and self.file is not None and self.file.exists():
            self._reason = f"the file {self.file}"
        return self._reason

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                raise KeyboardInterrupt
        self.request({signal.SIGINT: "Ctrl-C"}.get(number, signal.Signals(number).name))
