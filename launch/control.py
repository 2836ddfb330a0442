"""A run seen from outside, by its folder alone: where it stands, stop it, go on, upload what it kept for W&B."""

import getpass
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import yaml

from launch.checkpoints import CheckpointStore
from launch.config_files import from_yaml
from launch.console import say
from launch.errors import UserError
from launch.run_folder import owner, read_record
from launch.signals import ask

log = logging.getLogger(__name__)

_LOOK_S = 1.0


def describe_run(folder: Path) -> dict[str, str]:
    """Where a run stands: status, step, checkpoints, batch jobs, log, and what to do next.

    Raises:
        UserError: the folder holds no run.
    """
    record, queued = read_record(folder), batch_jobs(folder)
    if not record and not queued:
        raise UserError(f"{folder}: is no run folder, it has no run.json")
    in_queue = ", ".join(f"{job} ({state})" for job, state in queued.items())
    if not record:
        return {"status": "submitted, not begun", "slurm": in_queue}
    store = CheckpointStore(folder / "checkpoints")
    last, best, at_work = store.latest(), store.best(), owner(folder)
    state = record["status"]
    if at_work:
        state = f"running ({at_work})"
    elif state == "running":
        state = "dead: its driver ended without a word (killed?)"
    total = f" of {record['total_steps']}" if record.get("total_steps") else ""
    shown = {
        "job": record["job"],
        "status": state,
        "steps": f"{last_step(folder / 'metrics.jsonl')}{total}",
        "attempts": str(record["attempts"]),
        "checkpoint": f"step {last.step}: {last.path}" if last else "none",
        "log": str(folder / "logs" / f"attempt-{record['attempts']:03d}" / "driver.log"),
        "wandb id": record["wandb_id"],
    }
    if best:
        shown["best"] = f"step {best.step}: {best.path}"
    if in_queue:
        shown["slurm"] = in_queue
    elif not at_work and state != "finished":
        shown["next"] = f"`launch resume {folder}` goes on from step {last.step if last else 0}"
    return shown


def stop_run(folder: Path, wait_s: float = 0) -> str:
    """Ask a run to save after the step it is in and to end; jobs that wait in the queue are cancelled.

    Args:
        wait_s: seconds to wait for its end; 0 returns at once.

    Returns:
        One line that says what was done.

    Raises:
        UserError: no run folder, or the run has not ended within `wait_s`.
    """
    waiting = [job for job, state in batch_jobs(folder).items() if state in ("PENDING", "REQUEUED", "SUSPENDED")]
    if waiting:
        subprocess.run(["scancel", *waiting], check=False)
    cancelled = f"cancelled in the queue: {', '.join(waiting)}" if waiting else ""
    if not (at_work := owner(folder)):
        if not read_record(folder) and not waiting:
            raise UserError(f"{folder}: is no run folder, it has no run.json")
        return f"{folder}: {cancelled or 'nobody is at work in it'}"
    ask(folder / "STOP", f"launch stop by {getpass.getuser()} on {socket.gethostname()}")
    end = time.monotonic() + wait_s
    while wait_s and owner(folder):
        if time.monotonic() > end:
            raise UserError(f"{folder}: {at_work} has not ended within {wait_s:g} s; it stops after the step it is in")
        time.sleep(_LOOK_S)
    done = (
        f"stopped after {last_step(folder / 'metrics.jsonl')} steps" if wait_s else "it stops after the step it is in"
    )
    return f"{folder}: {at_work}: {'; '.join(filter(None, (done, cancelled)))}"


def resume_command(folder: Path, overrides: Sequence[str] = (), here: bool = False) -> tuple[str, list[str]]:
    """How to go on with a run.

    Returns:
        `("sbatch", [script])` for a run that SLURM ran, else `("run", [config, overrides …])` for this process.

    Raises:
        UserError: no run, somebody is at work in it, a job of it is queued, overrides for a batch job.
    """
    if at_work := owner(folder):
        raise UserError(f"{folder}: is running already ({at_work})")
    if queued := batch_jobs(folder):
        raise UserError(f"{folder}: a job of it is in the queue: {', '.join(f'{j} ({s})' for j, s in queued.items())}")
    script = folder / "slurm" / "job.sh"
    if script.is_file() and not here:
        if overrides:
            raise UserError(f"{script}: has its own configuration; use `launch slurm CONFIG {' '.join(overrides)} …`")
        return "sbatch", [str(script)]
    config = folder / "config.yaml"
    try:
        name = from_yaml(config.read_text(encoding="utf-8"))["name"]
    except (OSError, KeyError, TypeError, yaml.YAMLError) as error:
        raise UserError(f"{folder}: cannot go on, its config.yaml cannot be read ({error})") from error
    place = Path(os.path.relpath(folder))
    if tuple(Path(name).parts) != place.absolute().parts[-len(Path(name).parts) :]:
        raise UserError(f"{config}: the run is named '{name}', the folder is not; move it back")
    runs_dir = place.absolute().parents[len(Path(name).parts) - 1]
    return "run", [str(config), f"runs_dir={json.dumps(os.path.relpath(runs_dir))}", *overrides]


def sync_wandb(folder: Path) -> None:
    """Upload what a run logged offline: all attempts, oldest first, into its one W&B run.

    Raises:
        UserError: nothing to upload, W&B is not installed, or the upload fails.
    """
    record = read_record(folder)
    kept = sorted((folder / "wandb").glob("offline-run-*"))
    if not kept:
        raise UserError(f"{folder}: has no offline W&B data (wandb/offline-run-*); was tracking.wandb=offline?")
    foreign = [path.name for path in kept if not path.name.endswith(f"-{record.get('wandb_id')}")]
    if foreign:
        raise UserError(f"{folder}/wandb: {foreign[0]} belongs to another W&B run than {record.get('wandb_id')}")
    # `--id` makes W&B take the attempts as one run, in order of their start.
    command = [sys.executable, "-m", "wandb", "sync", "--id", record["wandb_id"], *map(str, kept)]
    environment = os.environ | {"WANDB_DATA_DIR": str((folder / "wandb" / "data").resolve())}
    say(f"{len(kept)} attempts go to the W&B run {record['wandb_id']}")
    done = subprocess.run(command, env=environment, check=False)
    if done.returncode:
        raise UserError(f"{folder}: wandb sync ended with status {done.returncode}; its words are above")


def batch_jobs(folder: Path) -> dict[str, str]:
    """Batch jobs of a run that SLURM still knows as waiting or running: id → state. Empty where there is no SLURM."""
    file = folder / "slurm" / "jobs.jsonl"
    if not file.is_file() or shutil.which("squeue") is None:
        return {}
    ours = [json.loads(line)["job"] for line in file.read_text(encoding="utf-8").splitlines()]
    user = ["squeue", "--noheader", "--format=%i %T", f"--user={getpass.getuser()}"]
    done = subprocess.run(user, capture_output=True, text=True, check=False)
    if done.returncode:
        log.warning("squeue: %s", " ".join(done.stderr.split()))
        return {}
    states = dict(line.split()[:2] for line in done.stdout.splitlines() if line.strip())
    return {job: states[job] for job in ours if job in states}


def last_step(metrics: Path) -> int:
    """The step of the last whole line of `metrics.jsonl`; 0 when there is none."""
    if not metrics.is_file() or metrics.stat().st_size == 0:
        return 0
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - (1 << 16)), os.SEEK_SET)
        lines = file.read().decode("utf-8", errors="replace").splitlines()
    for line in reversed(lines):
        try:
            return json.loads(line)["step"]
        except (ValueError, KeyError):  # being written, or cut off by the seek
            continue
    return 0
