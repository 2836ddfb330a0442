"""Metrics and samples of a run: JSON lines always, Weights & Biases as configured."""

import json
import logging
import math
import os
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.config import TrackingSettings
from launch.errors import UserError

if TYPE_CHECKING:
    import wandb

log = logging.getLogger(__name__)

_METRIC = re.compile(r"^[a-z][a-z0-9_]*(/[A-Za-z0-9_.@+\-]+)+$")


def new_wandb_id() -> str:
    """A fresh W&B run id; the run folder keeps it for all attempts."""
    return secrets.token_hex(4)


class Tracker:
    """Writes `metrics.jsonl` and `samples/` in a run folder, and the same to W&B.

    Args:
        folder: the run folder.
        settings: W&B mode, project, entity.
        name: run name shown by W&B.
        job: shown as W&B's job type.
        config: the resolved configuration.
        wandb_id: id of the W&B run; the same id continues it.

    Raises:
        UserError: W&B online without a key, or W&B cannot be reached.
    """

    def __init__(
        self, folder: Path, settings: TrackingSettings, name: str, job: str, config: dict[str, Any], wandb_id: str
    ) -> None:
        self.folder = folder
        self._wandb: wandb.Run | None = None
        self._undo_data_dir = False
        self._metrics = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        if settings.wandb != "disabled":
            # W&B keeps images of tables here until they are uploaded: with the run, so that a later sync finds them.
            self._undo_data_dir = "WANDB_DATA_DIR" not in os.environ
            os.environ.setdefault("WANDB_DATA_DIR", str(folder.resolve() / "wandb" / "data"))
            try:
                self._wandb = _start_wandb(folder, settings, name, job, config, wandb_id)
            except BaseException:
                self.close(failed=True)
                raise

    @property
    def url(self) -> str | None:
        """Address of the W&B run; None offline."""
        return self._wandb.url if self._wandb is not None and not self._wandb.offline else None

    def log(self, step: int, metrics: Mapping[str, Any]) -> dict[str, float | int]:
        """Append one line: `step`, `time` (Unix seconds), the metrics.

        A value that is not finite is written as null and its name is listed under `nonfinite`.

        Args:
            step: finished optimizer steps.
            metrics: `group/name` → number (Python, NumPy, or a tensor of one element).

        Returns:
            The metrics as Python numbers.

        Raises:
            ValueError, TypeError: a name without a group, a value that is no number.
        """
        values = {name: _number(name, value) for name, value in metrics.items()}
        nonfinite = [name for name, value in values.items() if not math.isfinite(value)]
        line: dict[str, Any] = {"step": step, "time": round(time.time(), 3)}
        line |= {name: None if name in nonfinite else value for name, value in values.items()}
        if nonfinite:
            line["nonfinite"] = nonfinite
            log.warning("step %d: not finite: %s", step, ", ".join(nonfinite))
        self._metrics.write(json.dumps(line, allow_nan=False) + "\n")
        self._metrics.flush()
        os.fsync(self._metrics.fileno())
        if self._wandb is not None:
            self._wandb.log({"step": step, **values})
        return values

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> Path:
        """Write a table of samples: `samples/step-000010.jsonl`, its images beside it, and a W&B table.

        Args:
            step: finished optimizer steps.
            rows: values are JSON, arrays (`tolist`) or PIL images; an image becomes a PNG and the row its path.
        """
        from PIL import Image

        stem = f"step-{step:06d}"
        folder = self.folder / "samples"
        folder.mkdir(exist_ok=True)
        lines = []
        for index, row in enumerate(rows):
            line: dict[str, Any] = {}
            for key, value in row.items():
                if isinstance(value, Image.Image):
                    (folder / stem).mkdir(exist_ok=True)
                    line[key] = f"{stem}/{index:03d}-{key}.png"
                    value.save(folder / line[key])
                else:
                    line[key] = value.tolist() if hasattr(value, "tolist") else value
            lines.append(json.dumps(line, ensure_ascii=False))
        path = folder / f"{stem}.jsonl"
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        if self._wandb is not None and rows:
            self._wandb.log({"step": step, "samples": _wandb_table(rows)})
        return path

    def close(self, failed: bool = False) -> None:
        """Close the file and the W&B run; a failed run is marked so."""
        self._metrics.close()
        if self._wandb is not None:
            self._wandb.finish(exit_code=int(failed))
            self._wandb = None
        if self._undo_data_dir:
            os.environ.pop("WANDB_DATA_DIR", None)
            self._undo_data_dir = False


def _number(name: str, value: Any) -> float | int:
    if not _METRIC.match(name):
        raise ValueError(f"metric '{name}' should be named group/name, for example reward/accuracy")
    value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, int | float):
        raise TypeError(f"metric '{name}' is a {type(value).__name__}; it should be one number")
    return int(value) if isinstance(value, bool) else value


def _start_wandb(
    folder: Path, settings: TrackingSettings, name: str, job: str, config: dict[str, Any], wandb_id: str
) -> "wandb.Run":
    # A background service of another process would be joined, and may hold this run's id since a kill.
    os.environ.pop("WANDB_SERVICE", None)
    try:
        import wandb
    except ModuleNotFoundError as error:
        raise UserError(f"tracking.wandb is {settings.wandb}, but the package wandb is not installed") from error
    if settings.wandb == "online":
        _require_key()
    try:
        run = wandb.init(
            project=settings.project,
            entity=settings.entity,
            name=name,
            job_type=job,
            id=wandb_id,
            resume="allow",
            mode=settings.wandb,
            dir=folder,
            config=config,
            settings=wandb.Settings(silent=True, console="off"),
        )
    except (wandb.Error, TimeoutError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"tracking.wandb is {settings.wandb}, but W&B did not start the run ({reason}); mend that, or set "
            "tracking.wandb=offline and upload later with `wandb sync`"
        ) from error
    # Our own step, not W&B's counter: that one refuses steps which a resumed run does again.
    run.define_metric("step", hidden=True)
    run.define_metric("*", step_metric="step")
    return run


def _require_key() -> None:
    """Stop without a key before `wandb.init` could ask for one at a terminal."""
    import wandb
    from wandb.sdk.lib import wbauth

    host = wandb.setup().settings.base_url
    try:
        found = wbauth.authenticate_session(host=host, source="launch", prompt=False)
    except wandb.Error as error:
        raise UserError(
            f"tracking.wandb is online, but the W&B key is not usable: {' '.join(str(error).split())}"
        ) from error
    if found is None:
        raise UserError(
            f"tracking.wandb is online, but there is no W&B key for {host}; run `wandb login`, set WANDB_API_KEY, "
            "or set tracking.wandb=offline"
        )


def _wandb_table(rows: Sequence[Mapping[str, Any]]) -> "wandb.Table":
    """W&B refuses a column of mixed types: one is images, numbers, or text."""
    import wandb
    from PIL import Image

    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells: dict[str, list[Any]] = {}
    for column in columns:
        values = [row.get(column) for row in rows]
        values = [value.tolist() if hasattr(value, "tolist") else value for value in values]
        if any(isinstance(value, Image.Image) for value in values):
            cells[column] = [wandb.Image(value) if value is not None else None for value in values]
        elif all(value is None or (isinstance(value, int | float) and not isinstance(value, bool)) for value in values):
            cells[column] = values
        else:
            texts = [json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else value for value in values]
            cells[column] = [None if value is None else text for value, text in zip(values, texts, strict=True)]
    table = wandb.Table(columns=columns)
    for index in range(len(rows)):
        table.add_data(*(cells[column][index] for column in columns))
    return table
