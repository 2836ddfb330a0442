"""What a person sees while a run goes on: log lines and the progress of steps."""

import logging
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

PLAIN_EVERY_S = 30.0
"""Seconds between two plain progress lines where stderr is no terminal."""


@cache
def console() -> "Console":
    """The one console on stderr; a progress bar and log lines share it, so that neither tears the other."""
    from rich.console import Console

    return Console(stderr=True)


def say(text: str) -> None:
    """Print a line for the person at the terminal, above the progress bar if there is one."""
    console().print(text, markup=False, highlight=False, soft_wrap=True)


class ConsoleHandler(logging.Handler):
    """Log lines on the console: from INFO on of our own packages, from WARNING on of all others.

    A record with `extra={"on_console": False}` goes into the log file only, and so do Python's own warnings: they speak
    to developers of the libraries below.
    """

    def __init__(self, packages: Sequence[str]) -> None:
        super().__init__()
        self.packages = frozenset(packages)

    def emit(self, record: logging.LogRecord) -> None:
        wanted = record.levelno >= logging.WARNING or record.name.partition(".")[0] in self.packages
        if wanted and record.name != "py.warnings" and getattr(record, "on_console", True):
            try:
                level = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
                say(level + record.getMessage())
            except Exception:
                self.handleError(record)


class StepProgress:
    """Steps done, seconds a step, time left: a bar on a terminal, else a line every 30 seconds.

    Args:
        total: steps of the whole run; None shows no estimate.
        done: steps that a resumed run has behind it.
        headline: names of metrics to show besides.
    """

    def __init__(self, total: int | None, done: int, headline: Sequence[str] = ()) -> None:
        self.total = total
        self.headline = tuple(headline)
        self._times = deque([time.monotonic()], maxlen=21)
        self._said = time.monotonic()
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            self._bar = _bar()
            self._task = self._bar.add_task("", total=total, completed=done)
            self._bar.start()

    def update(self, done: int, metrics: Mapping[str, float]) -> None:
        """A step has ended; `done` steps are behind."""
        now = time.monotonic()
        self._times.append(now)
        text = self._text(metrics)
        if self._bar is not None:
            self._bar.update(self._task, completed=done, description=text)
        elif now - self._said >= PLAIN_EVERY_S or done == self.total:
            self._said = now
            say(f"step {done}{f'/{self.total}' if self.total else ''}  {text}{self._left(done)}")

    def plan(self, total: int) -> None:
        """The whole run has another number of steps now."""
        self.total = total
        if self._bar is not None:
            self._bar.update(self._task, total=total)

    def close(self) -> None:
        """Take the bar away; what was printed stays."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _seconds_a_step(self) -> float:
        return (self._times[-1] - self._times[0]) / max(1, len(self._times) - 1)

    def _text(self, metrics: Mapping[str, float]) -> str:
        shown = [f"{name} {metrics[name]:.4g}" for name in self.headline if name in metrics]
        return "  ".join([f"{self._seconds_a_step():.1f} s/step", *shown])

    def _left(self, done: int) -> str:
        return f"  {clock(self._seconds_a_step() * (self.total - done))} left" if self.total else ""


def clock(seconds: float) -> str:
    """Seconds for people: `4 m 41 s`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} m" if hours else f"{minutes} m {rest:02d} s" if minutes else f"{rest} s"


def _bar() -> "Progress":
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(bar_width=30),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
        console=console(),
    )
