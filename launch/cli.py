"""`launch`: run a job here or on a cluster, look at a run, stop it, go on with it."""

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
RunFolder = Annotated[Path, typer.Argument(help="runs/<name>")]
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
def status(run_folder: RunFolder) -> None:
    """Say where a run stands."""
    from launch.control import describe_run

    for name, text in describe_run(run_folder).items():
        typer.echo(f"{name + ':':14}{text}")


@app.command()
def stop(
    run_folder: RunFolder,
    wait: Annotated[float, typer.Option(help="Seconds to wait until it has ended; 0 does not wait.")] = 0,
) -> None:
    """Ask a run to save after the step it is in and to end; jobs of it that wait in a queue are cancelled."""
    from launch.control import stop_run

    typer.echo(stop_run(run_folder, wait))


@app.command()
def resume(
    run_folder: RunFolder,
    overrides: Overrides = None,
    here: Annotated[bool, typer.Option("--here", help="In this process, even if SLURM ran it.")] = False,
) -> None:
    """Go on with a run from its last checkpoint: its batch script again, or in this process."""
    from launch.control import resume_command
    from launch.slurm import submit_script

    how, arguments = resume_command(run_folder, overrides or (), here)
    if how == "sbatch":
        typer.echo(f"submitted job {submit_script(Path(arguments[0]))}")
    else:
        run_job(arguments[0], arguments[1:])


@app.command()
def sync(run_folder: RunFolder) -> None:
    """Upload to W&B what a run logged offline (from a node with network)."""
    from launch.control import sync_wandb

    sync_wandb(run_folder)


@app.command()
def slurm(
    config: Config,
    overrides: Overrides = None,
    profile: Annotated[str, typer.Option(help="Name in slurm/profiles, or path of a YAML file.")] = "generic",
    change: Annotated[list[str] | None, typer.Option("--set", help="A profile's field: account=m1234.")] = None,
    nodes: Annotated[int | None, typer.Option(help="Nodes; default: what the job's ranks fill.")] = None,
    chain: Annotated[int, typer.Option(min=1, help="Submit so many jobs, each after the other.")] = 1,
    preflight: Annotated[bool, typer.Option("--preflight", help="Check the nodes instead of running the job.")] = False,
    salloc: Annotated[bool, typer.Option("--salloc", help="Run at this terminal, in an allocation.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the script; write and submit nothing.")] = False,
) -> None:
    """Write the batch script of a run and submit it."""
    from launch.slurm import submit

    how = {"nodes": nodes, "dry_run": dry_run, "chain": chain, "preflight": preflight, "salloc": salloc}
    for job in submit(config, overrides or (), profile, change or (), **how):
        typer.echo(f"submitted job {job}")


@app.command()
def preflight(
    config: Config,
    overrides: Overrides = None,
    profile: Annotated[str | None, typer.Option(help="Profile to compare the nodes with.")] = None,
) -> None:
    """Check every node of the cluster before a run: one table, and what to do about what is wrong."""
    from launch.config import load_config
    from launch.preflight import preflight as look
    from launch.preflight import show
    from launch.slurm import load_profile

    sys.exit(show(look(load_config(config, overrides or ()), load_profile(profile) if profile else None)))


@app.command()
def ray(
    config: Annotated[Path | None, typer.Argument(help="YAML file of the run.")] = None,
    overrides: Overrides = None,
    address: Annotated[str, typer.Option(help="The cluster's dashboard.")] = "http://127.0.0.1:8265",
    python: Annotated[str, typer.Option(help="Interpreter on the cluster.")] = "python3",
    workdir: Annotated[str | None, typer.Option(help="Folder there for relative paths; default: this one.")] = None,
    stop_wait: Annotated[int, typer.Option(help="Seconds that a stop leaves for a step and a save.")] = 600,
    detach: Annotated[bool, typer.Option("--detach", help="Submit and return.")] = False,
    follow: Annotated[str | None, typer.Option(help="Follow this job instead of submitting one.")] = None,
    stop: Annotated[str | None, typer.Option(help="Ask this job to save and end.")] = None,
) -> None:
    """Submit a run to a Ray cluster, follow its log, end with its exit status."""
    from launch.ray_jobs import follow_job, stop_job, submit_job

    if stop:
        typer.echo(stop_job(address, stop, stop_wait))
        return
    if config is None and not follow:
        raise UserError("launch ray wants a CONFIG, or --follow or --stop with the id of a job")
    if config is not None:
        more = {"python": python, "workdir": workdir, "stop_wait_s": stop_wait}
        follow = submit_job(config, overrides or (), address, **more)
        typer.echo(f"submitted job {follow}")
    if not detach:
        sys.exit(follow_job(address, follow))


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


def _plain(text: str) -> Any:
    from rich.text import Text

    return Text(text)


if __name__ == "__main__":
    main()
