"""Stage 1: what a lesson teaches, the loss against a plain reference, free running, ranks, resume, guards."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from launch.cli import start_job
from launch.config import OptimizerSettings
from launch.errors import UserError
from realvr.config import RolloutSettings, SftSettings
from realvr.data.examples import Box, Example
from realvr.data.prompts import PromptBuilder
from realvr.data.sources import open_source
from realvr.families.base import VisualFeatures
from realvr.policy.model import Policy, load_policy
from realvr.rollout.hf_engine import HfEngine
from realvr.rollout.records import Sampling
from realvr.train.sft import SftData, _alone, extension_lr, is_over
from realvr.train.sft_worker import SftWorker
from realvr.train.teacher import Lesson, build_lesson, collate, counts, lesson_loss

CPU = torch.device("cpu")


def settings(path: Path, **changes) -> SftSettings:
    values = {
        "steps": 3,
        "model": {"path": str(path), "dtype": "float32", "min_visual_tokens": 4},
        "latent": {"k": 3},
        "data": {
            "train": {"kind": "shapes", "size": 24},
            "validation": {"kind": "shapes", "size": 6, "seed": 5},
        },
        "examples_per_step": 5,
        "examples_per_micro_batch": 2,
        "optimizer": {"lr": 1e-3},
        "learner": {"gpus": 0, "cpus": 0.5},
        "validation": {"every": 0},
        "validation_batch": 4,
        "max_new_tokens": 12,
        "checkpoint": {"every": 100},
    }
    return SftSettings.model_validate(values | changes)


def examples(wanted: SftSettings) -> list[Example]:
    """Ragged: one box, two boxes (one small), no box, questions of several lengths, no image."""
    plain = open_source(wanted.data.train)[:3]
    two = replace(plain[0], id="two", boxes=(Box((0, 0, 0.5, 0.5)), Box((0.8, 0.8, 1, 1))), answer="red and blue")
    none = replace(plain[1], id="none", boxes=(), question="How many shapes are there in this picture?", answer="three")
    text = Example(id="text", images=(), question="what is two?", answer="2")
    return [*plain, two, none, text]


def lessons_of(wanted: SftSettings, policy: Policy, builder: PromptBuilder) -> list[Lesson]:
    found = []
    for example in examples(wanted):
        prompt = builder.build(example)
        if prompt.pixels is None:
            width = policy.root.language_model.config.hidden_size
            features = VisualFeatures(torch.zeros(0, width, dtype=policy.root.lm_head.weight.dtype))
        else:
            features = policy.visual_features(prompt.pixels, prompt.grid_thw)
        found.append(build_lesson(example, prompt, features, builder.tokenizer, builder.ids, wanted))
    return found


def test_a_lesson_is_spans_newline_tagged_answer_eos(tiny_demo: Path):
    wanted = settings(tiny_demo)
    builder, policy = PromptBuilder(str(tiny_demo)), load_policy(wanted.model)
    ids = builder.ids
    one, _, _, two, none, text = lessons_of(wanted, policy, builder)
    spans = builder.tokenizer.decode(two.completion)
    first, second = "<|lvr_start|>" + "<|lvr|>" * 4 + "<|lvr_end|>", "<|lvr_start|><|lvr|><|lvr_end|>"
    assert spans == f"{first}{second}\n<answer>red and blue</answer><|im_end|>"
    assert two.sources.tolist() == [0, 1, 4, 5, 15]
    assert none.sources.tolist() == list(range(16))
    assert builder.tokenizer.decode(text.completion) == "<answer>2</answer><|im_end|>"
    for lesson in (one, two, none, text):
        assert torch.equal(lesson.supervised, lesson.completion != ids.latent)
    resampled = lessons_of(settings(tiny_demo, roi_tokens="k", newline=False), policy, builder)
    assert [len(lesson.sources) for lesson in resampled] == [3, 3, 3, 6, 3, 0]
    assert "\n" not in builder.tokenizer.decode(resampled[3].completion)


def test_a_share_of_examples_goes_untagged(tiny_demo: Path):
    wanted = settings(tiny_demo, untagged=0.3)
    builder, policy = PromptBuilder(str(tiny_demo)), load_policy(wanted.model)
    source = open_source(wanted.data.train.model_copy(update={"size": 400}))
    prompt = builder.build(source[0])
    features = policy.visual_features(prompt.pixels, prompt.grid_thw)
    written = [build_lesson(e, prompt, features, builder.tokenizer, builder.ids, wanted) for e in source]
    bare = [lesson for lesson in written if "<answer>" not in builder.tokenizer.decode(lesson.completion)]
    assert 0.2 < len(bare) / 400 < 0.4
    assert builder.tokenizer.decode(bare[0].completion).endswith(f"\n{bare[0].example.answer}<|im_end|>")


def reference(policy: Policy, lessons: list[Lesson], builder: PromptBuilder, weight: float) -> torch.Tensor:
    """Loss of the lessons one by one, unpadded, with transformers' own mask and explicit loops."""
    root, ce, mse, tokens, elements = policy.root, 0.0, 0.0, 0, 0
    for lesson in lessons:
        prompt, n = lesson.prompt, len(lesson.prompt.input_ids)
        ids = torch.cat([prompt.input_ids, lesson.completion])
        embeds = root.embed(ids).clone()
        embeds[:n][prompt.visual_mask] = lesson.features.embeds
        targets = lesson.features.embeds[lesson.sources]
        latents = (ids == builder.ids.latent).nonzero()[:, 0].tolist()
        for place, target in zip(latents, targets, strict=True):
            embeds[place] = target
        after = prompt.next_position + torch.arange(len(lesson.completion)).expand(3, -1)
        visual = torch.cat([prompt.visual_mask, torch.zeros(len(lesson.completion), dtype=torch.bool)])
        states = root.language_model(
            inputs_embeds=embeds[None],
            position_ids=torch.cat([prompt.positions, after], 1)[:, None],
            use_cache=False,
            **policy.family.language_inputs(lesson.features, visual[None]),
        ).last_hidden_state[0]
        for i in range(n, len(ids)):
            if ids[i] != builder.ids.latent:
                ce = ce + cross_entropy(states[i - 1] @ root.lm_head.weight.t(), ids[i])
                tokens += 1
        for place, target in zip(latents, targets, strict=True):
            mse = mse + (states[place - 1] - target).square().sum()
            elements += len(target)
    return ce / tokens + weight * mse / elements


@pytest.mark.parametrize("family", ["tiny_qwen25", "tiny_qwen3"])
@pytest.mark.parametrize("recompute", [False, True])
def test_padded_micro_batches_equal_a_plain_reference(family: str, recompute: bool, request: pytest.FixtureRequest):
    """Loss and every gradient: padding, the state one earlier, global normalisers, checkpointing."""
    wanted = settings(request.getfixturevalue(family))
    builder, policy = PromptBuilder(wanted.model.path), load_policy(wanted.model)
    policy.root.double(), policy.tower.double()
    lessons = lessons_of(wanted, policy, builder)
    total = counts(lessons)
    expected = reference(policy, lessons, builder, 0.1)
    expected.backward()
    wanted_grads = {n: p.grad.clone() for n, p in policy.root.named_parameters() if p.grad is not None}
    policy.root.zero_grad()
    loss = 0.0
    for part in (lessons[:4], lessons[4:]):
        batch = collate(part, builder.ids, total, CPU)
        value, sums = lesson_loss(policy.root, policy.family, batch, 0.1, recompute)
        value.backward()
        loss += value.item()
        assert float(sums["mse_sum"]) > 0
    # transformers computes RMSNorm in float32: agreement ends there.
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    for name, grad in wanted_grads.items():
        ours = policy.root.get_parameter(name).grad
        assert (ours - grad).norm() <= 1e-5 * (grad.norm() + 1e-6), name


def test_latents_change_the_text_loss_and_their_ids_do_not(tiny_demo: Path):
    wanted = settings(tiny_demo)
    builder, policy = PromptBuilder(str(tiny_demo)), load_policy(wanted.model)
    lesson = lessons_of(wanted, policy, builder)[0]
    batch = collate([lesson], builder.ids, counts([lesson]), CPU)

    def ce(b) -> float:
        return float(lesson_loss(policy.root, policy.family, b, 0.1, False)[1]["ce_sum"])

    assert ce(replace(batch, targets_Md=batch.targets_Md + 1)) != pytest.approx(ce(batch), rel=1e-4)
    other_ids = batch.ids_BT.masked_fill(batch.latent_BT, builder.ids.end)
    assert ce(replace(batch, ids_BT=other_ids)) == ce(batch)
    assert int((batch.labels_BT == builder.ids.latent).sum()) == 0
    assert {builder.ids.start, builder.ids.end} <= set(batch.labels_BT.flatten().tolist())


def test_one_micro_batch_or_several_and_a_filler(tiny_demo: Path):
    wanted = settings(tiny_demo)
    builder, policy = PromptBuilder(str(tiny_demo)), load_policy(wanted.model)
    lessons = lessons_of(wanted, policy, builder)

    def loss(part: list[Lesson], real: bool = True) -> float:
        batch = collate(part, builder.ids, counts(lessons), CPU, real)
        return float(lesson_loss(policy.root, policy.family, batch, 0.1, False)[0])

    assert loss(lessons) == pytest.approx(sum(loss([lesson]) for lesson in lessons), rel=1e-5)
    assert loss(lessons[:1], real=False) == 0.0


@pytest.mark.parametrize("close", ["free", "forced"])
def test_free_running_equals_the_reference_engine(tiny_demo: Path, close: str):
    """Greedy completions and latents of `validate`'s free run against the short obvious loop."""
    wanted = settings(tiny_demo, latent={"k": 3, "open": "forced", "close": close})
    source = open_source(wanted.data.train)[:5]
    engine = HfEngine(wanted.model, wanted.latent, RolloutSettings(gpus=0), 0)
    groups = engine.generate(source, Sampling(n=1, temperature=0.0, max_new_tokens=12), [0] * 5)
    with _alone():
        worker = SftWorker(wanted)
        run = worker.free_run(worker._lessons(source))
    for group, row, latents in zip(groups, run.tokens_BN.tolist(), run.latents_BKd, strict=True):
        rollout = group.rollouts[0]
        assert row[: len(rollout.tokens)] == rollout.tokens.tolist()
        torch.testing.assert_close(latents, torch.as_tensor(rollout.latents[:3]), atol=1e-4, rtol=1e-3)
    assert ((run.right_B >= 0) & (run.right_B <= 1)).all() and not torch.equal(run.right_B, run.swapped_B)


def job(wanted: SftSettings, folder: Path, **changes) -> list[dict]:
    config = folder / "sft.yaml"
    config.write_text(json.dumps(wanted.model_copy(update=changes).model_dump(mode="json")))
    start_job(config)
    name = changes.get("name", wanted.name)
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def test_two_ranks_equal_one_process(tiny_demo: Path, tmp_path: Path):
    """Three ZeRO-3 steps on ragged shares (3 and 2 examples): losses, gradient norms, weights, validation."""
    wanted = settings(tiny_demo, runs_dir=str(tmp_path), validation={"every": 3}, cluster={"num_cpus": 2})
    one = job(wanted, tmp_path, name="one")
    two = job(wanted, tmp_path, name="two", learner=wanted.learner.model_copy(update={"ranks": 2}))
    for a, b in zip(one, two, strict=True):
        for name in ("sft/loss", "sft/ce", "sft/mse", "sft/tokens", "learner/grad_norm"):
            assert a[name] == pytest.approx(b[name], rel=1e-4), name
    for name in ("accuracy", "closed_span_rate", "cosine", "probability"):
        assert one[-1][f"validation/{name}"] == pytest.approx(two[-1][f"validation/{name}"], abs=1e-4)
    before, ours, theirs = (
        load_file(f / "model.safetensors") for f in (tiny_demo, tmp_path / "one/model", tmp_path / "two/model")
    )
    update = sum((ours[n] - before[n]).square().sum() for n in before).sqrt()
    assert update > 0
    assert sum((ours[n] - theirs[n]).square().sum() for n in before).sqrt() <= 1e-3 * update
    assert all(torch.equal(ours[n], before[n]) for n in before if "visual" in n)  # the tower is frozen


def test_a_stopped_run_goes_on_as_if_it_had_not(tiny_demo: Path, tmp_path: Path):
    wanted = settings(tiny_demo, runs_dir=str(tmp_path), steps=4)
    whole = job(wanted, tmp_path, name="whole")
    wanted_b = wanted.model_copy(update={"name": "b", "checkpoint": wanted.checkpoint.model_copy(update={"every": 1})})
    from launch.runs import open_run
    from realvr.train.sft import run_sft

    with open_run(wanted_b, 4) as run:
        run.stop.request("a test")
        run_sft(wanted_b, run)
    assert run.stopped and run.done == 1 and not (tmp_path / "b" / "model").exists()
    resumed = job(wanted_b, tmp_path, name="b")
    assert [line["step"] for line in resumed] == [1, 2, 3, 4]
    for a, b in zip(whole, resumed, strict=True):
        assert a["sft/loss"] == b["sft/loss"] and a["learner/lr"] == b["learner/lr"]
    assert (tmp_path / "b" / "model" / "config.json").exists()


class Plan:
    """A run's counter of planned steps."""

    total_steps = 0

    def plan(self, total: int) -> None:
        self.total_steps = total


def test_stage_one_is_extended_until_the_guards_hold_and_no_longer(tiny_demo: Path):
    extension = {"max_steps": 5, "round_steps": 2, "lr_fraction": 0.5, "min_cosine": 0.5, "min_drop": 0.1}
    wanted = settings(tiny_demo, steps=3, extension=extension, optimizer=OptimizerSettings(lr=1.0))
    found = {3: (0.4, 0.2), 5: (0.6, 0.05), 7: (0.6, 0.2)}
    asked, run = [], Plan()

    def judge(done: int) -> dict[str, float]:
        asked.append(done)
        return {"validation/cosine": found[done][0], "validation/replacement_drop": found[done][1]}

    assert [is_over(wanted, run, done, judge) for done in range(1, 8)] == [False] * 6 + [True]
    assert asked == [3, 5, 7] and run.total_steps == 7
    assert [extension_lr(wanted, step) for step in range(2, 6)] == [None, 0.5, 0.25, 0.5]
    never = dict.fromkeys(found, (0.0, 0.0))
    found.update(never)
    assert is_over(wanted, run, 7, judge) is False and run.total_steps == 8
    assert is_over(wanted, run, 8, judge) is True and run.total_steps == 8
    assert is_over(settings(tiny_demo, steps=3), run, 3, judge) is True


def test_settings_that_do_not_fit_are_told(tiny_demo: Path):
    with pytest.raises(UserError, match="examples_per_step is 1"):
        SftData.open(settings(tiny_demo, examples_per_step=1, learner={"ranks": 2, "gpus": 0}))
    with pytest.raises(UserError, match=r"data\.validation"):
        data = {"train": {"kind": "shapes", "size": 8}}
        SftData.open(settings(tiny_demo, extension={"max_steps": 5}, data=data))
