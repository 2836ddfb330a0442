"""The time limit: a run stops while a step and a save still fit, by measured times, and says which lead that takes."""

import json
import signal
import subprocess
import time

import pytest

from launch.config import LimitSettings
from launch.limits import END_VARIABLE, LEAD_VARIABLE, WallClock
from launch.run_folder import read_record
from launch.runs import open_run
from launch.signals import StopFlag, ask
from tests.launch import toy


def test_the_limit_counts_from_the_start_or_from_the_scheduler_whichever_comes_first():
    assert WallClock(LimitSettings(), {}, now=100).end is None
    assert WallClock(LimitSettings(wall_clock_s=50), {}, now=100).end == 150
    assert WallClock(LimitSettings(), {END_VARIABLE: "170"}, now=100).end == 170
    assert WallClock(LimitSettings(wall_clock_s=50), {END_VARIABLE: "170"}, now=100).end == 150
    assert WallClock(LimitSettings(wall_clock_s=90), {END_VARIABLE: "170"}, now=100).end == 170


def test_the_lead_is_measured():
    clock = WallClock(LimitSettings(wall_clock_s=1000), {}, now=0)
    clock.step(10)
    clock.step(40)
    assert clock.saved(20)
    assert not clock.saved(5)
    assert (clock.needed, clock.lead) == (60, 120)
    assert clock.reason(now=879) is None
    assert clock.reason(now=881) == "the time limit: 1 m 59 s are left, 2 m 00 s are kept for a step and a save"
    for _ in range(10):  # the slow first steps are forgotten
        clock.step(2)
    assert clock.needed == 22


def test_a_given_lead_stands_whatever_is_measured():
    clock = WallClock(LimitSettings(wall_clock_s=1000, save_before_s=300), {}, now=0)
    clock.step(400)
    assert clock.reason(now=699) is None
    assert clock.reason(now=701)


@pytest.mark.parametrize(("announced", "enough"), [("61", True), ("59", False)])
def test_the_schedulers_lead_is_judged(announced, enough):
    clock = WallClock(LimitSettings(), {LEAD_VARIABLE: announced}, now=0)
    clock.step(40)
    clock.saved(20)
    text, verdict = clock.report()
    assert verdict == enough
    assert text.startswith("a stop needs 1 m 00 s (slowest step 40 s, save 20 s)")
    assert ("raise signal_lead_s of the profile to 120" in text) != enough


def test_a_run_stops_before_its_limit_and_asks_to_go_on(tmp_path):
    (tmp_path / "t.yaml").write_text("job: toy.train\nsteps: 500\nstep_s: 0.2\ncheckpoint: {every: 1000}\n")
    limits = ["limits.wall_clock_s=6", "limits.save_before_s=3"]
    begun = time.monotonic()
    done = subprocess.run(
        toy.command("run", "t.yaml", *limits),
        cwd=tmp_path,
        env=toy.environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 75, done.stderr
    assert time.monotonic() - begun < 30
    record = read_record(tmp_path / "runs" / "run")
    assert record["status"] == "stopped"
    assert f"stopped after {record['done']} steps (the time limit:" in done.stderr
    assert f"saved in runs/run/checkpoints/step-{record['done']:06d}" in done.stderr
    assert "a stop needs" in done.stderr
    assert json.loads((tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()[-1])["step"] == record["done"] > 0


def test_who_wants_a_stop_says_whether_the_run_should_go_on(tmp_path):
    with StopFlag(tmp_path) as stop:
        ask(tmp_path / "STOP", "somebody")
        assert (stop.reason(), stop.again) == ("somebody", False)
    with StopFlag(tmp_path) as stop:
        ask(tmp_path / "STOP", "SIGUSR1 at the batch shell", again=True)
        assert (stop.reason(), stop.again) == ("SIGUSR1 at the batch shell", True)
    with StopFlag() as stop:
        signal.raise_signal(signal.SIGINT)
        assert not stop.again
    with StopFlag() as stop:
        signal.raise_signal(signal.SIGUSR1)
        assert stop.again


def test_a_worker_that_is_signalled_asks_for_the_run(tmp_path):
    from launch.group import _ask_for_a_stop

    with open_run(toy.ToySettings(runs_dir=str(tmp_path)), 10) as run:
        run.configure(lambda folder: {})
        assert not run.finish(0, {})
        _ask_for_a_stop(signal.SIGUSR1, None)  # what a worker's handler does
        assert run.finish(1, {})
    assert run.stop.again
    assert run.stopped.startswith("SIGUSR1 at process")
