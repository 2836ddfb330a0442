"""`launch slurm` on a real SLURM with two (virtual) nodes: signal, requeue, resume, finish; stop; a node that dies."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from launch.run_folder import read_record
from tests.cluster import counting

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROFILE = """
description: two virtual nodes of one machine
time_limit: "20"
signal_lead_s: 60
cpus_per_node: 1
object_store_mb: 100
scratch: {scratch}
requeue: {requeue}
setup:
  - export PYTHONPATH={path} WANDB_SILENT=true
env: {{OMP_NUM_THREADS: "1"}}
deadline_s: 240
"""


class Site:
    """A folder with a configuration and a profile, and the commands of a user there."""

    def __init__(self, folder: Path, environment: dict[str, str], requeue: str = "scontrol") -> None:
        self.folder, self.run = folder, folder / "runs" / "count"
        path = counting.install(folder / "site")
        self.environment = environment | {"PYTHONPATH": path}
        (folder / "site.yaml").write_text(PROFILE.format(path=path, requeue=requeue, scratch=folder.parent))
        (folder / "c.yaml").write_text(
            "job: counting\nname: count\nsteps: 60\nstep_s: 1\ncheckpoint: {every: 20}\ntracking: {wandb: offline}\n"
        )

    def call(self, *command: str) -> str:
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def submit(self, *more: str) -> str:
        command = counting.command("slurm", "c.yaml", "--profile", "site.yaml", "--nodes", "2", *more)
        return self.call(*command).split()[-1]

    def until(self, what: str, ready, seconds: float = 240) -> None:
        end = time.monotonic() + seconds
        while not ready():
            logs = [*(self.run / "slurm").glob("*.out"), *(self.run / "slurm").glob("*/*.log")]
            said = "\n".join(path.read_text()[-3000:] for path in logs)
            assert time.monotonic() < end, f"{what} took more than {seconds} s\n{said}\n{left(self)}"
            time.sleep(1)

    def steps(self) -> int:
        file = self.run / "metrics.jsonl"
        return len(file.read_text().splitlines()) if file.is_file() else 0

    def state(self, job: str) -> str:
        return self.call("scontrol", "show", "job", job).partition("JobState=")[2].split()[0]

    def said(self, job: str) -> str:
        return (self.run / "slurm" / f"slurm-{job}.out").read_text()

    def metrics(self) -> list[dict]:
        return [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]


def left(site: Site) -> list[str]:
    """Processes of the attempts that are still there."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if str(site.run).encode() in (path / "environ").read_bytes():
                found.append((path / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:200])
        except OSError:  # ended meanwhile
            continue
    return found


def test_warned_requeued_resumed_finished(tmp_path, slurm):
    site = Site(tmp_path, slurm)
    job = site.submit()
    site.until("some steps", lambda: site.steps() >= 3)
    wandb_id = read_record(site.run)["wandb_id"]
    assert f"{job} (RUNNING)" in site.call(*counting.command("status", "runs/count"))
    site.call("scancel", "--signal=USR1", "--batch", job)  # what SLURM does before the time limit
    site.until("the requeue", lambda: "requeued" in site.said(job) and site.state(job) == "PENDING")
    first = read_record(site.run)
    assert first["status"] == "stopped"
    assert 3 <= first["done"] < 60
    said = site.said(job)
    assert "SIGUSR1: asking the run to save and stop" in said
    assert f"stopped after {first['done']} steps (SIGUSR1 at the batch shell of job {job}): saved in" in said
    assert "the scheduler's signal comes 1 m 00 s before the end" in said

    site.call("scontrol", "update", f"jobid={job}", "StartTime=now")
    site.until("the end", lambda: site.state(job) == "COMPLETED", 400)
    record = read_record(site.run)
    assert (record["status"], record["attempts"], record["wandb_id"]) == ("finished", 2, wandb_id)
    lines = site.metrics()
    assert [line["step"] for line in lines] == list(range(1, 61))
    assert all(line["sum/total"] == counting.expected_sum(line["step"]) for line in lines)
    assert {line["sum/nodes"] for line in lines} == {2}
    assert {path.name.rpartition("-")[2] for path in (site.run / "wandb").glob("offline-run-*")} == {wandb_id}
    assert len(list((site.run / "wandb").glob("offline-run-*"))) == 2
    assert {path.name for path in (site.run / "slurm").glob(f"{job}.*")} == {f"{job}.0", f"{job}.1"}
    token = site.run / "slurm" / f"{job}.0" / "token"
    assert len(token.read_text()) == 64
    assert token.stat().st_mode & 0o77 == 0
    assert token.read_text() not in said
    site.until("clean nodes", lambda: not left(site), 60)


def test_a_chain_goes_on_where_requeue_is_refused_and_stop_ends_it(tmp_path, slurm):
    site = Site(tmp_path, slurm, requeue="chain")
    first = site.submit()
    site.until("some steps", lambda: site.steps() >= 2)
    site.call("scancel", "--signal=TERM", "--batch", first)  # a preemption
    site.until("the end of the first job", lambda: site.state(first) == "COMPLETED")
    jobs = [json.loads(line)["job"] for line in (site.run / "slurm" / "jobs.jsonl").read_text().splitlines()]
    assert jobs[0] == first
    assert len(jobs) == 2
    done = read_record(site.run)["done"]
    site.until("steps of the second job", lambda: site.steps() > done + 1)
    said = site.call(*counting.command("stop", "runs/count", "--wait", "60"))
    assert "stopped after" in said
    site.until("the end of the second job", lambda: site.state(jobs[1]) == "COMPLETED")
    assert len((site.run / "slurm" / "jobs.jsonl").read_text().splitlines()) == 2  # a person's stop is the end
    record = read_record(site.run)
    assert (record["status"], record["attempts"]) == ("stopped", 2)
    assert f"`launch resume runs/count` goes on from step {record['done']}" in site.call(
        *counting.command("status", "runs/count")
    )


def test_jobs_queued_at_once_run_one_after_the_other_until_the_run_is_finished(tmp_path, slurm):
    site = Site(tmp_path, slurm, requeue="chain")
    site.submit("--chain", "3", "steps=14", "limits.wall_clock_s=18", "limits.save_before_s=4")
    jobs = [json.loads(line)["job"] for line in (site.run / "slurm" / "jobs.jsonl").read_text().splitlines()]
    assert len(jobs) == 3
    site.until("the end", lambda: all(site.state(job) in ("FAILED", "COMPLETED", "CANCELLED") for job in jobs), 400)
    # The first runs out of time (status 75), the second finishes the run and cancels the third.
    assert [site.state(job) for job in jobs] == ["FAILED", "COMPLETED", "CANCELLED"], site.said(jobs[0])
    assert "(the time limit: " in site.said(jobs[0])
    record = read_record(site.run)
    assert (record["status"], record["attempts"]) == ("finished", 2)
    assert [line["step"] for line in site.metrics()] == list(range(1, 15))


def test_a_node_whose_ray_dies_ends_the_allocation(tmp_path, slurm):
    site = Site(tmp_path, slurm)
    job = site.submit()
    site.until("some steps", lambda: site.steps() >= 1)
    for path in Path("/proc").glob("[0-9]*"):
        try:
            marked = f"LAUNCH_CLUSTER={job}.0-n2".encode() in (path / "environ").read_bytes()
            if marked and (path / "comm").read_text().strip() == "raylet":
                os.kill(int(path.name), signal.SIGKILL)
        except OSError:
            continue
    site.until("the end", lambda: site.state(job) == "FAILED", 120)
    assert "error: n2: Ray's raylet is gone; its logs: " in site.said(job)
    assert (site.run / "slurm" / f"{job}.0" / "ray-logs-n2" / "raylet.out").is_file()
    site.until("clean nodes", lambda: not left(site), 60)


def test_preflight_looks_at_both_nodes(tmp_path, slurm):
    site = Site(tmp_path, slurm)
    job = site.submit("--preflight")
    site.until("the end", lambda: site.state(job) in ("COMPLETED", "FAILED"))
    said = site.said(job)
    assert "seen both ways (all 2 nodes)" in said, said
    assert re.search(r"all-reduce across nodes +ok +[\d.]+ GB/s bus bandwidth, 4 ranks", said)
    assert site.state(job) == "COMPLETED"
    assert not (site.run / "run.json").exists()
