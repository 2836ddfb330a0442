"""A run: one configuration in one folder, over as many attempts as it takes.

`finish` closes a step: it logs, validates, saves, and says whether the run is over. Steps are counted two ways: a job
counts from 0 (`run.start_step`, `finish(step)`), everything on disk counts *finished* steps (metrics, checkpoints).
"""

import contextlib
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from launch.checkpoints import Checkpoint, CheckpointStore
from launch.config import JobSettings
from launch.console import ConsoleHandler, StepProgress
from launch.errors import UserError, did_you_mean
from launch.files import disk_is_full, free_bytes, human
from launch.jobs import job_names
from launch.limits import WallClock
from launch.run_folder import (
    check_same_mathematics,
    new_attempt,
    owned,
    read_record,
    supersede_metrics,
    update_record,
    write_settings,
)
from launch.signals import STOP_FILE_VARIABLE, StopFlag
from launch.tracking import Tracker, new_wandb_id
from launch.versions import describe_versions

log = logging.getLogger(__name__)


class Run:
    """What a job is given: where it writes, where it starts, and `finish`.

    Attributes:
        folder: the run folder.
        logs: this attempt's log folder; workers write below `logs/workers`.
        attempt: counts from 1.
        resumed: the checkpoint to load, or None for a fresh start.
        start_step: the first step to do, counted from 0.
        total_steps: steps of the whole run; None for a job without steps.
        store: the run's checkpoints.
        stop: requests to stop; `stop.request(reason)` asks for one.
        clock: the time limit of this attempt, and how long steps and saves take.
        stopped: the reason of the stop that ended the run, or None.
    """

    def __init__(
        self, settings: JobSettings, total_steps: int | None, folder: Path, resumed: Checkpoint | None
    ) -> None:
        self.settings = settings
        self.folder = folder
        self.total_steps = total_steps
        self.resumed = resumed
        self.start_step = resumed.step if resumed else 0
        self.attempt, self.logs = 0, folder / "logs"
        self.store = CheckpointStore(folder / "checkpoints", settings.checkpoint.keep, settings.checkpoint.checksums)
        self.stop = StopFlag(folder)
        self.clock = WallClock(settings.limits)
        self.stopped: str | None = None
        self.best: dict[str, Any] | None = resumed.run.get("best") if resumed else None
        self._done = self.start_step
        self._tracker: Tracker | None = None
        self._progress: StepProgress | None = None
        self._save: Callable[[Path], dict[str, Any]] | None = None
        self._validate: Callable[[int], dict[str, float]] | None = None
        self._validate_every = 0
        self._best_metric: str | None = None
        self._save_seconds: float | None = None
        self._since = time.monotonic()

    @property
    def finished(self) -> bool:
        """Whether all steps are done; a job must not be started then."""
        return self.total_steps is not None and self._done >= self.total_steps

    @property
    def done(self) -> int:
        """Finished steps."""
        return self._done

    def configure(
        self,
        save: Callable[[Path], dict[str, Any]] | None = None,
        validate: Callable[[int], dict[str, float]] | None = None,
        validate_every: int = 0,
        best_metric: str | None = None,
        headline: Sequence[str] = (),
        total_steps: int | None = None,
    ) -> None:
        """Say how this job saves and validates; called once, when everything is set up and steps are about to begin.

        Args:
            save: writes the job's state into the folder that it is given and returns JSON (data cursor, RNG, …), which
                comes back as `run.resumed.state`. None saves nothing.
            validate: gets the number of finished steps, returns metrics `validation/…`.
            validate_every: steps between validations; there is one at the end too; 0 never validates.
            best_metric: the metric (higher is better) whose best checkpoint is kept.
            headline: metrics that the progress line shows.
            total_steps: for jobs that know their number of steps only now (epochs of a data set).
        """
        self._save, self._validate, self._best_metric = save, validate, best_metric
        self._validate_every = validate_every if validate is not None else 0
        if total_steps is not None and total_steps != self.total_steps:
            self.total_steps = total_steps
            update_record(self.folder, total_steps=total_steps)
        self._progress = StepProgress(self.total_steps, self._done, headline)
        self.stop.arm()
        self._since = time.monotonic()

    def plan(self, total_steps: int) -> None:
        """Change the number of steps of the whole run while it goes on: more are needed, or fewer were enough."""
        if total_steps == self.total_steps:
            return
        self.total_steps = total_steps
        update_record(self.folder, total_steps=total_steps)
        if self._progress is not None:
            self._progress.plan(total_steps)

    def samples_due(self, step: int) -> bool:
        """Whether `tracking.samples_every` wants samples of this step (counted from 0); the first and last are."""
        every, done = self.settings.tracking.samples_every, step + 1
        return every > 0 and (step == 0 or done % every == 0 or done == self.total_steps)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> Path:
        """Write a table of samples of a step (counted from 0): JSON values, arrays, PIL images."""
        return self._tracking().samples(step + 1, rows)

    def finish(self, step: int, stats: Mapping[str, Any]) -> bool:
        """Close a step: log, validate when due, save when due, at the end, when asked to stop and when it is the best.

        Args:
            step: the step just done, counted from 0.
            stats: metrics `group/name` → number.

        Returns:
            True when the run is over: that was the last step, or somebody asked for a stop (`run.stopped`).

        Raises:
            RuntimeError: this is not the step that comes next; one would be trained twice or skipped.
            UserError: the disk is full.
        """
        if step != self._done or self.finished:
            raise RuntimeError(f"step {step} was finished where step {self._done} of {self.total_steps} comes next")
        self.stop.arm()
        done = step + 1
        metrics = dict(stats) | {"time/step": time.monotonic() - self._since}
        if self._save_seconds is not None:
            metrics["time/checkpoint"], self._save_seconds = self._save_seconds, None
        last = done == self.total_steps
        is_best = False
        if self._validate_every and (done % self._validate_every == 0 or last):
            metrics |= self._validated(done)
            is_best = self._is_best(done, metrics)
        values = self._tracking().log(done, metrics)
        self._done = done
        if self._progress is not None:
            self._progress.update(done, values)
        self.clock.step(time.monotonic() - self._since)
        stop = self._stop_reason()
        saved = last or is_best or stop is not None or done % self.settings.checkpoint.every == 0
        if saved:
            self._checkpoint(done, is_best)
        if stop is None and (stop := self._stop_reason()) is not None and not saved:
            self._checkpoint(done, False)
        self._since = time.monotonic()
        if stop is not None and not last:
            self.stopped = stop
            since = self.stop.since if self.stop.since is not None else self._since
            log.info("asked to stop (%s): %.1f s later all is saved", stop, time.monotonic() - since)
        return last or stop is not None

    def _stop_reason(self) -> str | None:
        if reason := self.clock.reason():
            self.stop.request(reason, again=True)
        return self.stop.reason()

    def where(self) -> str:
        """One line for somebody whose run has ended early: the log, and what the same command does next."""
        log_text = f"log: {self.logs / 'driver.log'}" if self.attempt else f"run folder: {self.folder}"
        last = self.store.latest()
        if last is None:
            return f"run '{self.settings.name}' ended after {self._done} steps without a checkpoint; {log_text}"
        return (
            f"run '{self.settings.name}' ended after {self._done} steps; {log_text}; the same command goes on from the "
            f"checkpoint of step {last.step} in {self.store.folder}"
        )

    def _tracking(self) -> Tracker:
        if self._tracker is None:
            raise RuntimeError("the run is not open: it is finished, or its `with open_run(…)` block has ended")
        return self._tracker

    def _validated(self, done: int) -> dict[str, float]:
        assert self._validate is not None
        start = time.monotonic()
        metrics = self._validate(done)
        return {**metrics, "time/validation": time.monotonic() - start}

    def _is_best(self, done: int, metrics: Mapping[str, Any]) -> bool:
        if self._best_metric is None:
            return False
        if self._best_metric not in metrics:
            known = [name for name in metrics if name.startswith("validation/")]
            raise UserError(
                f"'{self._best_metric}' is no metric of the validation; {did_you_mean(self._best_metric, known)}"
            )
        value = float(metrics[self._best_metric])
        if math.isnan(value) or (self.best is not None and value <= self.best["value"]):
            return False
        self.best = {"step": done, "metric": self._best_metric, "value": value}
        return True

    def _checkpoint(self, done: int, is_best: bool) -> None:
        save = self._save
        if save is None:
            return

        def write(folder: Path) -> dict[str, Any]:
            for name in ("config.yaml", "versions.json"):
                shutil.copyfile(self.folder / name, folder / name)
            return save(folder)

        start = time.monotonic()
        wandb_id = read_record(self.folder)["wandb_id"]
        self.store.save(done, write, run={"best": self.best, "wandb_id": wandb_id, "attempt": self.attempt})
        if is_best:
            self.store.mark_best(done)
        self._save_seconds = time.monotonic() - start
        if self.clock.saved(self._save_seconds):
            text, enough = self.clock.report()
            log.log(logging.INFO if enough else logging.WARNING, text)


@contextmanager
def open_run(settings: JobSettings, total_steps: int | None = None) -> Iterator[Run]:
    """Open the run folder of these settings, continuing what is there as `resume` says.

    A run that is finished already is given with `run.finished` true and nothing opened: its job must not be started.

    Args:
        total_steps: steps of the whole run; None for a job without steps.

    Raises:
        UserError: the folder belongs to another driver, is used (`resume: never`) or has no checkpoint
            (`require`), was written with other settings, has only broken checkpoints; W&B cannot be used.
    """
    folder = Path(settings.runs_dir) / settings.name
    with owned(folder):
        resumed = _to_resume(folder, settings)
        run = Run(settings, total_steps, folder, resumed)
        if run.finished:
            yield run
            return
        with ExitStack() as stack:
            try:
                _start_attempt(run, stack)
                yield run
            except BaseException as error:
                _note_failure(run, error)
                if disk_is_full(error) and not isinstance(error, UserError):
                    free = human(free_bytes(folder))
                    full = UserError(
                        f"{folder}: the disk is full ({free} are free); free space and start again: {error}"
                    )
                    full.add_note(run.where())
                    raise full from error
                raise
            complete = run.total_steps is None or run.finished
            status = "stopped" if run.stopped else "finished" if complete else "ended early"
            update_record(folder, status=status, done=run.done)
            log.info("%s after %d steps%s", status, run.done, f" ({run.stopped})" if run.stopped else "")


def _to_resume(folder: Path, settings: JobSettings) -> Checkpoint | None:
    """The checkpoint to continue from; checks what `resume` allows and that the settings fit."""
    record = read_record(folder)
    store = CheckpointStore(folder / "checkpoints", settings.checkpoint.keep)
    if settings.resume == "never" and (record or store.steps()):
        raise UserError(f"run folder {folder} is used and resume is 'never'; choose another name or set resume=auto")
    if record and record.get("job") != settings.job:
        raise UserError(f"run folder {folder} belongs to the job '{record.get('job')}'; choose another name")
    if not store.steps():
        if settings.resume == "require":
            raise UserError(f"run folder {folder} has no checkpoint and resume is 'require'; set resume=auto to begin")
        return None
    found = store.newest_sound() if settings.checkpoint.checksums else store.latest()
    if found is None:
        raise UserError(
            f"{store.folder}: none of the checkpoints (steps {', '.join(map(str, store.steps()))}) is sound; "
            "`launch verify` says why; restore one, or choose another name for a new run"
        )
    check_same_mathematics(folder, settings)
    return found


def _start_attempt(run: Run, stack: ExitStack) -> None:
    """Logs, configuration, tracking and signals of a new attempt; `stack` ends them."""
    settings, folder = run.settings, run.folder
    run.attempt, run.logs = new_attempt(folder)
    stack.enter_context(_logging_to(run.logs / "driver.log"))
    record = read_record(folder)
    wandb_id = record.get("wandb_id") or (run.resumed.run["wandb_id"] if run.resumed else new_wandb_id())
    changes = {"job": settings.job, "wandb_id": wandb_id, "attempts": run.attempt, "status": "running"}
    update_record(folder, **changes, total_steps=run.total_steps)
    write_settings(folder, run.logs, settings, describe_versions())
    moved = supersede_metrics(folder, run.start_step, run.logs)
    if run.resumed:
        log.info("attempt %d goes on from %s", run.attempt, run.resumed.path)
        if run.best and run.best["step"] in run.store.steps():
            run.store.mark_best(run.best["step"])
    if moved:
        log.info("%d lines of metrics after step %d moved to %s", moved, run.start_step, run.logs / "superseded.jsonl")
    run.store.clean()
    stack.enter_context(run.stop)
    os.environ[STOP_FILE_VARIABLE] = str((folder / "STOP").resolve())  # for workers that are signalled
    stack.callback(os.environ.pop, STOP_FILE_VARIABLE, None)
    config = settings.model_dump(mode="json")
    run._tracker = Tracker(folder, settings.tracking, settings.name, settings.job, config, wandb_id)
    stack.push(lambda kind, error, trace: _close(run, kind is not None))


@contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    """Python's log lines from INFO on into a file, and ours on the console."""
    file = logging.FileHandler(path, encoding="utf-8")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    packages = {"launch", *(name.partition(".")[0] for name in job_names())}
    root = logging.getLogger()
    handlers, level = (file, ConsoleHandler(sorted(packages))), root.level
    logging.captureWarnings(True)
    root.setLevel(logging.INFO)
    for handler in handlers:
        root.addHandler(handler)
    try:
        yield
    finally:
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()
        root.setLevel(level)
        logging.captureWarnings(False)


def _close(run: Run, failed: bool) -> None:
    if run._progress is not None:
        run._progress.close()
    tracker, run._tracker = run._tracker, None
    if tracker is not None:
        tracker.close(failed)


def _note_failure(run: Run, error: BaseException) -> None:
    """Log the error with its trace, mark the run, and give the error a line that says where to look."""
    log.error("the run failed after %d steps", run.done, exc_info=error, extra={"on_console": False})
    with contextlib.suppress(OSError):  # the disk may be full: the first error is the one to tell
        update_record(run.folder, status="failed", done=run.done)
    error.add_note(run.where())
