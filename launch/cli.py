"""`launch`: run a job, list jobs and fields, look at a run, verify a checkpoint."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launch.errors import UserError

if TYPE_CHECKING:
    from launch.config import JobSettings
    from launch.jobs import Job
    from launch.runs import Run

app = typer.Typer(
    help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
)

Config = Annotated[Path, typer.Argument(help="YAML file of the run.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Values to change: a.b=VALUE …")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the resolved configuration and sizes; start nothing.")]


@app.command()
def run(config: Config, overrides: Overrides = None, dry_run: DryRun = False) -> None:
    """Run the job that CONFIG names; the same command continues a run that was stopped."""
    run_job(config, overrides or (), dry_run)


@app.command()
def jobs() -> None:
    """List the installed jobs."""
    from launch.jobs import job_names

    for name in job_names():
        typer.echo(name)


@app.command()
def fields(
    job: Annotated[str, typer.Argument(help="Name of a job.")],
    prefix: Annotated[str, typer.Argument(help="Only fields that begin so, for example `rollout`.")] = "",
) -> None:
    """List every configuration field of a job: type, default, meaning."""
    from launch.config import describe
    from launch.jobs import get_job

    show_fields(describe(get_job(job).settings), prefix)


@app.command()
def status(run_folder: Annotated[Path, typer.Argument(help="runs/<name>")]) -> None:
    """Say where a run stands."""
    for name, text in describe_run(run_folder).items():
        typer.echo(f"{name + ':':14}{text}")


@app.command()
def verify(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, or a run folder for its latest one.")],
) -> None:
    """Compare a checkpoint's files with the checksums written when it was saved."""
    from launch.checkpoints import CheckpointStore, read_checkpoint
    from launch.checkpoints import verify as problems_of
    from launch.files import human

    folder = checkpoint / "checkpoints" if (checkpoint / "checkpoints").is_dir() else checkpoint
    if steps := CheckpointStore(folder).steps():
        folder = folder / f"step-{steps[-1]:06d}"
    found = read_checkpoint(folder)
    if problems := problems_of(found):
        raise UserError(f"{found.path}: {'; '.join(problems)}; a run passes it over and goes on from the one before it")
    typer.echo(f"{found.path}: sound, step {found.step}, {human(found.size)}")


def run_job(
    config: str | Path, overrides: Sequence[str] = (), dry_run: bool = False, expected_job: str | None = None
) -> None:
    """`start_job` for a command line: a UserError is printed and exits with status 2, a stop from outside with 75."""

    def command() -> None:
        if status := start_job(config, overrides, dry_run, expected_job):
            sys.exit(status)

    run_command(command)


def start_job(
    config: str | Path, overrides: Sequence[str] = (), dry_run: bool = False, expected_job: str | None = None
) -> int:
    """Load a configuration and run its job, or print what would run.

    Args:
        expected_job: the job that the command stands for; the file may leave `job:` out.

    Returns:
        0, or `EXIT_AGAIN` when a signal or a time limit stopped it: whoever started it should requeue it.

    Raises:
        UserError: as `load_config` and `open_run`.
    """
    from launch.config import load_config
    from launch.console import say
    from launch.jobs import get_job
    from launch.runs import open_run
    from launch.signals import EXIT_AGAIN

    settings = load_config(config, overrides, expected_job)
    job = get_job(settings.job)
    total = job.total_steps(settings)
    if dry_run:
        _dry_run(settings, job, total)
        return 0
    with open_run(settings, total) as run:
        if run.finished:
            say(
                f"run '{settings.name}' is finished already: {run.done} of {total} steps are done in {run.folder}; "
                "raise steps to train on, or choose another name"
            )
            return 0
        start = f"goes on after {run.done} steps" if run.resumed else "starts"
        say(f"run '{settings.name}' {start}{f' ({total} in all)' if total else ''}: {run.folder}")
        try:
            job.run(settings, run)
        except ModuleNotFoundError as error:
            raise UserError(
                f"job '{settings.job}' needs the package '{error.name}', which is not installed; install the extra of "
                "this machine (cpu, cuda or rocm), or submit the run to one that has it"
            ) from error
        last_words = _last_words(settings, job, run)
    say(last_words)
    return EXIT_AGAIN if run.stopped and run.stop.again else 0


def run_command(command: Callable[[], Any]) -> None:
    """Call it; a UserError becomes `error: …` on stderr and exit status 2."""
    try:
        command()
    except UserError as error:
        print("\n".join([f"error: {error}", *getattr(error, "__notes__", ())]), file=sys.stderr, flush=True)
        sys.exit(2)


def main() -> None:
    """Entry point of `launch`."""
    run_command(app)


def show_fields(rows: Sequence[Any], prefix: str = "") -> None:
    """Print rows of `describe` as a table; plain lines where stdout is no terminal."""
    rows = [row for row in rows if row.name == prefix or row.name.startswith(prefix)]
    if not rows:
        raise UserError(f"no field begins with '{prefix}'")
    if not sys.stdout.isatty():
        for row in rows:
            typer.echo(f"{row.name}\t{row.type}\t{row.default}\t{row.help}")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("field", "type", "default", "meaning", box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(_plain(text) for text in (row.name, row.type, row.default, row.help)))
    Console().print(table)


def describe_run(folder: Path) -> dict[str, str]:
    """Where a run stands: status, step, checkpoints, log, and what to do next.

    Raises:
        UserError: the folder holds no run.
    """
    from launch.checkpoints import CheckpointStore
    from launch.run_folder import owner, read_record

    record = read_record(folder)
    if not record:
        raise UserError(f"{folder}: is no run folder, it has no run.json")
    store = CheckpointStore(folder / "checkpoints")
    last, best, at_work = store.latest(), store.best(), owner(folder)
    state = record["status"]
    if at_work:
        state = f"running ({at_work})"
    elif state == "running":
        state = "dead: its driver ended without a word (killed?)"
    step = _last_step(folder / "metrics.jsonl")
    total = f" of {record['total_steps']}" if record.get("total_steps") else ""
    shown = {
        "job": record["job"],
        "status": state,
        "steps": f"{step}{total}",
        "attempts": str(record["attempts"]),
        "checkpoint": f"step {last.step}: {last.path}" if last else "none",
        "log": str(folder / "logs" / f"attempt-{record['attempts']:03d}" / "driver.log"),
        "wandb id": record["wandb_id"],
    }
    if best:
        shown["best"] = f"step {best.step}: {best.path}"
    if not at_work and state != "finished":
        shown["next"] = f"the command that started it goes on from step {last.step if last else 0}"
    return shown


def _dry_run(settings: "JobSettings", job: "Job", total: int | None) -> None:
    """The resolved configuration as YAML, what it occupies as comments: the output is a configuration file again."""
    from launch.checkpoints import CheckpointStore
    from launch.config import dump_config

    folder = Path(settings.runs_dir) / settings.name
    last = CheckpointStore(folder / "checkpoints").latest()
    typer.echo(dump_config(settings), nl=False)
    typer.echo(f"# run folder: {folder} ({f'goes on from step {last.step}' if last else 'starts at step 0'})")
    if total is not None:
        typer.echo(f"# steps: {total}")
    for name, value in job.footprint(settings).items():
        typer.echo(f"# {name}: {value}")


def _last_words(settings: "JobSettings", job: "Job", run: "Run") -> str:
    if run.stopped:
        last = run.store.latest()
        saved = f"saved in {last.path}; the same command goes on from there" if last else "this job saves nothing"
        return f"run '{settings.name}' stopped after {run.done} steps ({run.stopped}): {saved}"
    best = f", best at step {run.best['step']} ({run.best['metric']} {run.best['value']:.4g})" if run.best else ""
    after = job.next(settings, run) if job.next is not None else f"`launch status {run.folder}` shows it"
    steps = f" after {run.done} steps" if run.total_steps is not None else ""
    return f"run '{settings.name}' ended{steps}{best}: {run.folder}; {after}"


def _last_step(metrics: Path) -> int:
    import json

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


def _plain(text: str) -> Any:
    from rich.text import Text

    return Text(text)


if __name__ == "__main__":
    main()
