"""The ZeRO-3 engine: equal to one plain AdamW process, exact resume, deaths, bad numbers, bad checkpoints."""

import json
import math
import time

import pytest
import torch

from launch.config import LearnerSettings, OptimizerSettings
from launch.engine import DESCRIPTION, NonFiniteError, _require_room, check_description, deepspeed_config, lr_at
from launch.errors import UserError
from launch.group import WorkerGroup
from launch.watchdog import WorkerDied
from tests.launch.workers import Tiny, Trainer, plain_adamw

# A clip that acts on some steps only (norms are near 1), and a schedule with warm-up.
OPTIMIZER = OptimizerSettings(lr=1e-2, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1, warmup=2, clip=0.5)


@pytest.fixture(scope="module")
def pair(cluster):
    options = {"cpus": 0.45, "bundle_offset": 2, "deadline_s": 120, "name": "learner"}
    group = WorkerGroup(cluster, Trainer, 2, {"optimizer": OPTIMIZER}, **options)
    yield group
    group.kill()


def relative_error(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """‖difference‖ / ‖update‖ over all parameters."""
    start = dict(Tiny().named_parameters())
    difference = sum((got[name].double() - want[name].double()).square().sum() for name in want)
    update = sum((want[name].double() - start[name].detach().double()).square().sum() for name in want)
    return math.sqrt(difference / update)


def rates(steps: int) -> list[float]:
    return [lr_at(step, 10, OPTIMIZER) for step in range(steps)]


def test_learning_rate_at_its_knots():
    cosine = OptimizerSettings(lr=1.0, warmup=0.2, final_fraction=0.1)
    assert [lr_at(s, 10, cosine) for s in (0, 1, 2)] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert lr_at(6, 10, cosine) == pytest.approx(0.1 + 0.9 / 2)  # half way down
    assert lr_at(10, 10, cosine) == lr_at(99, 10, cosine) == pytest.approx(0.1)
    linear = OptimizerSettings(lr=1.0, warmup=3, schedule="linear")
    assert [lr_at(s, 7, linear) for s in (0, 3, 5, 7)] == pytest.approx([0.25, 1.0, 0.5, 0.0])
    constant = OptimizerSettings(lr=1.0, warmup=0, schedule="constant")
    assert {lr_at(s, 5, constant) for s in range(9)} == {1.0}
    assert lr_at(4, 5, OptimizerSettings(lr=1.0, warmup=0)) > 0  # no step is wasted on a rate of zero
    assert lr_at(0, 1, OptimizerSettings(lr=1.0, warmup=0)) == 1.0


def test_own_deepspeed_settings_are_merged_deeply():
    over = {"zero_optimization": {"overlap_comm": True}, "communication_data_type": "fp32"}
    config = deepspeed_config(OPTIMIZER, LearnerSettings(gpus=0, deepspeed=over), torch.bfloat16, 1000)
    assert config["zero_optimization"]["overlap_comm"] is True
    assert config["zero_optimization"]["stage"] == 3
    assert config["communication_data_type"] == "fp32"
    assert config["bf16"]["enabled"]


def test_two_ranks_equal_one_plain_process(pair):
    pair.call("build", OPTIMIZER)
    stats = pair.call("train", 0, 3)
    got, sizes = pair.call("weights", 4000)[0]
    want, norms = plain_adamw(OPTIMIZER, rates(3), world=2)
    assert relative_error(got, want) <= 1e-5
    assert [norm for _, norm, _ in stats[0]] == pytest.approx(norms, rel=1e-5)
    assert min(norms) > OPTIMIZER.clip  # the clip acted
    assert [rate for _, _, rate in stats[1]] == rates(3)
    assert torch.equal(got["embedding.weight"], Tiny().embedding.weight)
    assert len(sizes) > 2 and sum(sizes) == len(list(Tiny().parameters()))


def test_sharded_at_birth_without_clip(pair):
    loose = OPTIMIZER.model_copy(update={"clip": 1e6})
    pair.call("build", loose, 24, "float32", True)
    assert [name for name, _ in pair.call("shapes")[0]] == [name for name, _ in Tiny().named_parameters()]
    pair.call("train", 0, 2)
    got, _ = pair.call("weights")[0]
    want, _ = plain_adamw(loose, rates(2), world=2)
    assert relative_error(got, want) <= 1e-5
    trained, _ = pair.call("weights", 2**20, True)[1]
    experts = ["experts.0.weight", "experts.1.weight"]
    assert sorted(trained) == [*experts, "head.weight", "hidden.bias", "hidden.weight", "norm.bias", "norm.weight"]


def test_bfloat16_keeps_rotary_frequencies_in_float32(pair):
    for early in (False, True):
        pair.call("build", OPTIMIZER, 24, "bfloat16", early, {"data_types": {"buffer_dtype": "bf16"}})
        kind, values = pair.call("buffers")[0]["inv_freq"]
        assert kind == "torch.float32"
        assert torch.equal(values, Tiny().inv_freq)
        pair.call("train", 0, 1)
        got, _ = pair.call("weights")[0]
        assert got["hidden.weight"].dtype == torch.bfloat16
        if not early:  # sharded at birth, initial weights are drawn in bfloat16: others
            want, _ = plain_adamw(OPTIMIZER, rates(1), world=2)
            assert all(torch.allclose(got[name].double(), want[name], atol=1e-2, rtol=8e-3) for name in want)


def test_a_bad_loss_stops_every_rank_and_changes_nothing(pair):
    pair.call("build", OPTIMIZER)
    pair.call("train", 0, 1)
    with pytest.raises(NonFiniteError, match=r"step 1: losses that are not finite, by rank \{1: 1\}"):
        pair.call("train", 1, 2, 0.0, -1, 1)
    pair.call("train", 1, 3)  # goes on: the bad gradient is gone
    got, _ = pair.call("weights")[0]
    assert relative_error(got, plain_adamw(OPTIMIZER, rates(3), world=2)[0]) <= 1e-5


def test_resume_after_a_killed_rank_is_bit_for_bit(pair, tmp_path):
    noise = 0.1
    pair.call("build", OPTIMIZER)
    pair.call("seed", 5)
    pair.call("train", 0, 1, noise)
    pair.call("save", str(tmp_path))
    undisturbed = pair.call("train", 1, 3, noise)
    want = pair.call("weights")[1][0]

    start = time.monotonic()
    with pytest.raises(WorkerDied, match="learner rank 1 died during learner steps") as caught:
        pair.call("train", 1, 3, noise, 1, what="learner steps")
    assert time.monotonic() - start < 20
    assert caught.value.rank == 1
    with pytest.raises(RuntimeError, match="restart"):
        pair.call("weights")

    pair.restart()
    assert [state["rank"] for state in pair.call("load", str(tmp_path))] == [0, 1]
    assert pair.call("train", 1, 3, noise) == undisturbed
    got = pair.call("weights")[1][0]
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_checkpoints_that_do_not_fit_are_refused(pair, tmp_path):
    pair.call("build", OPTIMIZER)
    pair.call("save", str(tmp_path / "ours"))
    pair.call("build", OPTIMIZER, 32)
    with pytest.raises(UserError, match=r"another model: parameter embedding.weight of shape \(50, 24\) .*where .*32"):
        pair.call("load", str(tmp_path / "ours"))
    with pytest.raises(UserError, match="not a complete checkpoint"):
        pair.call("load", str(tmp_path / "nothing"))
    parameters = json.loads((tmp_path / "ours" / DESCRIPTION).read_text())["parameters"]
    with pytest.raises(UserError, match="saved by 2 learner ranks, this run has 4"):
        check_description(tmp_path / "ours", parameters, 4)
    with pytest.raises(UserError, match="8 parameters where this run has 7"):
        check_description(tmp_path / "ours", parameters[:-1], 2)


def test_a_full_disk_is_told_before_writing(tmp_path):
    with pytest.raises(UserError, match=r"needs 2.0 GiB and the disk has 1.0 GiB free; make room"):
        _require_room(tmp_path, 2 * 2**30, 2**30)


def test_one_rank_alone(cluster, pair, tmp_path):
    pair.kill()
    options = {"cpus": 0.45, "bundle_offset": 2, "deadline_s": 120, "name": "single"}
    single = WorkerGroup(cluster, Trainer, 1, {"optimizer": OPTIMIZER}, **options)
    single.call("train", 0, 2)
    single.call("save", str(tmp_path))
    single.call("train", 2, 3)
    want, _ = plain_adamw(OPTIMIZER, rates(3), world=1)
    first = single.call("weights")[0][0]
    assert relative_error(first, want) <= 1e-5
    single.call("build", OPTIMIZER)
    single.call("load", str(tmp_path))
    single.call("train", 2, 3)
    again = single.call("weights")[0][0]
    assert all(torch.equal(first[name], again[name]) for name in first)
    single.kill()
