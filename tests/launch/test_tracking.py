"""Metrics and samples: the local files, and W&B offline for real (its own log is read back)."""

import json
import math
import os
import time

import numpy as np
import pytest
import torch
from PIL import Image

from launch.config import TrackingSettings
from launch.errors import UserError
from launch.tracking import Tracker, new_wandb_id


def tracker(folder, mode="disabled", wandb_id="abcd1234"):
    settings = TrackingSettings(wandb=mode, project="toys")
    return Tracker(folder, settings, "name", "toy.train", {"block": {"lr": 0.1}}, wandb_id)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def wandb_records(folder):
    """Records of W&B's own log of an offline run, once its service process has written the last one."""
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    end = time.monotonic() + 30
    while True:
        records = read_records(path.read_bytes())
        if any(record.WhichOneof("record_type") == "exit" for record in records):
            return records
        assert time.monotonic() < end, "W&B wrote no exit record in 30 s"
        time.sleep(0.05)


def read_records(raw):
    """LevelDB's log format: blocks of 32 KB, each record with a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    at, part, found = 7, b"", []
    while at + 7 <= len(raw):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(raw[at + 4 : at + 6], "little"), raw[at + 6]
        part += raw[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(part)
            found.append(record)
            part = b""
    return found


def history(records):
    items = [record.history.item for record in records if record.WhichOneof("record_type") == "history"]
    return [{(item.key or ".".join(item.nested_key)): json.loads(item.value_json) for item in step} for step in items]


def test_one_line_a_step(tmp_path):
    log = tracker(tmp_path)
    given = {"reward/mean": torch.tensor(0.5), "learner/n": np.int64(3), "grpo/loss": 1.25, "time/step": 2}
    returned = log.log(1, given)
    log.log(2, {"grpo/loss": float("nan"), "reward/mean": math.inf, "learner/on": True})
    log.close()
    first, second = lines(tmp_path / "metrics.jsonl")
    assert returned == {"reward/mean": 0.5, "learner/n": 3, "grpo/loss": 1.25, "time/step": 2}
    assert {name: first[name] for name in given} == returned
    assert first["step"] == 1
    assert first["time"] > 1e9
    assert "nonfinite" not in first
    assert second["nonfinite"] == ["grpo/loss", "reward/mean"]
    assert second["grpo/loss"] is None
    assert second["learner/on"] == 1
    assert not (tmp_path / "wandb").exists()


@pytest.mark.parametrize("name", ["loss", "Loss/x", "/x", "x/", "step", "grpo/lo ss"])
def test_a_metric_belongs_to_a_group(tmp_path, name):
    with pytest.raises(ValueError, match="should be named group/name"):
        tracker(tmp_path).log(1, {name: 1.0})


@pytest.mark.parametrize("value", ["1", None, [1.0]])
def test_a_metric_is_one_number(tmp_path, value):
    log = tracker(tmp_path)
    with pytest.raises(TypeError, match="'grpo/loss' is a"):
        log.log(1, {"grpo/loss": value})
    log.close()
    assert (tmp_path / "metrics.jsonl").read_text() == ""


ROWS = [
    {
        "question": "how many?",
        "image": Image.new("RGB", (4, 2), (255, 0, 0)),
        "weights": np.array([0.25, 0.75]),
        "n": 1,
    },
    {"question": None, "image": None, "weights": "none", "n": 2.5, "extra": {"a": "é"}},
]


def test_samples_and_their_images(tmp_path):
    log = tracker(tmp_path)
    path = log.samples(10, ROWS)
    log.close()
    first, second = lines(path)
    assert path == tmp_path / "samples" / "step-000010.jsonl"
    assert first == {"question": "how many?", "image": "step-000010/000-image.png", "weights": [0.25, 0.75], "n": 1}
    assert second["extra"] == {"a": "é"}
    with Image.open(tmp_path / "samples" / first["image"]) as image:
        assert (image.size, image.getpixel((0, 0))) == ((4, 2), (255, 0, 0))


@pytest.mark.parametrize("failed", [False, True])
def test_wandb_offline(tmp_path, failed, monkeypatch):
    monkeypatch.delenv("WANDB_DATA_DIR", raising=False)
    log = tracker(tmp_path, "offline")
    log.log(7, {"reward/mean": 0.5, "grpo/loss": float("nan")})
    log.samples(7, ROWS)
    log.log(8, {"reward/mean": 0.75})
    assert log.url is None
    log.close(failed)
    records = wandb_records(tmp_path)
    (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert (run.run_id, run.project, run.display_name, run.job_type) == ("abcd1234", "toys", "name", "toy.train")
    assert {item.key: json.loads(item.value_json) for item in run.config.update}["block"] == {"lr": 0.1}
    steps = history(records)
    assert [(line["step"], line["reward/mean"]) for line in steps if "reward/mean" in line] == [(7, 0.5), (8, 0.75)]
    assert [line["samples.nrows"] for line in steps if "samples.nrows" in line] == [2]
    axes = [record.metric for record in records if record.WhichOneof("record_type") == "metric"]
    assert any(axis.glob_name == "*" and axis.step_metric == "step" for axis in axes)
    assert [record.exit.exit_code for record in records if record.WhichOneof("record_type") == "exit"] == [int(failed)]
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/*.json")
    assert json.loads(table.read_text())["columns"] == ["question", "image", "weights", "n", "extra"]
    # The table's images wait for a sync beside the run, not in somebody's home.
    assert any(path.is_file() and path.read_bytes()[:4] == b"\x89PNG" for path in tmp_path.glob("wandb/data/**/*"))
    assert "WANDB_DATA_DIR" not in os.environ


def test_wandb_online_without_a_key_is_one_line_and_no_question(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(UserError) as caught:
        tracker(tmp_path, "online")
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("tracking.wandb is online, but there is no W&B key for")
    assert "wandb login" in message
    assert "tracking.wandb=offline" in message


def test_wandb_online_with_a_malformed_key(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "short")
    with pytest.raises(UserError, match="the W&B key is not usable"):
        tracker(tmp_path, "online")


def test_ids_differ():
    ids = {new_wandb_id() for _ in range(50)}
    assert len(ids) == 50
    assert all(len(item) == 8 and item.isalnum() for item in ids)
