"""Two ZeRO-3 ranks in Ray actors against one plain process: the same groups, three optimizer steps, one result."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from launch.checkpoints import CheckpointStore
from launch.cluster import open_cluster
from launch.config import ClusterSettings, dump_config
from launch.engine import lr_at
from launch.errors import UserError
from realvr.config import RLSettings
from realvr.data.prompts import PromptBuilder
from realvr.data.sources import open_source
from realvr.learner.batching import build_micro_batch, local_counts, prepare_group
from realvr.learner.export import export_checkpoint
from realvr.learner.group import Learners
from realvr.learner.step import LearnerModule, StepSettings
from realvr.objectives.grpo import GlobalCounts
from realvr.objectives.prototypes import PrototypeBank
from realvr.policy.model import load_policy
from realvr.rollout.hf_engine import HfEngine
from realvr.rollout.records import Sampling, ScoredGroup

STEPS = 3


def settings_of(path: Path, **changes) -> RLSettings:
    return RLSettings.model_validate(
        {
            "steps": STEPS,
            "model": {"path": str(path), "dtype": "float32"},
            "latent": {"k": 4, "open": "forced"},
            "data": {"train": {"kind": "shapes", "size": 16}},
            "rollout": {"group_size": 3, "max_new_tokens": 12, "temperature": 0.8, "gpus": 0},
            "evidence": {"weight": 2.0, "negatives": 4, "bank": 6},
            "optimizer": {"lr": 1e-3, "weight_decay": 0.1},
            "learner": {"ranks": 2, "cpus": 0.5, "gpus": 0},
            "groups_per_micro_batch": 2,
        }
        | changes
    )


def scored_groups(settings: RLSettings) -> list[ScoredGroup]:
    """Seven groups: two ranks get three and four, so that one of them fills up."""
    source = open_source(settings.data.train)
    examples = [source[i] for i in range(7)]
    engine = HfEngine(settings.model, settings.latent, settings.rollout, 0)
    groups = engine.generate(examples, Sampling(3, 0.8, 1.0, 12), list(range(7)))
    engine.close()
    draw = np.random.default_rng(3)
    wrong = [("red",), ("blue", "left"), (), ("cross", "none", "7"), ("green",), (), ("square",)]
    return [
        ScoredGroup(g, {}, np.zeros(3, np.float32), draw.normal(size=3).astype(np.float32), w)
        for g, w in zip(groups, wrong, strict=True)
    ]


def plain_steps(settings: RLSettings, scored: list[ScoredGroup]) -> tuple[dict, dict, list[float]]:
    """Weights before and after, gradient norms: one micro-batch with all groups, torch's own AdamW."""
    builder = PromptBuilder(settings.model.path)
    policy = load_policy(settings.model)
    module = LearnerModule(policy, StepSettings.of(settings), builder.ids)
    trained = [p for p in module.parameters() if p.requires_grad]
    o = settings.optimizer
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in trained if p.dim() > 1], "weight_decay": o.weight_decay},
            {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
        ],
        lr=o.lr,
        betas=o.betas,
        eps=o.eps,
    )
    before = {n: p.detach().clone() for n, p in policy.checkpoint_tensors(policy.root.named_parameters())}
    bank, norms = PrototypeBank(settings.evidence.bank), []
    for step in range(STEPS):
        prompts = [builder.build(s.group.example) for s in scored]
        groups = [
            prepare_group(
                s,
                p,
                policy.visual_features(p.pixels, p.grid_thw),
                builder.tokenizer,
                builder.ids,
                settings.latent,
                settings.evidence,
            )
            for s, p in zip(scored, prompts, strict=True)
        ]
        keys = [g.scored.group.example.key for g in groups]
        bank.update(keys, torch.stack([g.positive for g in groups]))
        counts = local_counts(groups)
        batch = build_micro_batch(
            groups,
            GlobalCounts(counts["completions"], counts["tokens"], settings.rollout.max_new_tokens),
            counts["evidence_rows"],
            builder.ids,
            negatives=bank.negatives(keys, settings.evidence.negatives),
        )
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, STEPS, o)
        optimizer.zero_grad()
        module(batch)[0].backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, o.clip)))
        optimizer.step()
    after = {n: p.detach().clone() for n, p in policy.checkpoint_tensors(policy.root.named_parameters())}
    return before, after, norms


def distance(a: dict, b: dict) -> float:
    return math.sqrt(sum(float((a[n].double() - b[n].double()).square().sum()) for n in a))


def without_gradient(scored: ScoredGroup) -> ScoredGroup:
    """The same without an image to ground in and without an advantage."""
    example = replace(scored.group.example, images=(), boxes=())
    return replace(scored, group=replace(scored.group, example=example), advantages=np.zeros(3, np.float32))


def write(folder: Path, settings: RLSettings, learners: Learners) -> dict:
    """A checkpoint as a run writes it."""
    (folder / "config.yaml").write_text(dump_config(settings))
    return learners.save(folder)


def test_two_ranks_equal_one_plain_process(tiny_demo, tmp_path):
    settings = settings_of(tiny_demo)
    scored = scored_groups(settings)
    before, after, norms = plain_steps(settings, scored)
    bundles = [{"CPU": 0.5}] * 2
    with open_cluster(ClusterSettings(num_cpus=2), bundles, tmp_path / "logs") as cluster:
        learners = Learners(cluster, settings, tmp_path)
        metrics = [learners.step(step, scored)[0] for step in range(STEPS)]
        found = load_file(learners.weights().path)
        saved = CheckpointStore(tmp_path / "checkpoints").save(STEPS, lambda folder: write(folder, settings, learners))
        with pytest.raises(UserError, match="trains on nothing"):
            learners.step(STEPS, [without_gradient(s) for s in scored])
    export_checkpoint(saved.path, tmp_path / "model")
    exported = load_file(tmp_path / "model" / "model.safetensors")
    assert all(torch.equal(exported[name], tensor) for name, tensor in found.items())
    assert "latent tokens" in (tmp_path / "model" / "README.md").read_text()
    assert found.keys() == after.keys()
    assert distance(found, after) / distance(before, after) < 1e-3
    assert [m["learner/grad_norm"] for m in metrics] == pytest.approx(norms, rel=1e-4)
