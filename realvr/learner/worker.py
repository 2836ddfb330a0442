"""One learner rank: the engine, the frozen tower and the prototype bank; a step on this rank's share of a batch."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist

from launch.errors import UserError
from realvr.config import RLSettings
from realvr.data.prompts import Prompt
from realvr.families.base import VisualFeatures
from realvr.learner import statistics
from realvr.learner.batching import (
    LearnerGroup,
    MicroBatch,
    build_micro_batch,
    filler,
    latent_sums,
    local_counts,
    plan_micro_batches,
    prepare_group,
)
from realvr.learner.rank import engine_of, join
from realvr.learner.samples import sample_rows
from realvr.learner.step import LearnerModule, StepSettings
from realvr.objectives.grpo import GlobalCounts
from realvr.objectives.prototypes import PrototypeBank
from realvr.policy.model import load_policy
from realvr.rollout.records import Group, ScoredGroup
from realvr.rollout.weights_file import write_weights

SAMPLES = 4  # groups in a table of samples, from rank 0
OF_GRPO = {"clip_fraction", "tis_capped", "kl", "entropy", "logprob_gap", "logprob_gap_max", "grpo_loss", "loss_tokens"}
OF_ROLLOUT = {"latent_drift", "latent_drift_abs_max"}


class LearnerWorker:
    """Built in a Ray actor by `Learners`; every method is collective: all ranks are called together."""

    def __init__(self, settings: RLSettings) -> None:
        self.settings = settings
        self.device, self.builder, self.policy = join(settings)
        self.width = self.policy.root.language_model.config.hidden_size
        reference = None
        if settings.grpo.beta > 0 and settings.model.lora is None:
            reference = load_policy(settings.model, self.device).root
        self.module = LearnerModule(self.policy, StepSettings.of(settings), self.builder.ids, reference)
        self.engine = engine_of(self.module, self.policy, settings)
        self.bank = PrototypeBank(settings.evidence.bank)
        self.idle = 0  # steps in a row without any gradient
        self.trainer: Any = None

    def step(self, scored: Sequence[ScoredGroup], samples: bool) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Train on this rank's groups: metrics (equal on all ranks), and rows for the table of samples (rank 0)."""
        groups = self._prepare(scored)
        counts, evidence_rows = self._global_counts(groups)
        self._fill_bank(groups)
        latent_mean = self._latent_mean(groups)
        found, weights = [], {}
        for chosen in self._plan(groups):
            batch = self._micro_batch(chosen, counts, evidence_rows, latent_mean)
            loss, sums = self.engine(batch)
            self.engine.backward(loss)
            found.append(sums)
            if samples and self.module.weights_BK is not None:
                weights |= {id(g): w for g, w in zip(chosen, self.module.weights_BK.tolist(), strict=True)}
        done = self.engine.step()
        metrics = self._metrics(statistics.combine(found))
        metrics |= {"learner/grad_norm": done.grad_norm, "learner/lr": done.lr, "learner/idle": float(self.idle > 0)}
        rows = []
        if samples and dist.get_rank() == 0:
            shown = groups[:SAMPLES]
            rows = sample_rows(shown, [weights.get(id(g)) for g in shown], self.builder)
        return metrics, rows

    def write_weights(self, path: str) -> str:
        """Gather the model, adapters merged, on rank 0 and write it to `path`; returns the checksum (rank 0)."""
        tensors = self._whole_tensors()
        if dist.get_rank() == 0:
            return write_weights(path, dict(self.policy.checkpoint_tensors(tensors)))
        for _ in tensors:  # gathering is collective
            pass
        return ""

    def send_weights(self, actors: Sequence[Any], version: int) -> None:
        """Send the model to the rollout actors through vLLM's own back end (`rollout.sync: nccl | ipc`)."""
        from realvr.learner.native_sync import ActorClient, PolicySource, open_trainer

        rollout = self.settings.rollout
        client = ActorClient(actors, self.settings.cluster.step_deadline_s)
        if self.trainer is None:
            source = PolicySource(self.policy, self.engine)
            self.trainer = open_trainer(rollout.sync, dist.get_rank(), client, source, rollout.tensor_parallel)
        self.trainer.send_weights()
        if dist.get_rank() == 0:
            client.update_version(version)

    def save(self, folder: str) -> None:
        """Shards, optimizer, random states and the bank of every rank."""
        self.engine.save(Path(folder) / "learner", {"bank": self.bank.state_dict(), "idle": self.idle})

    def load(self, folder: str) -> None:
        """Continue from `save`."""
        state = self.engine.load(Path(folder) / "learner")
        self.bank.load_state_dict(state["bank"])
        self.idle = state["idle"]

    def _prepare(self, scored: Sequence[ScoredGroup]) -> list[LearnerGroup]:
        full = [replace(s, group=_with_latents(s.group)) for s in scored]
        prompts = [self.builder.build(s.group.example) for s in full]
        settings, builder = self.settings, self.builder
        return [
            prepare_group(s, p, f, builder.tokenizer, builder.ids, settings.latent, settings.evidence)
            for s, p, f in zip(full, prompts, self._features(prompts), strict=True)
        ]

    def _features(self, prompts: Sequence[Prompt]) -> Iterator[VisualFeatures]:
        """Frozen-tower features of each prompt's images, `groups_per_micro_batch` prompts at a time."""
        size = self.settings.groups_per_micro_batch
        for at in range(0, len(prompts), size):
            part = prompts[at : at + size]
            seen = [p for p in part if p.pixels is not None]
            if seen:
                pixels, grids = torch.cat([p.pixels for p in seen]), torch.cat([p.grid_thw for p in seen])
                whole = self.policy.visual_features(pixels, grids)
            empty = VisualFeatures(torch.zeros(0, self.width, dtype=getattr(torch, self.settings.model.dtype)))
            start = 0
            for prompt in part:
                count = sum(prompt.image_counts)
                if not count:
                    yield empty
                    continue
                rows = slice(start, start + count)
                yield VisualFeatures(whole.embeds[rows], tuple(level[rows] for level in whole.deepstack))
                start += count

    def _global_counts(self, groups: Sequence[LearnerGroup]) -> tuple[GlobalCounts, int]:
        """Normalisers over all ranks. UserError when too many batches in a row have no gradient term."""
        local = local_counts(groups)
        moving = sum(bool(g.scored.advantages.any()) for g in groups)
        sums = torch.tensor([local["completions"], local["tokens"], local["evidence_rows"], moving], device=self.device)
        dist.all_reduce(sums)
        completions, tokens, evidence_rows, moving = sums.tolist()
        learning = moving or (self.settings.evidence.weight and evidence_rows)
        self.idle = 0 if learning else self.idle + 1
        if self.idle > self.settings.max_idle_steps:
            raise UserError(
                f"step {self.idle} in a row that trains on nothing: {completions} completions, alike in reward inside "
                "each group, and no row for the evidence loss; the data is too easy or too hard: mix its difficulty, "
                "raise rollout.temperature, set evidence.weight, or allow it by max_idle_steps"
            )
        return GlobalCounts(completions, tokens, self.settings.rollout.max_new_tokens), evidence_rows

    def _fill_bank(self, groups: Sequence[LearnerGroup]) -> None:
        """Give every rank's bank the shared prototypes of the global batch, in rank order."""
        evidence = self.settings.evidence
        if not (evidence.weight and evidence.negatives):
            return
        own = [(g.scored.group.example.key, _shared(g.positive)) for g in groups if g.positive is not None]
        everyone: list[list] = [None] * dist.get_world_size()  # type: ignore[list-item]
        dist.all_gather_object(everyone, own)
        pairs = [pair for part in everyone for pair in part]
        if pairs:
            self.bank.update([key for key, _ in pairs], torch.stack([prototype for _, prototype in pairs]))

    def _latent_mean(self, groups: Sequence[LearnerGroup]) -> torch.Tensor | None:
        if self.settings.evidence.routing != "causal":
            return None
        total, number = (x.to(self.device) for x in latent_sums(groups, self.settings.latent.k, self.width))
        dist.all_reduce(total)
        dist.all_reduce(number)
        return total / number.clamp(min=1)[:, None]

    def _plan(self, groups: Sequence[LearnerGroup]) -> list[list[LearnerGroup]]:
        """Micro-batches of this rank, as many as the fullest rank has: an emptier one fills up with fillers."""
        plan = [[groups[i] for i in part] for part in plan_micro_batches([g.width for g in groups], self._per_batch)]
        most = torch.tensor([len(plan)], device=self.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        empty = filler(self.builder.ids, self.width, getattr(torch, self.settings.model.dtype))
        return plan + [[empty]] * (int(most) - len(plan))

    @property
    def _per_batch(self) -> int:
        return self.settings.groups_per_micro_batch

    def _micro_batch(
        self, chosen: Sequence[LearnerGroup], counts: GlobalCounts, evidence_rows: int, latent_mean: torch.Tensor | None
    ) -> MicroBatch:
        wanted = self.settings.evidence.negatives if self.settings.evidence.weight else 0
        negatives = None
        if wanted and len(self.bank):
            negatives = self.bank.negatives([g.scored.group.example.key for g in chosen], wanted)
        return build_micro_batch(
            chosen,
            counts,
            evidence_rows,
            self.builder.ids,
            negatives=negatives,
            latent_mean=latent_mean,
            device=self.device,
        )

    def _metrics(self, sums: statistics.Sums) -> dict[str, float]:
        """Statistics of the step over all ranks under their names in docs/metrics.md."""
        squares = self.module.take_gradient_squares()
        sums |= {"grpo_squares_sum": squares[0], "evidence_squares_sum": squares[1]}
        values = statistics.values(statistics.all_reduce(sums))
        norms = [max(values.pop(f"{name}_squares_sum"), 0.0) ** 0.5 for name in ("grpo", "evidence")]
        values.pop("groups_with_wrong", None)  # the score has said so already
        metrics = {_metric_name(name): value for name, value in values.items()}
        if self.settings.evidence.weight and norms[0] > 0:
            metrics["evidence/gradient_ratio"] = norms[1] / norms[0]
        return metrics

    def _whole_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(root name, whole tensor on the CPU) of the policy's parameters; on other ranks nothing is copied."""
        first = dist.get_rank() == 0
        for bucket in self.engine.iter_full_parameters():
            for name, tensor in bucket:
                if name.startswith("root."):
                    yield name.removeprefix("root."), tensor.to("cpu", copy=True) if first else tensor


def _with_latents(group: Group) -> Group:
    """The full group; a replayed one is full already."""
    return group if group.latents_ref is None else group.with_latents(ray.get(group.latents_ref, timeout=600))


def _shared(positive: torch.Tensor) -> torch.Tensor:
    """The one prototype [d] that other images' latents are kept away from."""
    return positive if positive.dim() == 1 else positive.mean(0)


def _metric_name(name: str) -> str:
    """A statistic of the step under its stage: everything that is not GRPO's or the rollout's is the evidence's."""
    plain = name.removesuffix("_sum")
    stage = "grpo" if plain in OF_GRPO else "rollout" if plain in OF_ROLLOUT else "evidence"
    return f"{stage}/{plain.removeprefix(f'{stage}_')}"
