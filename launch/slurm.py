"""SLURM: profiles of machines, and the batch script of a run, written from a template and submitted.

The script is plain bash that a person can read, edit and submit again; it lies in `<run>/slurm/job.sh` beside the
resolved configuration, so that a queued job does not change when a file in the repository does.
"""

import importlib.util
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, ValidationError

from launch.config import Settings, dump_config, load_config
from launch.config_errors import user_error
from launch.config_files import read_layers
from launch.errors import UserError, did_you_mean
from launch.files import write_atomic
from launch.jobs import get_job

if TYPE_CHECKING:
    from launch.config import JobSettings

PROFILES = Path("slurm/profiles")
PLAIN_RUN = "$PWD/runs/my_run"
PLAIN_CONFIG = "my_run.yaml"
_SECRET = re.compile(r"(^|_)(TOKEN|KEY|SECRET|PASSWORD)(_|$)")


class Profile(Settings):
    """What one machine wants to be asked for, and how."""

    description: str = ""
    """One line about the machine."""
    account: str | None = None
    """Project that pays (`--account`)."""
    account_required: bool = False
    """The machine refuses jobs without an account."""
    partition: str | None = None
    """Partition."""
    qos: str | None = None
    """Quality of service."""
    constraint: str | None = None
    """Node features (`--constraint`)."""
    reservation: str | None = None
    """Reservation."""
    time_limit: str = Field(default="04:00:00", pattern=r"^(\d+-)?\d+(:\d\d){0,2}$")
    """Time limit of one job, as SLURM writes it."""
    signal_lead_s: int = Field(default=300, ge=10)
    """Seconds before the time limit at which the run is asked to save; a run prints how many it needs."""
    gpus_per_node: int = Field(default=0, ge=0)
    """GPUs of a node (MI250X: 8, one a GCD)."""
    gpu_request: Literal["gpus-per-node", "gres", "none"] = "gpus-per-node"
    """How GPUs are asked for; none where the node comes with all of them."""
    cpus_per_node: int | None = Field(default=None, ge=1)
    """CPUs that Ray may use on a node; None means all that SLURM gives."""
    exclusive: bool = True
    """Ask for whole nodes."""
    sbatch: tuple[str, ...] = ()
    """More `#SBATCH` options, for example `--mem=0`."""
    srun: tuple[str, ...] = ()
    """More options of every srun."""
    requeue: Literal["scontrol", "chain", "none"] = "scontrol"
    """How an unfinished run goes on: `scontrol requeue` (and a chain where that is refused), a new job after this one
    (`--dependency=singleton`), or by hand."""
    max_restarts: int = Field(default=50, ge=0)
    """Requeue at most so often."""
    container: str | None = None
    """Command that runs another inside the container, for example `apptainer exec --rocm --bind /scratch image.sif`."""
    python: str | None = None
    """Python on the nodes; None means `python3` in a container, else the interpreter that runs `launch slurm`."""
    setup: tuple[str, ...] = ()
    """Shell lines before anything runs: `module load …`, `export …`."""
    env: dict[str, str] = {}
    """Variables of all steps: NCCL/RCCL, libfabric, caches. `$NAME` is expanded on the node. No secrets."""
    secrets_file: str | None = None
    """A shell file, readable by its owner only, with `export WANDB_API_KEY=…`; sourced on the node if it is there."""
    interface: str | None = None
    """Network device whose address Ray uses, for example hsn0."""
    scratch: str = "/tmp"
    """Node-local folder; a short path, since Ray puts its sockets below it."""
    stage: bool = False
    """Copy the model to `scratch` once a node and load it from there."""
    object_store_mb: int | None = Field(default=None, ge=80)
    """Ray's object store on a node; None means 30 % of memory, at most half of /dev/shm."""
    deadline_s: float = Field(default=600, gt=0)
    """Seconds until all nodes must have joined."""
    bandwidth_within_gb_s: float | None = Field(default=None, gt=0)
    """All-reduce bus bandwidth to expect between the GPUs of a node; `launch preflight` compares."""
    bandwidth_across_gb_s: float | None = Field(default=None, gt=0)
    """The same, between nodes."""


def load_profile(name: str, changes: Sequence[str] = ()) -> Profile:
    """A profile by name (`slurm/profiles/NAME.yaml` here or beside the package) or by path, with changes `field=value`.

    Raises:
        UserError: no such profile, an unknown field, a value that does not fit, a secret in `env`.
    """
    layers = read_layers(_profile_path(name), changes)
    try:
        profile = Profile.model_validate(layers.values)
    except ValidationError as error:
        raise user_error(error, Profile, layers) from error
    for key in profile.env:
        if not re.fullmatch(r"[A-Za-z_]\w*", key):
            raise UserError(f"profile {name}: env has '{key}', which is no name of a variable")
        if _SECRET.search(key.upper()):
            raise UserError(
                f"profile {name}: env.{key} looks like a secret; it would stand in the job script: put it into a file "
                "that only you can read and name that in secrets_file"
            )
    return profile


def nodes_needed(settings: "JobSettings", profile: Profile, nodes: int | None) -> int:
    """Number of nodes: as asked for, else what the job's footprint fills.

    Raises:
        UserError: fewer nodes than the footprint needs.
    """
    footprint = get_job(settings.job).footprint(settings)
    least, why = 1, ""
    for name, each in (("gpus", profile.gpus_per_node), ("cpus", profile.cpus_per_node)):
        wanted = footprint.get(name, 0)
        if name == "gpus" and wanted and not each:
            raise UserError(
                f"the run wants {wanted:g} GPUs, the profile has gpus_per_node 0; set it, or learner.gpus=0"
            )
        if each and math.ceil(wanted / each) > least:
            least, why = math.ceil(wanted / each), f"{wanted:g} {name}, {each} a node"
    if nodes is not None and nodes < least:
        raise UserError(f"--nodes {nodes} is too few: the run wants {why}, so {least} nodes at least")
    return nodes if nodes is not None else least


def directives(profile: Profile, nodes: int, job_name: str, output: str) -> list[str]:
    """The `#SBATCH` options, in order."""
    known = ("account", "partition", "qos", "constraint", "reservation")
    lines = [f"--job-name={job_name}", f"--nodes={nodes}", "--ntasks-per-node=1"]
    lines += [f"--{name}={value}" for name in known if (value := getattr(profile, name))]
    if profile.gpus_per_node and profile.gpu_request == "gpus-per-node":
        lines.append(f"--gpus-per-node={profile.gpus_per_node}")
    if profile.gpus_per_node and profile.gpu_request == "gres":
        lines.append(f"--gres=gpu:{profile.gpus_per_node}")
    lines += ["--exclusive"] if profile.exclusive else []
    lines += [f"--time={profile.time_limit}", f"--signal=B:USR1@{profile.signal_lead_s}"]
    lines += ["--requeue" if profile.requeue == "scontrol" else "--no-requeue", "--open-mode=append"]
    return [*lines, f"--output={output}", "--export=NONE", *profile.sbatch]


def render(
    settings: "JobSettings", profile: Profile, profile_name: str, nodes: int, command: str = "run", chain: bool = False
) -> str:
    """The batch script of a run.

    Args:
        command: what the driver does: `run`, or `preflight`.
        chain: one of several jobs submitted at once, each after the other.
    """
    folder = (Path(settings.runs_dir) / settings.name).absolute()
    lines = directives(profile, nodes, job_name(settings), str(folder / "slurm" / "slurm-%j.out"))
    paths = {"folder": folder, "config": folder / "slurm" / "config.yaml", "script": folder / "slurm" / "job.sh"}
    return _fill(
        profile,
        plain=False,
        profile_name=profile_name,
        name=settings.name,
        job=settings.job,
        nodes=nodes,
        directives=lines,
        workdir=shlex.quote(str(Path.cwd())),
        command=command,
        chain=chain,
        **{name: shlex.quote(str(path)) for name, path in paths.items()},
    )


def render_plain(profile: Profile, profile_name: str, nodes: int = 2) -> str:
    """The same script for people who would rather edit one: `slurm/<profile>.sbatch` in the repository."""
    python = profile.python or ("python3" if profile.container else '"$PWD/.venv/bin/python"')
    lines = directives(profile, nodes, "my_run", "slurm-%j.out")
    if profile.account_required:
        lines.insert(3, "--account=MY_PROJECT")
    return _fill(
        profile.model_copy(update={"python": python}),
        plain=True,
        profile_name=profile_name,
        directives=lines,
        workdir='"${SLURM_SUBMIT_DIR:-$PWD}"',
        folder=PLAIN_RUN,
        config=PLAIN_CONFIG,
        script="$PWD/slurm/" + f"{profile_name}.sbatch",
        command="run",
        chain=False,
    )


def submit(
    config: Path,
    overrides: Sequence[str],
    profile_name: str,
    changes: Sequence[str] = (),
    *,
    nodes: int | None = None,
    dry_run: bool = False,
    chain: int = 1,
    preflight: bool = False,
    salloc: bool = False,
) -> list[str]:
    """Write a run's script and submit it; returns the ids of the jobs.

    Raises:
        UserError: configuration or profile; no SLURM here; sbatch refuses (with its words).
    """
    settings, profile = load_config(config, overrides), load_profile(profile_name, changes)
    if profile.account_required and not profile.account:
        raise UserError(f"profile {profile_name}: this machine wants an account: --set account=YOUR_PROJECT")
    count = nodes_needed(settings, profile, nodes)
    name = Path(profile_name).stem
    command = f"preflight --profile {shlex.quote(str(_profile_path(profile_name).absolute()))}" if preflight else "run"
    text = render(settings, profile, name, count, command, chain > 1)
    if dry_run:
        print(text, end="")
        return []
    if profile.container is None and profile.python is None and importlib.util.find_spec("ray") is None:
        raise UserError(
            f"{sys.executable} has no Ray (a light install) and the nodes would use it: --set python=/path/to/python "
            "with a full install, or --set container='apptainer exec … image.sif'"
        )
    folder = (Path(settings.runs_dir) / settings.name).absolute() / "slurm"
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / ("preflight.sh" if preflight else "job.sh")
    write_atomic(folder / "config.yaml", dump_config(settings))
    write_atomic(script, text)
    script.chmod(0o755)
    if salloc:
        _needs("salloc")
        os.execvp("salloc", ["salloc", *salloc_options(text), "bash", str(script)])
    return [submit_script(script, singleton=chain > 1) for _ in range(chain)]


def salloc_options(script: str) -> list[str]:
    """What a script asks for, as options of salloc; those of batch jobs only are left out."""
    options = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]
    batch = ("--output", "--open-mode", "--export", "--requeue", "--no-requeue", "--signal")
    return [option for option in options if not option.startswith(batch)]


def submit_script(script: Path, singleton: bool = False) -> str:
    """sbatch a script of a run and note the job beside it; returns its id.

    Raises:
        UserError: no sbatch here, or it refuses.
    """
    _needs("sbatch")
    command = ["sbatch", "--parsable", *(["--dependency=singleton"] if singleton else []), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        words = " ".join(done.stderr.split())
        raise UserError(f"sbatch refused {script}: {words}; correct the profile (--set field=value)")
    job = done.stdout.strip().partition(";")[0]
    with (script.parent / "jobs.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"job": job, "script": script.name, "time": round(time.time())}) + "\n")
    return job


def job_name(settings: "JobSettings") -> str:
    """Name of the job in the queue: the run's, without slashes."""
    return settings.name.replace("/", "-")


def _needs(program: str) -> None:
    if shutil.which(program) is None:
        raise UserError(
            f"{program} is not installed here: submit from a login node, or use --dry-run to see the script"
        )


def _profile_path(name: str) -> Path:
    if name.endswith((".yaml", ".yml")):
        return Path(name)
    folders = [PROFILES, Path(__file__).parents[1] / PROFILES]
    for folder in folders:
        if (folder / f"{name}.yaml").is_file():
            return folder / f"{name}.yaml"
    known = {path.stem for folder in folders for path in folder.glob("*.yaml")}
    raise UserError(f"profile '{name}' is unknown; {did_you_mean(name, known)} (or give the path of a YAML file)")


def _fill(profile: Profile, **values: Any) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("launch", "templates")
    environment = Environment(loader=loader, undefined=StrictUndefined, keep_trailing_newline=True)
    environment.filters["double_quoted"] = lambda text: '"' + re.sub(r'(["`\\])', r"\\\1", text) + '"'
    options = {
        "interface": profile.interface,
        "cpus": profile.cpus_per_node or "${SLURM_CPUS_ON_NODE:-1}",
        "gpus": profile.gpus_per_node,
        "object-store-mb": profile.object_store_mb,
        "deadline": f"{profile.deadline_s:g}",
    }
    python = profile.python or ("python3" if profile.container else shlex.quote(sys.executable))
    return environment.get_template("job.sh.j2").render(
        profile=profile,
        python=python,
        node_options="".join(f" --{name} {value}" for name, value in options.items() if value is not None),
        srun_options="".join(f" {option}" for option in profile.srun),
        **values,
    )
