"""Runs: steps done once and only once over attempts, whatever ended an attempt."""

import errno
import json
import logging
import os
import signal
import subprocess
import time

import pytest

from launch.errors import UserError
from launch.run_folder import owner, read_record, supersede_metrics
from launch.runs import open_run
from tests.launch import toy


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.yaml").write_text("job: toy.train\ncheckpoint: {every: 3}\n")
    return tmp_path


def launch(folder, *overrides, die="", check=None, **more):
    """`launch run t.yaml …` in a process of its own."""
    environment = toy.environment(folder, **({"TOY_DIE": die} if die else {}), **more)
    done = subprocess.run(
        toy.command("run", "t.yaml", *overrides),
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if check is not None:
        assert done.returncode == check, done.stderr
    return done


def metrics(folder, name="run"):
    """Metrics without times, line by line."""
    lines = [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith("time")} for line in lines]


def settings(folder, **fields):
    return toy.ToySettings(runs_dir=str(folder / "runs"), **fields)


def test_a_run_leaves_all_that_is_needed_to_repeat_it(here):
    launch(here, "validate_every=2", "tracking.samples_every=4", check=0)
    folder = here / "runs" / "run"
    assert [line["step"] for line in metrics(here)] == list(range(1, 11))
    assert [line["step"] for line in metrics(here) if "validation/score" in line] == [2, 4, 6, 8, 10]
    assert "every: 3" in (folder / "config.yaml").read_text()
    versions = json.loads((folder / "versions.json").read_text())
    assert versions["python"].startswith("3.1")
    assert versions["packages"]["pydantic"]
    assert versions["command"][-1] == "tracking.samples_every=4"
    assert versions["code"] is None or len(versions["code"]["commit"]) == 40
    assert sorted(path.name for path in (folder / "samples").iterdir()) == [
        f"step-{step:06d}.jsonl" for step in (1, 4, 8, 10)
    ]
    attempt = folder / "logs" / "attempt-001"
    assert "checkpoint of step 3" in (attempt / "driver.log").read_text()
    assert {path.name for path in attempt.iterdir()} == {"config.yaml", "versions.json", "driver.log", "workers"}
    record = read_record(folder)
    assert (record["status"], record["attempts"], record["done"]) == ("finished", 1, 10)
    # two newest and the best by validation, which is the one of step 4 and was due to no other rule
    kept = sorted(path.name for path in (folder / "checkpoints").glob("step-*"))
    assert kept == ["step-000004", "step-000009", "step-000010"]
    assert (folder / "checkpoints" / "step-000004" / "config.yaml").is_file()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "t.yaml").write_text("job: toy.train\ncheckpoint: {every: 3}\n")
    launch(folder, "validate_every=2", "checkpoint.keep=1", check=0)
    return folder


@pytest.mark.parametrize(
    ("die", "kept"),  # checkpoints after 3, 6, 9 steps, and after 2 and 4: the best by validation until then
    [("step:5", 4), ("save:3", 2), ("saved:6", 6), ("save:10", 9), ("raise:8", 6)],
)
def test_killed_and_restarted_equals_undisturbed(here, whole, die, kept):
    died = launch(here, "validate_every=2", "checkpoint.keep=1", die=die)
    assert died.returncode == (1 if die.startswith("raise") else -signal.SIGKILL)
    done = launch(here, "validate_every=2", "checkpoint.keep=1", check=0)
    assert f"goes on after {kept} steps (10 in all)" in done.stderr
    assert metrics(here) == metrics(whole)
    record = read_record(here / "runs" / "run")
    assert (record["status"], record["attempts"]) == ("finished", 2)
    for name in ("step-000010/weights.json", "best", "latest"):
        ours, theirs = (folder / "runs" / "run" / "checkpoints" / name for folder in (here, whole))
        assert ours.read_text() == theirs.read_text()
    assert not list((here / "runs" / "run" / "checkpoints").glob("*.tmp-*"))


@pytest.mark.parametrize("how", ["SIGTERM", "STOP"])
def test_asked_to_stop_it_saves_and_goes_on_later(here, whole, how):
    environment = toy.environment(here)
    arguments = ["run", "t.yaml", "validate_every=2", "checkpoint.keep=1"]
    process = subprocess.Popen(
        toy.command(*arguments, "step_s=0.5"), cwd=here, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout.readline() == b"ready\n"
    if how == "STOP":
        (here / "runs" / "run" / "STOP").touch()
    else:
        process.send_signal(getattr(signal, how))
    _, said = process.communicate(timeout=60)
    assert process.returncode == (0 if how == "STOP" else 75), said
    reason = "the file runs/run/STOP" if how == "STOP" else how
    assert f"run 'run' stopped after 1 steps ({reason}): saved in runs/run/checkpoints/step-000001" in said.decode()
    assert read_record(here / "runs" / "run")["status"] == "stopped"
    launch(here, *arguments[2:], check=0)
    assert metrics(here) == metrics(whole)


def test_a_finished_run_trains_nothing(whole):
    before = (whole / "runs" / "run" / "metrics.jsonl").read_bytes()
    done = launch(whole, "validate_every=2", "checkpoint.keep=1", check=0)
    assert "run 'run' is finished already: 10 of 10 steps are done in runs/run; raise steps" in done.stderr
    assert "ready" not in done.stdout
    assert (whole / "runs" / "run" / "metrics.jsonl").read_bytes() == before
    assert len(list((whole / "runs" / "run" / "logs").iterdir())) == 1


def train(run, steps, state=None):
    """Close some steps of a run in this process."""
    run.configure(save=lambda folder: (folder / "w").write_text("w") and (state or {}))
    for step in range(run.start_step, run.start_step + steps):
        over = run.finish(step, {"learner/x": step})
    return over


def test_steps_are_closed_in_order_and_once(here):
    with open_run(settings(here, steps=3), 3) as run:
        run.configure()
        assert not run.finish(0, {})
        for wrong in (0, 2):
            with pytest.raises(RuntimeError, match=f"step {wrong} was finished where step 1 of 3 comes next"):
                run.finish(wrong, {})
        assert not run.finish(1, {})
        assert run.finish(2, {})
        with pytest.raises(RuntimeError, match="step 3 was finished"):
            run.finish(3, {})


def test_more_steps_later(here):
    with open_run(settings(here, steps=2), 2) as run:
        assert train(run, 2, {"cursor": 5})
    with open_run(settings(here, steps=4), 4) as run:
        assert (run.start_step, run.attempt, run.resumed.state["cursor"]) == (2, 2, 5)
        assert train(run, 2)
    assert [line["step"] for line in metrics(here)] == [1, 2, 3, 4]


def test_resume_never_and_require(here):
    with (
        pytest.raises(UserError, match="has no checkpoint and resume is 'require'"),
        open_run(settings(here, resume="require"), 3),
    ):
        pass
    with open_run(settings(here, resume="never"), 3) as run:
        train(run, 1)
        run.stop.request("enough")
    with pytest.raises(UserError, match="is used and resume is 'never'"), open_run(settings(here, resume="never"), 3):
        pass


def test_two_drivers_do_not_share_a_folder(here):
    with open_run(settings(here), 3) as run:
        assert f"pid {os.getpid()} on " in owner(run.folder)
        with (
            pytest.raises(UserError, match=f"another driver is at work in it .pid {os.getpid()} on"),
            open_run(settings(here), 3),
        ):
            pass
        other = launch(here, check=2)
        assert other.stderr.startswith("error: run folder runs/run: another driver is at work in it")
        assert len(other.stderr.splitlines()) == 1
    assert owner(run.folder) is None


def test_a_folder_that_cannot_be_written(here):
    (here / "runs").write_text("a file")
    with pytest.raises(UserError, match="cannot be written"), open_run(settings(here), 3):
        pass


def test_other_mathematics_is_refused_and_other_bookkeeping_is_not(here):
    with open_run(settings(here), 10) as run:
        train(run, 1)
        run.stop.request("enough")
        run.finish(1, {})
    changed = settings(here, seed=1, block=toy.BlockSettings(lr=0.2))
    with pytest.raises(UserError) as caught, open_run(changed, 10):
        pass
    message = str(caught.value)
    assert "seed was 0, is now 1; block.lr was 0.1, is now 0.2; give the former values" in message
    assert "\n" not in message
    allowed = toy.ToySettings.model_validate(
        settings(here).model_dump() | {"steps": 20, "step_s": 1, "checkpoint": {"every": 9}, "cluster": {"num_cpus": 1}}
    )
    with open_run(allowed, 20) as run:
        assert run.start_step == 2
        run.stop.request("enough")
    assert "steps: 20" in (run.folder / "config.yaml").read_text()
    assert "steps: 10" in (run.folder / "logs" / "attempt-001" / "config.yaml").read_text()


def test_a_field_that_the_run_did_not_know_counts_with_its_default(here):
    with open_run(settings(here), 10) as run:
        train(run, 2)
        run.store.save(2, lambda folder: None, run={"best": None, "wandb_id": "x"})
    path = run.folder / "config.yaml"
    path.write_text(path.read_text().replace("needs: 0.0\n", ""))
    with open_run(settings(here), 10) as run:
        assert run.start_step == 2
    path.write_text(path.read_text().replace("needs: 0.0\n", ""))
    with pytest.raises(UserError, match=r"needs was 0\.0, is now 1\.0"), open_run(settings(here, needs=1.0), 10):
        pass


def test_the_folder_of_another_job_is_refused(here):
    with open_run(settings(here), 3) as run:
        pass
    record = read_record(run.folder) | {"job": "other.job"}
    (run.folder / "run.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"belongs to the job 'other\.job'"), open_run(settings(here), 3):
        pass


def test_a_corrupted_checkpoint_is_passed_over_and_said(here, caplog):
    with open_run(settings(here), 10) as run:
        for step in (1, 2):
            run.store.save(step, lambda folder: (folder / "w").write_text("w") and None, run={"wandb_id": "x"})
    (run.store.folder / "step-000002" / "w").write_text("v")
    with open_run(settings(here), 10) as run:
        assert run.start_step == 1
    assert "checkpoint passed over" in caplog.text
    assert "step-000002: w: checksum" in caplog.text
    (run.store.folder / "step-000001" / "w").unlink()
    with (
        pytest.raises(UserError, match=r"none of the checkpoints \(steps 1, 2\) is sound"),
        open_run(settings(here), 10),
    ):
        pass


def test_a_stop_that_comes_during_a_save_or_a_log_still_leaves_a_checkpoint(here):
    with open_run(settings(here, checkpoint={"every": 2}), 10) as run:

        def save(folder):
            run.stop.request("during the save")
            return {}

        run.configure(save)
        assert not run.finish(0, {})
        assert run.finish(1, {})
        assert run.stopped == "during the save"
        assert run.store.steps() == [2]


def test_the_best_checkpoint_and_a_validation_that_is_not_a_number(here):
    scores = {1: 0.5, 2: float("nan"), 3: 0.7, 4: 0.7, 5: 0.6}
    with open_run(settings(here, steps=5, checkpoint={"every": 100, "keep": 1}), 5) as run:
        run.configure(lambda folder: {}, lambda done: {"validation/accuracy": scores[done]}, 1, "validation/accuracy")
        while not run.finish(run.done, {}):
            pass
    assert run.best == {"step": 3, "metric": "validation/accuracy", "value": 0.7}
    assert run.store.steps() == [3, 5]
    assert run.store.best().step == 3
    assert metrics(here)[1]["nonfinite"] == ["validation/accuracy"]


def test_a_best_metric_that_is_none(here):
    with (
        pytest.raises(UserError, match=r"'validation/acuracy' is no metric .*did you mean 'validation/accuracy'\?"),
        open_run(settings(here), 5) as run,
    ):
        run.configure(lambda folder: {}, lambda done: {"validation/accuracy": 1.0}, 1, "validation/acuracy")
        run.finish(0, {})


def test_a_failure_is_logged_and_the_last_checkpoint_stays(here):
    died = launch(here, die="raise:7", check=1)
    last = died.stderr.splitlines()[-1]
    assert last.startswith("run 'run' ended after 7 steps; log: runs/run/logs/attempt-001/driver.log; the same command")
    assert "checkpoint of step 6" in last
    log = (here / "runs" / "run" / "logs" / "attempt-001" / "driver.log").read_text()
    assert "the run failed after 7 steps" in log
    assert "RuntimeError: the toy broke" in log
    assert read_record(here / "runs" / "run")["status"] == "failed"


@pytest.mark.parametrize("place", ["checkpoint", "elsewhere"])
def test_a_full_disk_is_one_line_and_the_run_goes_on_later(here, place):
    full = OSError(errno.ENOSPC, "No space left on device")

    def save(folder):
        (folder / "w").write_text("w")
        if run.done == 4:
            raise full
        return {"at": run.done}

    with pytest.raises(UserError) as caught, open_run(settings(here, checkpoint={"every": 2}), 10) as run:
        run.configure(save)
        for step in range(10):
            if step == 3 and place == "elsewhere":
                raise full
            run.finish(step, {})
    assert "the disk is full" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "goes on from the checkpoint of step 2" in caught.value.__notes__[0]
    with open_run(settings(here, checkpoint={"every": 2}), 10) as run:
        assert (run.start_step, run.resumed.state) == (2, {"at": 2})
        assert not list(run.store.folder.glob("*.tmp-*"))
    assert [line["step"] for line in metrics(here)] == [1, 2]


def test_attempts_share_one_wandb_run_and_a_failed_one_is_marked(here):
    offline = {"tracking": {"wandb": "offline"}}
    with pytest.raises(ValueError, match="broken"), open_run(settings(here, **offline), 4) as run:
        train(run, 1)
        run.stop.request("save")
        run.finish(1, {"learner/x": 1})
        raise ValueError("broken")
    time.sleep(1.1)  # W&B names its folder by the second
    with open_run(settings(here, **offline), 4) as run:
        assert run.start_step == 2
        train(run, 2)
    folders = sorted(path.name for path in (run.folder / "wandb").glob("offline-run-*"))
    assert len(folders) == 2
    wandb_id = read_record(run.folder)["wandb_id"]
    assert all(name.endswith(f"-{wandb_id}") for name in folders)
    assert run.store.latest().run["wandb_id"] == wandb_id


def test_wandb_online_without_a_key_stops_before_anything_starts(here):
    done = launch(here, "tracking.wandb=online", check=2, HOME=str(here), NETRC=str(here / "none"), WANDB_API_KEY="")
    assert done.stderr.startswith("error: tracking.wandb is online, but there is no W&B key for")
    assert "ready" not in done.stdout


def test_metrics_after_the_checkpoint_and_a_torn_line_are_moved(here):
    attempt = here / "attempt"
    attempt.mkdir()
    lines = [json.dumps({"step": step}) + "\n" for step in (1, 2, 3, 4)]
    (here / "metrics.jsonl").write_text("".join(lines) + '{"step": 5, "lear')
    assert supersede_metrics(here, 2, attempt) == 3
    assert (here / "metrics.jsonl").read_text() == "".join(lines[:2])
    assert (attempt / "superseded.jsonl").read_text() == "".join(lines[2:]) + '{"step": 5, "lear\n'
    assert supersede_metrics(here, 2, attempt) == 0
    assert supersede_metrics(here / "nothing", 2, attempt) == 0


def test_logging_is_left_as_it_was(here):
    root = logging.getLogger()
    before = (list(root.handlers), root.level)
    with open_run(settings(here), 3) as run:
        logging.getLogger("somebody").info("a line of a library")
    assert (list(root.handlers), root.level) == before
    assert "INFO somebody: a line of a library" in (run.logs / "driver.log").read_text()


def test_a_job_without_steps(here):
    with open_run(settings(here)) as run:
        assert not run.finished
    first = read_record(run.folder)
    assert first["status"] == "finished"
    with open_run(settings(here), 3) as run:
        assert run.attempt == 2
    second = read_record(run.folder)
    assert second["status"] == "ended early"
    assert second["wandb_id"] == first["wandb_id"]  # kept without a checkpoint too


def test_samples_are_due_first_every_n_and_last(here):
    with open_run(settings(here, tracking={"samples_every": 4}), 10) as run:
        assert [step for step in range(10) if run.samples_due(step)] == [0, 3, 7, 9]
    with open_run(settings(here, tracking={"samples_every": 0}), 10) as run:
        assert not any(run.samples_due(step) for step in range(10))
