"""The `launch` command, as a process: what it prints, where, and with which status."""

import contextlib
import os
import resource
import subprocess
import threading

import pytest

from launch.config import load_config
from tests.launch import toy


@pytest.fixture
def launch(tmp_path):
    (tmp_path / "t.yaml").write_text("job: toy.train\nsteps: 4\ncheckpoint: {every: 2}\n")
    environment = toy.environment(tmp_path)

    def call(*arguments, **more):
        return subprocess.run(
            toy.command(*arguments), cwd=tmp_path, env=environment | more, capture_output=True, text=True, check=False
        )

    return call


def test_help_answers_at_once(launch):
    done = launch("--help")  # the first start compiles
    assert all(name in done.stdout for name in ("run", "jobs", "fields", "status", "verify"))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    launch("--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (
        after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5
    )  # CPU seconds: the machine is shared


def drain(screen: int, into: list[bytes]) -> None:
    """Read a terminal until its last writer has closed it."""
    with os.fdopen(screen, "rb", buffering=0) as file, contextlib.suppress(OSError):
        while part := file.read(4096):
            into.append(part)


def test_a_terminal_gets_a_bar_and_a_file_gets_lines(launch, tmp_path):
    assert "step 4/4  " in launch("run", "t.yaml").stderr
    screen, terminal = os.openpty()
    read: list[bytes] = []
    reader = threading.Thread(target=drain, args=(screen, read))
    reader.start()
    environment = toy.environment(tmp_path, TERM="xterm", COLUMNS="120")
    command = toy.command("run", "t.yaml", "name=b")
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, stderr=terminal, stdout=subprocess.DEVNULL, check=False
    )
    os.close(terminal)
    reader.join()
    shown = b"".join(read).decode()
    assert done.returncode == 0, shown
    assert "4/4" in shown
    assert "learner/x" in shown
    assert "━" in shown
    assert "checkpoint of step 2" in shown


def test_jobs_and_fields(launch):
    assert "toy.train" in launch("jobs").stdout.splitlines()
    rows = [line.split("\t") for line in launch("fields", "toy.train").stdout.splitlines()]
    assert ["block.lr", "float", "0.1", "Step size."] in rows
    assert next(row[:3] for row in rows if row[0] == "checkpoint.every") == ["checkpoint.every", "int ≥ 1", "25"]
    only = launch("fields", "toy.train", "block").stdout.splitlines()
    assert [line.split("\t")[0] for line in only] == ["block.lr", "block.decay"]
    unknown = launch("fields", "toy.trian")
    assert (unknown.returncode, unknown.stderr) == (2, "error: job 'toy.trian' is unknown; did you mean 'toy.train'?\n")


def test_dry_run_prints_a_configuration_and_starts_nothing(launch, tmp_path, monkeypatch):
    done = launch("run", "t.yaml", "block.lr=1e-5", "--dry-run")
    assert done.returncode == 0
    assert "# cpus: 1" in done.stdout
    assert "# run folder: runs/run (starts at step 0)" in done.stdout
    assert not (tmp_path / "runs").exists()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    (tmp_path / "again.yaml").write_text(done.stdout)
    assert load_config(tmp_path / "again.yaml") == load_config(tmp_path / "t.yaml", ["block.lr=1e-5"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["t.yaml", "block.dacay=1"], "error: override 'block.dacay=1': block.dacay is unknown; did you mean 'decay'?"),
        (["none.yaml"], "error: configuration file 'none.yaml' does not exist"),
        (["t.yaml", "resume=require"], "error: run folder runs/run has no checkpoint and resume is 'require'"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(launch, arguments, said):
    done = launch("run", *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(said)
    assert len(done.stderr.splitlines()) == 1


def test_a_finished_run_says_what_to_do_next(launch):
    done = launch("run", "t.yaml", "validate_every=2")
    assert done.returncode == 0
    last = done.stderr.splitlines()[-1]
    assert last == "run 'run' ended after 4 steps, best at step 4 (validation/score 0): runs/run; now `toy evaluate`"


def test_status_of_a_run_in_all_its_states(launch, tmp_path):
    nothing = launch("status", "runs/run")
    assert (nothing.returncode, nothing.stderr) == (2, "error: runs/run: is no run folder, it has no run.json\n")
    launch("run", "t.yaml", TOY_DIE="step:3")
    dead = launch("status", "runs/run").stdout
    assert "dead: its driver ended without a word" in dead
    assert "3 of 4" in dead
    assert "step 2: runs/run/checkpoints/step-000002" in dead
    assert "goes on from step 2" in dead
    launch("run", "t.yaml")
    finished = launch("status", "runs/run").stdout
    assert "finished" in finished
    assert "4 of 4" in finished
    assert "next" not in finished


def test_verify(launch, tmp_path):
    launch("run", "t.yaml")
    assert launch("verify", "runs/run").stdout.startswith("runs/run/checkpoints/step-000004: sound, step 4")
    assert "step-000002: sound, step 2" in launch("verify", "runs/run/checkpoints/step-000002").stdout
    path = tmp_path / "runs" / "run" / "checkpoints" / "step-000004" / "weights.json"
    path.write_text(path.read_text().replace("momentum", "nomentum"))  # the same length
    done = launch("verify", "runs/run")
    assert done.returncode == 2
    assert "step-000004: weights.json: checksum" in done.stderr
    assert launch("verify", "runs").stderr == "error: runs: is no complete checkpoint, it has no state.json\n"


def test_a_bug_keeps_its_trace(launch):
    done = launch("run", "t.yaml", TOY_DIE="raise:3")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-2] == "RuntimeError: the toy broke"
    assert "the same command goes on from the checkpoint of step 2" in done.stderr.splitlines()[-1]
