"""The whole loop on real Ray, vLLM and ZeRO-3: killed with -9 and started again, it equals an undisturbed run."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
STEPS = 4


def config(folder: Path, model: Path, name: str, **changes) -> Path:
    """A run of four steps on a random tiny model; a checkpoint every second step."""
    settings = {
        "job": "realvr.rl",
        "name": name,
        "runs_dir": str(folder / "runs"),
        "steps": STEPS,
        "model": {"path": str(model), "dtype": "float32"},
        "latent": {"k": 4, "open": "forced"},
        "data": {
            "train": {"kind": "shapes", "size": 40, "seed": 1},
            "validation": {"kind": "shapes", "size": 16, "seed": 2},
            "validation_size": 8,
        },
        "rollout": {
            "prompts_per_step": 6,
            "group_size": 4,
            "temperature": 1.0,
            "max_new_tokens": 12,
            "cpus": 0.5,
            "gpus": 0,
            "engine_args": {"max_model_len": 128, "max_num_seqs": 64, "max_num_batched_tokens": 2048},
        },
        "rewards": [
            {"function": "tests.realvr.train.local_rewards.low_bytes", "local": True},
            {"function": "realvr.rewards.rewards.format"},
        ],
        "evidence": {"negatives": 4, "bank": 8},
        "optimizer": {"lr": 1e-3},
        "learner": {"ranks": 2, "cpus": 0.5, "gpus": 0},
        "groups_per_micro_batch": 2,
        "validation": {"every": 2, "metric": "validation/closed_span_rate"},
        "checkpoint": {"every": 2},
        "tracking": {"samples_every": 2, "wandb": "offline"},
    } | changes
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(settings))
    return file


def start(file: Path, *overrides: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "realvr.cli", "rl", str(file), *overrides]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen) -> str:
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    return output


def metrics(run: Path) -> list[dict]:
    """metrics.jsonl without what depends on the clock."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    timed = ("time", "rollout/tokens_per_second")
    return [{k: v for k, v in line.items() if k not in timed and not k.startswith("time/")} for line in lines]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, tiny_demo) -> Path:
    """The run that nobody disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    finish(start(config(folder, tiny_demo, "whole")))
    return folder / "runs" / "whole"


def test_a_run_trains_and_leaves_everything(whole):
    lines = metrics(whole)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for line in lines:
        assert line["grpo/logprob_gap_max"] < 1e-4, "rollout and learner disagree on log-probabilities"
        assert line["rollout/latent_drift_abs_max"] < 1e-3, "regenerated latents differ from those of the rollout"
        assert line["evidence/distinct_negatives"] == 4
        assert line["learner/grad_norm"] > 0
        assert line["reward/zero_variance_groups"] < 1
    assert "validation/closed_span_rate" in lines[1] and "validation/closed_span_rate" not in lines[0]
    assert (whole / "checkpoints" / "latest").read_text().strip() == "step-000004"
    rows = [json.loads(line) for line in (whole / "samples" / "step-000002.jsonl").read_text().splitlines()]
    assert len(rows) == 3 * 4 and len(rows[0]["weights"]) == 4
    assert (whole / "samples" / rows[0]["image"]).exists()
    assert list(whole.glob("wandb/offline-run-*"))


def test_every_metric_is_explained(whole):
    page = (ROOT / "docs" / "metrics.md").read_text()
    own = {"reward/low_bytes"}
    for name in {name for line in metrics(whole) for name in line} - {"step"} - own:
        general = re.sub(r"gap_\d+$", "gap_<t>", name)
        assert f"`{general}`" in page or f"`{general.split('/')[0]}/<name>`" in page, name


def test_killed_driver_resumes_to_the_same_metrics(whole, tmp_path, tiny_demo):
    file = config(tmp_path, tiny_demo, "killed")
    run = tmp_path / "runs" / "killed"
    process = start(file)
    deadline = time.monotonic() + 300
    while not (run / "metrics.jsonl").exists() or len((run / "metrics.jsonl").read_text().splitlines()) < 3:
        assert process.poll() is None and time.monotonic() < deadline, process.stdout.read()
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)  # after step 3, whose checkpoint is that of step 2
    process.wait()
    wandb_id = json.loads((run / "run.json").read_text())["wandb_id"]
    output = finish(start(file))
    assert "goes on" in output
    assert metrics(run) == metrics(whole)
    record = json.loads((run / "run.json").read_text())
    assert record["wandb_id"] == wandb_id and record["attempts"] == 2


def test_rollouts_are_kept_and_replayed(whole, tmp_path, tiny_demo):
    """`rollout-only` writes what the first step of a whole run sampled; `replay` trains on it to the same step."""
    kept = config(tmp_path, tiny_demo, "kept", steps=1, debug="rollout-only")
    finish(start(kept))
    again = config(tmp_path, tiny_demo, "again", steps=1, debug="replay", replay_from=str(tmp_path / "runs" / "kept"))
    finish(start(again, "validation.every=0"))
    (line,) = metrics(tmp_path / "runs" / "again")
    first = metrics(whole)[0]
    assert line["reward/mean"] == first["reward/mean"]
    assert line["grpo/entropy"] == pytest.approx(first["grpo/entropy"], abs=1e-12)
    assert line["evidence/loss"] == pytest.approx(first["evidence/loss"], abs=1e-12)
