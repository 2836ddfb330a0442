"""`launch stop`, `resume`, `sync`: a run told from outside, by its folder alone."""

import subprocess
import sys
import threading
import time

import pytest

from launch.control import resume_command, stop_run, sync_wandb
from launch.errors import UserError
from launch.run_folder import owner, read_record
from launch.runs import open_run
from tests.launch import toy


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.yaml").write_text("job: toy.train\nname: a/toy\nsteps: 400\nstep_s: 0.1\n")
    return tmp_path


def launch(folder, *arguments, **more):
    return subprocess.run(
        toy.command(*arguments), cwd=folder, env=toy.environment(folder, **more), capture_output=True, text=True
    )


def test_stopped_from_outside_and_gone_on_with_by_its_folder_alone(here):
    command = toy.command("run", "t.yaml")
    driver = subprocess.Popen(
        command, cwd=here, env=toy.environment(here), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert driver.stdout.readline() == b"ready\n"
    done = launch(here, "stop", "runs/a/toy", "--wait", "30")
    assert done.returncode == 0, done.stderr
    _, said = driver.communicate(timeout=30)
    assert driver.returncode == 0  # a person's stop: nobody should requeue it
    record = read_record(here / "runs/a/toy")
    assert f"stopped after {record['done']} steps" in done.stdout
    assert "(launch stop by " in said.decode()
    assert record["status"] == "stopped"

    assert "`launch resume runs/a/toy` goes on" in launch(here, "status", "runs/a/toy").stdout
    done = launch(here / "runs", "resume", "a/toy", f"steps={record['done'] + 2}", "step_s=0")
    assert done.returncode == 0, done.stderr
    after = read_record(here / "runs/a/toy")
    assert (after["status"], after["done"], after["attempts"]) == ("finished", record["done"] + 2, 2)
    assert sorted(path.name for path in here.glob("**/run.json")) == ["run.json"]


def test_stop_waits_no_longer_than_asked(here):
    with open_run(toy.ToySettings(name="toy"), 10) as run:
        with pytest.raises(UserError, match=r"pid \d+ on .* has not ended within 0\.5 s; it stops after the step"):
            stop_run(run.folder, wait_s=0.5)
        assert run.stop.reason().startswith("launch stop by ")
        assert not run.stop.again
        assert "it stops after the step it is in" in stop_run(run.folder)
    assert stop_run(run.folder) == "runs/toy: nobody is at work in it"
    with pytest.raises(UserError, match="is no run folder"):
        stop_run(here)


def test_stop_sees_the_end(here):
    opened, over = threading.Event(), threading.Event()

    def work():
        with open_run(toy.ToySettings(name="toy"), 10) as run:
            run.configure(lambda folder: {})
            opened.set()
            while not run.finish(run.done, {}):
                time.sleep(0.05)
        over.set()

    thread = threading.Thread(target=work)
    thread.start()
    opened.wait(20)
    while owner(here / "runs/toy") is None:
        time.sleep(0.01)
    said = stop_run(here / "runs/toy", wait_s=20)
    thread.join(20)
    assert over.is_set()
    assert "stopped after" in said


def test_what_resume_does_and_refuses(here):
    folder = here / "runs/a/toy"
    with open_run(toy.ToySettings(name="a/toy", runs_dir=str(here / "runs")), 10) as run:
        run.configure(lambda folder: {})
        run.finish(0, {})
        with pytest.raises(UserError, match=r"is running already \(pid"):
            resume_command(folder)
    assert resume_command(folder, ["steps=9"]) == ("run", [str(folder / "config.yaml"), 'runs_dir="runs"', "steps=9"])
    (folder / "slurm").mkdir()
    (folder / "slurm" / "job.sh").write_text("#!/bin/bash\n")
    assert resume_command(folder) == ("sbatch", [str(folder / "slurm" / "job.sh")])
    assert resume_command(folder, here=True)[0] == "run"
    with pytest.raises(UserError, match=r"has its own configuration; use `launch slurm CONFIG steps=9"):
        resume_command(folder, ["steps=9"])
    folder.rename(here / "runs/a/other")
    with pytest.raises(UserError, match="the run is named 'a/toy', the folder is not"):
        resume_command(here / "runs/a/other", here=True)
    with pytest.raises(UserError, match=r"cannot go on, its config.yaml cannot be read"):
        resume_command(here)


def test_sync_takes_all_attempts_of_the_one_run(here, monkeypatch):
    done = launch(here, "sync", "runs/none")
    assert (done.returncode, "has no offline W&B data" in done.stderr) == (2, True)
    overrides = ["run", "t.yaml", "step_s=0", "tracking.wandb=offline"]
    assert launch(here, *overrides, "steps=3").returncode == 0
    assert launch(here, *overrides, "steps=5").returncode == 0
    folder = here / "runs/a/toy"
    record = read_record(folder)
    kept = sorted(path.name for path in (folder / "wandb").glob("offline-run-*"))
    assert [name.rpartition("-")[2] for name in kept] == [record["wandb_id"]] * 2
    told = []
    real = subprocess.run

    def brief(command, **more):
        """W&B's own command reads the folders and stops short of the upload, for which there is no server here."""
        told.append(command)
        return real([*command, "--dry-run"], **more)

    monkeypatch.setattr("launch.control.subprocess.run", brief)
    sync_wandb(folder)
    assert told == [
        [sys.executable, "-m", "wandb", "sync", "--id", record["wandb_id"], *(str(folder / "wandb" / n) for n in kept)]
    ]
    (folder / "wandb" / kept[0]).rename(folder / "wandb" / "offline-run-20200101_000000-zzzz")
    with pytest.raises(UserError, match="offline-run-20200101_000000-zzzz belongs to another W&B run"):
        sync_wandb(folder)
