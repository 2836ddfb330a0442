"""`launch ray` against a real cluster of one node with its dashboard and token."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch import reaper
from launch.cluster import _short_folder as short_folder
from launch.errors import UserError
from launch.ray_jobs import connect, submit_job
from tests.cluster import counting

PORT = 9265
ADDRESS = f"http://127.0.0.1:{PORT}"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a configuration, and the variables of a user there."""
    folder = tmp_path_factory.mktemp("ray_jobs")
    (folder / "token").write_text("ab" * 32)
    auth = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / "token")}
    own = {k: v for k, v in os.environ.items() if k not in ("RAY_AUTH_TOKEN", "RAY_ADDRESS")}  # of another test's Ray
    environment = own | auth | {"PYTHONPATH": counting.install(folder / "site"), "OMP_NUM_THREADS": "1"}
    (folder / "c.yaml").write_text("job: counting\nname: a/count\nsteps: 3\nranks: 1\ncheckpoint: {every: 100}\n")
    return folder, environment


@pytest.fixture(scope="module")
def cluster(place):
    """`ray start --head` with a dashboard on loopback."""
    environment = place[1]
    mark, session = f"LAUNCH_CLUSTER=jobs-{os.getpid()}", short_folder()
    name, _, value = mark.partition("=")
    options = ["--head", "--num-cpus=2", "--num-gpus=0", "--object-store-memory=100000000", "--disable-usage-stats"]
    options += ["--dashboard-host=127.0.0.1", f"--dashboard-port={PORT}", "--port=9266", f"--temp-dir={session}"]
    options += ["--node-ip-address=127.0.0.1", "--include-log-monitor=false"]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", *options]
    watcher = reaper.start(mark, 0.5, session)
    try:
        done = subprocess.run(command, env=environment | {name: value}, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        yield
    finally:
        reaper.finish(watcher)


def ray(place, *arguments, **more):
    folder, environment = place
    command = counting.command("ray", *arguments, "--address", ADDRESS)
    return subprocess.run(command, cwd=folder, env=environment | more, capture_output=True, text=True)


def submit(place, *arguments, **more):
    return ray(place, "c.yaml", "--python", sys.executable, *arguments, **more)


@pytest.mark.slow
def test_submitted_followed_finished(place, cluster):
    done = submit(place, WANDB_API_KEY="0123secret", NCCL_DEBUG="WARN")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "run 'a/count' ended after 3 steps" in done.stdout
    lines = (place[0] / "runs/a/count/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["sum/total"] for line in lines] == [1, 3, 6]
    job = done.stdout.splitlines()[0].split()[-1]
    assert job.startswith("a-count-")
    assert f"job {job}: succeeded with status 0" in done.stderr
    env = _variables(place, job)
    assert env["NCCL_DEBUG"] == "WARN"
    assert "0123secret" not in json.dumps(env)
    assert not [key for key in env if "WANDB" in key or "AUTH" in key or key in ("PATH", "HOME", "PYTHONPATH")]


def _variables(place, job):
    code = (
        "import json, sys; from launch.ray_jobs import connect\n"
        f"print(json.dumps(connect({ADDRESS!r}).get_job_info({job!r}).runtime_env))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=place[1], capture_output=True, text=True)
    runtime = json.loads(done.stdout)
    assert set(runtime) <= {"env_vars", "config", "_ray_commit"}  # nothing is uploaded
    return runtime["env_vars"]


@pytest.mark.slow
def test_stopped_it_saves_and_goes_on(place, cluster):
    folder, _ = place
    arguments = ["name=b", "steps=200", "step_s=0.2"]
    job = submit(place, *arguments, "--detach").stdout.split()[-1]
    metrics = folder / "runs/b/metrics.jsonl"
    end = time.monotonic() + 120
    while not metrics.is_file() or len(metrics.read_text().splitlines()) < 2:
        assert time.monotonic() < end
        time.sleep(0.2)
    done = ray(place, "--stop", job)
    assert f"job {job} has ended" in done.stdout, done.stderr
    record = json.loads((folder / "runs/b/run.json").read_text())
    assert record["status"] == "stopped"
    assert (folder / f"runs/b/checkpoints/step-{record['done']:06d}").is_dir()
    again = submit(place, "name=b", f"steps={record['done'] + 1}", "step_s=0")
    assert again.returncode == 0
    assert f"goes on after {record['done']} steps" in again.stdout
    followed = ray(place, "--follow", job)
    assert followed.returncode == 143
    assert "(SIGTERM)" in followed.stdout


@pytest.mark.slow
def test_the_exit_status_is_the_jobs_own(place, cluster):
    limited = submit(place, "name=c", "steps=200", "step_s=0.1", "limits.wall_clock_s=5", "limits.save_before_s=2")
    assert limited.returncode == 75, limited.stdout + limited.stderr
    refused = submit(place, "name=c", "resume=never")
    assert refused.returncode == 2
    assert "error: run folder runs/c is used and resume is 'never'" in refused.stdout
    nowhere = submit(place, "--workdir", "/no/such/folder")
    assert nowhere.returncode == 2
    assert "/no/such/folder: cannot be entered on the cluster" in nowhere.stdout


@pytest.mark.slow
def test_mistakes_are_one_line(place, cluster):
    (place[0] / "other").write_text("cd" * 32)
    wrong = submit(place, RAY_AUTH_TOKEN_PATH=str(place[0] / "other"))
    assert wrong.returncode == 2
    assert f"error: {ADDRESS}: the cluster wants another token" in wrong.stderr
    unknown = ray(place, "--follow", "a-cuont")
    assert (unknown.returncode, "error: job 'a-cuont' is unknown at this cluster" in unknown.stderr) == (2, True)
    assert "wants a CONFIG, or --follow or --stop" in ray(place).stderr


def test_no_cluster(place, monkeypatch):
    monkeypatch.syspath_prepend(str(place[0] / "site"))
    with pytest.raises(UserError, match="no Ray job server answers"):
        submit_job(place[0] / "c.yaml", [], "http://127.0.0.1:11299")
    with pytest.raises(UserError, match=r"want the dashboard's http://host:port"):
        connect("127.0.0.1:8265")
    assert not Path("runs/a/count").exists()
