"""What a user sees: help at once, and one line for everything that is wrong with a run."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from launch.cli import run_job

SAMPLES = Path(__file__).parents[1] / "samples"


def test_help_needs_no_heavy_library():
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom realvr.cli import app\n"
        "result = CliRunner().invoke(app, ['--help'])\nassert result.exit_code == 0, result.output\n"
        "assert 'Stage 2' in result.output\n"
        "heavy = {'torch', 'vllm', 'ray', 'deepspeed', 'transformers'} & set(sys.modules)\nassert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def write(folder: Path, model: Path, data: dict | None = None, **changes) -> Path:
    """A run that would be fine but for `changes`."""
    settings = {
        "job": "realvr.rl",
        "name": "bad",
        "runs_dir": str(folder / "runs"),
        "steps": 1,
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"train": data or {"kind": "shapes", "size": 8}},
        "rollout": {"prompts_per_step": 2, "gpus": 0, "cpus": 0.5},
        "learner": {"gpus": 0, "cpus": 0.5},
    }
    file = folder / "bad.yaml"
    file.write_text(yaml.safe_dump(settings | changes))
    return file


def complaint(file: Path, capsys: pytest.CaptureFixture, *overrides: str) -> str:
    """The one line that a run ends with."""
    with pytest.raises(SystemExit) as stop:
        run_job(file, overrides, expected_job="realvr.rl")
    assert stop.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    return lines[-1]


def jsonl(folder: Path, **record) -> dict:
    """A one-record set whose record is fine but for `record`."""
    shutil.copy(next(SAMPLES.rglob("*.png")), folder / "picture.png")
    good = {"id": "r1", "image": "picture.png", "question": "what is it?", "answer": "a dot"}
    (folder / "data.jsonl").write_text(json.dumps(good | record) + "\n")
    return {"kind": "jsonl", "path": str(folder / "data.jsonl"), "box_space": "pixel"}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout.temprature=1", ["rollout.temprature", "temperature"]),
        ("rollout.group_size=1", ["rollout.group_size", "1"]),
        ("model.dtype=float16", ["model.dtype", "float16", "bfloat16"]),
        ("validation.metric=validation/acuracy", ["validation/acuracy", "validation/accuracy"]),
        ("rewards=[{function: realvr.rewards.rewards.acuracy}]", ["acuracy"]),
        ("rewards=[{function: nowhere.f}]", ["nowhere.f", "local"]),
        ("rollout.max_new_tokens=9", ["max_new_tokens", "latent.k 8"]),
        ("learner.ranks=1000", ["too few CPUs", "500.5", "learner.ranks"]),
    ],
)
def test_bad_settings(override, words, tmp_path, tiny_demo, capsys):
    line = complaint(write(tmp_path, tiny_demo), capsys, override)
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"image": "gone.png"}, ["gone.png", "r1"]),
        ({"image": "data.jsonl"}, ["data.jsonl", "r1"]),
        ({"boxes": [[0, 0, 9000, 9000]]}, ["r1", "9000"]),
        ({"question": "what is <|lvr|>?"}, ["r1", "<|lvr|>"]),
        ({"answer": "a <|im_end|>"}, ["r1", "<|im_end|>"]),
    ],
)
def test_bad_records(record, words, tmp_path, tiny_demo, capsys):
    line = complaint(write(tmp_path, tiny_demo, jsonl(tmp_path, **record)), capsys)
    assert all(word in line for word in words), line


def test_checkpoint_without_latent_tokens(tmp_path, tiny_demo, capsys):
    bare = tmp_path / "bare"
    shutil.copytree(tiny_demo, bare)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (bare / name).read_text()
        (bare / name).write_text(text.replace("<|lvr_end|>", "<|something|>"))
    line = complaint(write(tmp_path, bare), capsys)
    assert "<|lvr_end|>" in line and str(bare) in line


def test_wandb_online_without_a_key(tmp_path, tiny_demo, capsys, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    line = complaint(write(tmp_path, tiny_demo), capsys, "tracking.wandb=online")
    assert "wandb login" in line and "tracking.wandb=offline" in line
