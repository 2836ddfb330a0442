"""One rank of stage 1: the engine, the frozen tower, prepared lessons; a step on this rank's share of a batch."""

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from realvr.config import SftSettings
from realvr.data.examples import Example
from realvr.data.prompts import Prompt, PromptBuilder
from realvr.families.base import VisualFeatures
from realvr.learner import statistics
from realvr.learner.batching import answer_branch, plan_micro_batches
from realvr.learner.rank import engine_of, join
from realvr.objectives.prototypes import per_slot
from realvr.policy.model import Policy
from realvr.policy.spans import ban_table
from realvr.policy.tree import AnswerBatch, PromptBatch
from realvr.rewards.answers import block
from realvr.rewards.grading import grade
from realvr.rollout.completions import completion_text
from realvr.train.free_running import FreeBatch, FreeRun, free_run
from realvr.train.teacher import Lesson, LessonBatch, build_lesson, collate, counts, lesson_loss


class SftModule(torch.nn.Module):
    """The engine's root module: a batch of lessons gives (loss, statistics), a batch of prompts a free run."""

    def __init__(self, policy: Policy, builder: PromptBuilder, settings: SftSettings):
        super().__init__()
        self.root, self.family, self.settings, self.tokens = policy.root, policy.family, settings, builder.ids
        self.register_buffer("bans", ban_table(builder.ids, policy.vocabulary), persistent=False)

    def forward(self, batch: LessonBatch | FreeBatch) -> Any:
        s = self.settings
        if isinstance(batch, FreeBatch):
            run = free_run(self.root, self.family, batch, self.tokens, s.latent, self.bans, s.max_new_tokens)
            return run.latents_BKd, run.right_B, run.swapped_B, run.tokens_BN  # ZeRO-3's hooks look into tuples only
        return lesson_loss(self.root, self.family, batch, s.mse_weight, s.model.gradient_checkpointing)


class SftWorker:
    """Every method is collective: all ranks are called together."""

    def __init__(self, settings: SftSettings) -> None:
        self.settings = settings
        self.device, self.builder, self.policy = join(settings)
        self.engine = engine_of(SftModule(self.policy, self.builder, settings), self.policy, settings)
        self._kept: OrderedDict[str, Lesson] = OrderedDict()
        self._kept_bytes = 0

    def step(self, examples: Sequence[Example], lr: float | None = None) -> dict[str, float]:
        """One optimizer step on this rank's examples (one at least); metrics, equal on all ranks."""
        lessons = self._lessons(examples)
        total = torch.tensor(counts(lessons), device=self.device)
        dist.all_reduce(total)
        plan = plan_micro_batches([lesson.width for lesson in lessons], self.settings.examples_per_micro_batch)
        found, latents = [], sum(len(lesson.sources) for lesson in lessons)
        for part in plan + [plan[-1][:1]] * (self._most(len(plan)) - len(plan)):
            real = len(found) < len(plan)
            chosen = [lessons[i] for i in part]
            batch = collate(chosen, self.builder.ids, tuple(total.tolist()), self.device, real)
            loss, sums = self.engine(batch)
            self.engine.backward(loss)
            found.append(sums)
        done = self.engine.step(lr)
        spent = torch.tensor([sum(lesson.width for lesson in lessons), latents], dtype=torch.float64)
        sums = statistics.combine(found) | {"tokens_sum": spent[0], "latents_sum": spent[1]}
        sums = {name: value.to(self.device) for name, value in sums.items()}
        values = statistics.values(statistics.all_reduce(sums))
        metrics = {f"sft/{name.removesuffix('_sum')}": value for name, value in values.items()}
        metrics["sft/loss"] = metrics["sft/ce"] + self.settings.mse_weight * metrics["sft/mse"]
        return metrics | {"learner/grad_norm": done.grad_norm, "learner/lr": done.lr}

    def validate(self, examples: Sequence[Example]) -> dict[str, float]:
        """Free-running metrics over all ranks' examples (one at least a rank)."""
        size = self.settings.validation_batch
        parts = [examples[at : at + size] for at in range(0, len(examples), size)]
        found = []
        for part in list(parts) + [parts[-1]] * (self._most(len(parts)) - len(parts)):
            lessons = self._lessons(part)
            run = self.free_run(lessons)
            if len(found) < len(parts):
                found.append(self._judge(lessons, run))
        sums = {name: value.to(self.device) for name, value in statistics.combine(found).items()}
        return {f"validation/{name}": value for name, value in statistics.values(statistics.all_reduce(sums)).items()}

    def free_run(self, lessons: Sequence[Lesson]) -> FreeRun:
        """One batch of prompts on the model's own latents."""
        return FreeRun(*self.engine(self._free_batch(lessons)))

    def save(self, folder: str) -> None:
        """Shards, optimizer and random states of every rank."""
        self.engine.save(Path(folder) / "learner")

    def load(self, folder: str) -> None:
        """Continue from `save`."""
        self.engine.load(Path(folder) / "learner")

    def _most(self, count: int) -> int:
        most = torch.tensor([count], device=self.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return int(most)

    def _lessons(self, examples: Sequence[Example]) -> list[Lesson]:
        """The prepared lessons, from memory where they are kept; the others' images pass the tower together."""
        keys = [f"{e.source}:{e.id}" for e in examples]
        new = {key: e for key, e in zip(keys, examples, strict=True) if key not in self._kept}
        found = {key: self._kept[key] for key in keys if key in self._kept}
        prompts = {key: self.builder.build(e) for key, e in new.items()}
        for (key, prompt), features in zip(prompts.items(), self._features(list(prompts.values())), strict=True):
            lesson = build_lesson(
                new[key],
                replace(prompt, pixels=None),  # seen already
                features,
                self.builder.tokenizer,
                self.builder.ids,
                self.settings,
            )
            found[key] = lesson
            if self.settings.lesson_cache_mb:
                self._keep(key, lesson)
        return [found[key] for key in keys]

    def _keep(self, key: str, lesson: Lesson) -> None:
        """Remember a lesson; the oldest are forgotten when memory is spent."""
        self._kept[key] = lesson
        self._kept_bytes += lesson.bytes
        while self._kept_bytes > self.settings.lesson_cache_mb * 2**20:
            self._kept_bytes -= self._kept.popitem(last=False)[1].bytes

    def _features(self, prompts: Sequence[Prompt]) -> Iterator[VisualFeatures]:
        """What the tower sees of each prompt's images, `examples_per_micro_batch` prompts at a time."""
        size = self.settings.examples_per_micro_batch
        width = self.policy.root.language_model.config.hidden_size
        for at in range(0, len(prompts), size):
            part = prompts[at : at + size]
            seen = [p for p in part if p.pixels is not None]
            if seen:
                pixels, grids = torch.cat([p.pixels for p in seen]), torch.cat([p.grid_thw for p in seen])
                whole = self.policy.visual_features(pixels, grids)
            start = 0
            for prompt in part:
                rows = slice(start, start + sum(prompt.image_counts))
                if prompt.pixels is None:
                    yield VisualFeatures(torch.zeros(0, width, dtype=getattr(torch, self.settings.model.dtype)))
                else:
                    yield VisualFeatures(whole.embeds[rows], tuple(level[rows] for level in whole.deepstack))
                start = rows.stop

    def _free_batch(self, lessons: Sequence[Lesson]) -> FreeBatch:
        prompts = [lesson.prompt for lesson in lessons]
        lengths = tuple(len(p.input_ids) for p in prompts)
        width, tokens = max(lengths), self.builder.ids

        def left(values: Sequence[torch.Tensor], fill: int) -> torch.Tensor:
            padded = [torch.nn.functional.pad(v, (width - v.shape[-1], 0), value=fill) for v in values]
            return torch.stack(padded, -2).to(self.device)

        seen = [lesson.features for lesson in lessons]
        levels = zip(*(f.deepstack for f in seen if f.deepstack), strict=True)
        features = VisualFeatures(torch.cat([f.embeds for f in seen]), tuple(torch.cat(level) for level in levels))
        branches = [answer_branch(self.builder.tokenizer, lesson.example.answer, tokens) for lesson in lessons]
        longest = max(len(b.ids) for b in branches)
        ids = torch.full((len(branches), 1, longest), tokens.pad)
        content = torch.zeros(ids.shape, dtype=torch.bool)
        for row, branch in enumerate(branches):
            ids[row, 0, : len(branch.ids)], content[row, 0, : len(branch.ids)] = branch.ids, branch.content
        return FreeBatch(
            PromptBatch(
                left([p.input_ids for p in prompts], tokens.pad),
                left([p.visual_mask for p in prompts], 0),
                left([p.positions for p in prompts], 0),
                torch.tensor([p.next_position for p in prompts], device=self.device),
                lengths,
                features,
            ),
            AnswerBatch(ids.to(self.device), content.to(self.device), None),
        )

    def _judge(self, lessons: Sequence[Lesson], run: FreeRun) -> statistics.Sums:
        """Sums of the metrics of one batch; those about latents count examples with an image."""
        tokens, k = self.builder.ids, self.settings.latent.k
        seen = [i for i, lesson in enumerate(lessons) if len(lesson.features.embeds)]
        targets = [per_slot(lessons[i].features.embeds, [r.tolist() for r in lessons[i].prompt.roi], k) for i in seen]
        flags: dict[str, list[float]] = {"accuracy": [], "answered_rate": [], "closed_span_rate": []}
        for lesson, row in zip(lessons, run.tokens_BN.tolist(), strict=True):
            ends = [i for i, t in enumerate(row) if t in tokens.eos]
            row = row[: ends[0] + 1] if ends else row
            text = completion_text(self.builder.tokenizer, row, tokens.eos, ())
            e = lesson.example
            flags["accuracy"].append(float(grade(text, e.answer, e.kind, "reward", e.options).correct))
            flags["answered_rate"].append(float(block(text) is not None))
            flags["closed_span_rate"].append(float(tokens.end in row))
        sums = {name: statistics.mean_of(torch.tensor(values)) for name, values in flags.items()}
        cosine = [torch.cosine_similarity(run.latents_BKd[i], t, dim=-1) for i, t in zip(seen, targets, strict=True)]
        drop = (run.right_B - run.swapped_B)[seen]
        sums["cosine"] = statistics.mean_of(torch.cat(cosine) if cosine else drop)
        sums["replacement_drop"] = statistics.mean_of(drop)
        sums["probability"] = statistics.mean_of(run.right_B)
        if any(math.isnan(float(v.sum())) for v in sums.values()):
            raise RuntimeError("validation: the model gives NaN")
        return {name: value.cpu() for name, value in sums.items()}
