"""The time limit of an attempt: a run saves and stops while a step and a save still fit before it."""

import os
import time
from collections import deque
from collections.abc import Mapping

from launch.config import LimitSettings
from launch.console import clock

END_VARIABLE = "LAUNCH_END_TIME"
"""Unix time at which the scheduler ends the job; the batch script sets it."""
LEAD_VARIABLE = "LAUNCH_SIGNAL_LEAD_S"
"""Seconds before that at which the scheduler sends its signal."""
SAFETY = 1.5
SPARE_S = 30.0
_RECENT = 10  # steps; the first one compiles, and must not weigh on a long run


class WallClock:
    """How long steps and saves take, and whether another of each fits before the limit.

    Args:
        settings: the run's limits.
        environ: where the batch script tells when the job ends.
        now: Unix time of the attempt's start.
    """

    def __init__(
        self, settings: LimitSettings, environ: Mapping[str, str] = os.environ, now: float | None = None
    ) -> None:
        started = time.time() if now is None else now
        self.end = float(environ[END_VARIABLE]) if environ.get(END_VARIABLE) else None
        if settings.wall_clock_s is not None:
            self.end = min(started + settings.wall_clock_s, self.end if self.end is not None else float("inf"))
        self.announced = float(environ[LEAD_VARIABLE]) if environ.get(LEAD_VARIABLE) else None
        self._save_before = settings.save_before_s
        self._steps: deque[float] = deque(maxlen=_RECENT)
        self._save = 0.0

    def step(self, seconds: float) -> None:
        """A step (its validation included) took so long."""
        self._steps.append(seconds)

    def saved(self, seconds: float) -> bool:
        """A checkpoint took so long. True the first time: `report` knows enough then."""
        first, self._save = self._save == 0.0, max(self._save, seconds)
        return first

    @property
    def needed(self) -> float:
        """Seconds that a stop takes at worst, as measured: the slowest recent step, then the slowest save."""
        return max(self._steps, default=0.0) + self._save

    @property
    def lead(self) -> float:
        """Seconds before the limit at which the run stops."""
        return self._save_before if self._save_before is not None else SAFETY * self.needed + SPARE_S

    def reason(self, now: float | None = None) -> str | None:
        """Why no further step should begin, or None."""
        now = time.time() if now is None else now
        if self.end is None or now + self.lead < self.end:
            return None
        left, lead = clock(max(self.end - now, 0)), clock(self.lead)
        return f"the time limit: {left} are left, {lead} are kept for a step and a save"

    def report(self) -> tuple[str, bool]:
        """One line on the lead time that a stop needs, and whether the announced one suffices."""
        parts = f"slowest step {clock(max(self._steps, default=0.0))}, save {clock(self._save)}"
        text = f"a stop needs {clock(self.needed)} ({parts})"
        if self.announced is None:
            return text, True
        if self.announced >= self.needed:
            return f"{text}; the scheduler's signal comes {clock(self.announced)} before the end", True
        return (
            f"{text}, but the signal comes only {clock(self.announced)} before the end: raise signal_lead_s "
            f"of the profile to {round(SAFETY * self.needed + SPARE_S)}",
            False,
        )
