"""A run as a job of a Ray cluster: submitted with variables only, followed, stopped, its exit status handed on.

Nothing is uploaded: code and dependencies are in the cluster's image (or on its shared disk), and the resolved
configuration travels in a variable. Secrets stay where they are: the cluster's own environment or files.
"""

import asyncio
import os
import re
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.cluster import worker_environment
from launch.config import dump_config, load_config
from launch.console import say
from launch.errors import UserError
from launch.versions import code_commit

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

CONFIG_VARIABLE = "LAUNCH_CONFIG"
FOLDER_VARIABLE = "LAUNCH_WORKDIR"
STOPPED = 143  # as a shell reports SIGTERM
POLL_S = 1.0
AGENT_S = 120.0  # for a young cluster to be ready for jobs


def submit_job(
    config: Path,
    overrides: Sequence[str],
    address: str,
    *,
    python: str = "python3",
    workdir: str | None = None,
    stop_wait_s: int = 600,
) -> str:
    """Submit a run; returns the job's id.

    Args:
        address: of the dashboard, `http://host:8265`.
        python: interpreter on the cluster.
        workdir: folder on the cluster that relative paths of the configuration start from; default: this one.
        stop_wait_s: seconds that a stop leaves the run for its step and save, before Ray kills it.

    Raises:
        UserError: configuration; nothing answers; the cluster wants a token.
    """
    settings = load_config(config, [*overrides, "cluster.address=auto"])
    client = connect(address)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    variables = worker_environment(os.environ) | {
        CONFIG_VARIABLE: dump_config(settings),
        FOLDER_VARIABLE: workdir or str(Path.cwd()),
        "RAY_JOB_STOP_WAIT_TIME_S": str(stop_wait_s),
    }
    commit = code_commit(Path(__file__).parent) or {}
    return _once_there_is_an_agent(
        client,
        entrypoint=f"exec {shlex.quote(python)} -m launch.ray_jobs",
        submission_id=f"{re.sub(r'[^A-Za-z0-9_.-]', '-', settings.name)}-{stamp}",
        runtime_env={"env_vars": variables},
        metadata={"run": settings.name, "job": settings.job, "commit": str(commit.get("commit"))},
    )


def _once_there_is_an_agent(client: "JobSubmissionClient", **job: Any) -> str:
    """Submit; a cluster that has just started answers before the agent that would take the job is up."""
    end = time.monotonic() + AGENT_S
    while True:
        try:
            return client.submit_job(**job)
        except RuntimeError as error:
            if "No available agent" not in str(error):
                raise
            if time.monotonic() > end:
                raise UserError(
                    f"the cluster has taken no job for {AGENT_S:g} s ({error}); look at its logs"
                ) from error
            time.sleep(POLL_S)


def follow_job(address: str, job: str) -> int:
    """Print a job's log until it ends; returns its exit status (143 when it was stopped through Ray)."""
    client = connect(address)
    _known(client, job)
    try:
        asyncio.run(_print_log(client, job))
        while not client.get_job_status(job).is_terminal():
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        say(f"job {job} goes on; `launch ray --follow {job}` shows it again, `launch ray --stop {job}` ends it")
        return 130
    details = client.get_job_info(job)
    say(f"job {job}: {details.status.value.lower()}{_why(details)}")
    if details.driver_exit_code is not None:
        return details.driver_exit_code
    return {"SUCCEEDED": 0, "STOPPED": STOPPED}.get(details.status.value, 1)


def stop_job(address: str, job: str, wait_s: float = 600) -> str:
    """Ask a job to save after the step it is in and to end, and wait for that.

    Raises:
        UserError: no such job, or it has not ended within `wait_s`.
    """
    client = connect(address)
    _known(client, job)
    if client.get_job_status(job).is_terminal():
        return f"job {job} has ended already"
    client.stop_job(job)
    end = time.monotonic() + wait_s
    while not client.get_job_status(job).is_terminal():
        if time.monotonic() > end:
            raise UserError(f"job {job} has not ended within {wait_s:g} s; it stops after the step it is in")
        time.sleep(POLL_S)
    return f"job {job} has ended"


def connect(address: str) -> "JobSubmissionClient":
    """A client of the cluster's job server; the token is read as Ray does (RAY_AUTH_MODE, RAY_AUTH_TOKEN_PATH).

    Raises:
        UserError: nothing answers there, or the token is missing or wrong.
    """
    if not re.match(r"https?://[^/]+", address):
        raise UserError(f"--address: got {address!r}, want the dashboard's http://host:port (port 8265 as a rule)")
    try:
        from ray.exceptions import RayError
        from ray.job_submission import JobSubmissionClient
    except ModuleNotFoundError as error:
        raise UserError(f"`launch ray` needs the package '{error.name}': pip install 'ray[default]==2.60.0'") from error
    try:
        return JobSubmissionClient(address)
    except (ConnectionError, RuntimeError, RayError) as error:
        reason = " ".join(str(error).split())
        if "401" in reason or "403" in reason or "uthentication" in reason:
            raise UserError(
                f"{address}: the cluster wants another token ({reason[:120]}); set RAY_AUTH_MODE=token and "
                "RAY_AUTH_TOKEN_PATH to a file with the one that it was started with"
            ) from error
        raise UserError(f"{address}: no Ray job server answers ({reason[:160]}); is the tunnel to it open?") from error


async def _print_log(client: "JobSubmissionClient", job: str) -> None:
    async for part in client.tail_job_logs(job):
        print(part, end="", flush=True)


def _known(client: "JobSubmissionClient", job: str) -> None:
    ids = [details.submission_id for details in client.list_jobs()]
    if job not in ids:
        from launch.errors import did_you_mean

        raise UserError(f"job '{job}' is unknown at this cluster; {did_you_mean(job, filter(None, ids))}")


def _why(details: Any) -> str:
    if details.driver_exit_code is not None:
        return f" with status {details.driver_exit_code}"
    return f" ({' '.join(details.message.split())[:300]})" if details.message else ""


def main() -> None:
    """What runs on the cluster: the run that the variables describe, in the job's own Ray."""
    import tempfile

    from launch.cli import run_command, run_job

    def enter() -> None:
        folder = os.environ.get(FOLDER_VARIABLE, "")
        try:
            os.chdir(folder)
        except OSError as error:
            raise UserError(
                f"{folder}: cannot be entered on the cluster ({error.strerror}); give --workdir, a folder on its "
                "shared disk"
            ) from error

    run_command(enter)
    with tempfile.TemporaryDirectory() as place:
        config = Path(place, "config.yaml")
        config.write_text(os.environ.pop(CONFIG_VARIABLE), encoding="utf-8")
        run_job(config)


if __name__ == "__main__":
    main()
