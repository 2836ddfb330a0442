"""One learner step on one group at a real prompt length: the tree against the public way, same loss.

    python -m tests.benchmarks.learner_step

Group: 2,600 prompt tokens (a 40 × 64 grid of visual tokens), G = 8 completions of a span (K = 8) and 48 answer tokens,
4 wrong answers; 8 layers, d = 256, vocabulary 8,192, float32, one thread. The public way replays a completion a
sequence, runs the whole prefix again for each latent, and runs a forward an answer with eager attention maps. Each
variant runs in a process of its own; peak memory is above the process's size with weights and gradients in place.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextModel

from realvr.config import EvidenceSettings, GrpoSettings, LatentSettings, ModelSettings
from realvr.data.examples import Example
from realvr.data.prompts import Prompt
from realvr.families import get_family
from realvr.families.base import TokenIds, VisualFeatures
from realvr.learner.batching import AnswerBranch, LearnerGroup, build_micro_batch, local_counts
from realvr.learner.step import LearnerModule, StepSettings
from realvr.objectives.grpo import GlobalCounts
from realvr.policy.attention import NAME
from realvr.policy.model import Policy, PolicyRoot
from realvr.policy.spans import parse
from realvr.rollout.records import Group, Rollout, ScoredGroup

LAYERS, WIDTH, HEADS, KV_HEADS, INNER, VOCABULARY = 8, 256, 4, 2, 1024, 8192
ROWS, COLUMNS, BEFORE, AFTER = 40, 64, 28, 12  # visual grid, text tokens before and after it
G, K, ANSWER, WRONG, NEGATIVES, TEMPERATURE = 8, 8, 48, 4, 16, 0.6
TOKENS = TokenIds(start=5, latent=6, end=7, image=8, pad=0, eos=(1,), banned=(8, 9))
EVIDENCE = EvidenceSettings()
VARIANTS = {
    "public": "public way",
    "tree": "tree (merged)",
    "tree-dense": "tree, dense mask",
    "tree-recompute": "tree, first forward recomputed",
    "tree-grpo": "tree, evidence off",
}


def build_policy() -> Policy:
    """A random text model of the benchmark's size; there is no tower, features are given."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]}
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": VOCABULARY,
            "hidden_size": WIDTH,
            "intermediate_size": INNER,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "max_position_embeddings": 8192,
            "rope_parameters": rope,
            "bos_token_id": None,
            "eos_token_id": 1,
            "pad_token_id": None,
        }
    )
    language_model = Qwen2_5_VLTextModel._from_config(config.text_config, attn_implementation="sdpa")
    head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    generator = torch.Generator().manual_seed(1)
    for name, p in [*language_model.named_parameters(), ("head", head.weight)]:
        if p.dim() >= 2:
            scale = 1.0 if "embed" in name else 1 / math.sqrt(p.shape[-1])
            p.data = torch.randn(p.shape, generator=generator) * scale
    language_model.config._attn_implementation = NAME
    root = PolicyRoot(language_model, head).train()
    return Policy(get_family("qwen2_5_vl"), config, root, nn.Module(), ModelSettings(path="-", dtype="float32"))


def build_prompt(random: np.random.Generator) -> Prompt:
    """Text, a grid of visual tokens, text, with M-RoPE positions."""
    visual = ROWS * COLUMNS
    ids = torch.as_tensor(random.integers(10, VOCABULARY, BEFORE + visual + AFTER))
    mask = torch.zeros(len(ids), dtype=torch.bool)
    mask[BEFORE : BEFORE + visual] = True
    ids[mask] = TOKENS.image
    grid = torch.tensor([[1, 2 * ROWS, 2 * COLUMNS]])
    config = Qwen2_5_VLConfig(image_token_id=TOKENS.image)
    positions, following = get_family("qwen2_5_vl").positions(config, ids, grid)
    return Prompt(ids, None, grid, positions, following, mask, (torch.arange(900, 960),), (visual,))


def build_group() -> tuple[LearnerGroup, torch.Tensor]:
    """The group, and the negatives' prototypes [1, NEGATIVES, d]."""
    random = np.random.default_rng(3)
    prompt = build_prompt(random)
    features = VisualFeatures(torch.as_tensor(random.normal(size=(ROWS * COLUMNS, WIDTH)), dtype=torch.float32))
    span = [TOKENS.start, *[TOKENS.latent] * K, TOKENS.end]
    rollouts = []
    for _ in range(G):
        ids = np.array([*span, *random.integers(10, VOCABULARY, ANSWER)])
        latents = random.normal(size=(K, WIDTH)).astype(np.float32)
        zeros = np.zeros(len(ids), np.float32)
        rollouts.append(Rollout(ids, zeros, latents, np.arange(1, K + 1), zeros.astype(np.int32), "", "length"))
    advantages = random.normal(size=G).astype(np.float32)
    scored = ScoredGroup(Group(Example("one", ("-",), "", ""), tuple(rollouts)), {}, advantages, advantages)
    content = torch.tensor([False] * 3 + [True] * 6)
    answers = tuple(
        AnswerBranch(torch.tensor([TOKENS.end, *random.integers(10, VOCABULARY, 8)]), content) for _ in range(1 + WRONG)
    )
    parsed = tuple(parse(r.tokens, TOKENS, LatentSettings(k=K)) for r in rollouts)
    positive = features.embeds[prompt.roi[0]].mean(0)
    negatives = torch.as_tensor(random.normal(size=(1, NEGATIVES, WIDTH)), dtype=torch.float32)
    return LearnerGroup(scored, prompt, features, parsed, answers, positive), negatives


def ours(policy: Policy, group: LearnerGroup, negatives: torch.Tensor, variant: str):
    """A step of the product: returns a function that gives the loss after its backward pass."""
    evidence = EVIDENCE.model_copy(update={"weight": 0.0}) if variant == "tree-grpo" else EVIDENCE
    settings = StepSettings(
        GrpoSettings(),
        evidence,
        K,
        TEMPERATURE,
        attention="dense" if variant == "tree-dense" else "merged",
        recompute=variant == "tree-recompute",
    )
    learner = LearnerModule(policy, settings, TOKENS)
    counts = local_counts([group])
    present = torch.ones(negatives.shape[:2], dtype=torch.bool)
    batch = build_micro_batch(
        [group], GlobalCounts(counts["completions"], counts["tokens"], 192), 1, TOKENS, negatives=(negatives, present)
    )

    def step() -> float:
        loss, _ = learner(batch)
        loss.backward()
        return loss.item()

    return step


class PublicWay:
    """The same loss with an ordinary model: one sequence a sample, nothing shared; a backward pass a sample."""

    def __init__(self, policy: Policy, group: LearnerGroup, negatives: torch.Tensor):
        self.root, self.group, self.negatives = policy.root, group, negatives[0]
        self.bans = torch.zeros(VOCABULARY, dtype=torch.bool)
        self.bans[[*TOKENS.banned, TOKENS.latent, TOKENS.start, TOKENS.end]] = True

    def states(self, after: torch.Tensor, eager: bool = False):
        lm, prompt = self.root.language_model, self.group.prompt
        lm.config._attn_implementation = "eager" if eager else "sdpa"
        embeds = self.root.embed(prompt.input_ids).masked_scatter(
            prompt.visual_mask[:, None], self.group.features.embeds
        )
        following = (prompt.next_position + torch.arange(len(after))).expand(3, -1)
        return lm(
            inputs_embeds=torch.cat([embeds, after])[None],
            position_ids=torch.cat([prompt.positions, following], 1)[:, None],
            use_cache=False,
            output_attentions=eager,
        )

    def replay(self) -> float:
        total = 0.0
        for rollout, advantage in zip(self.group.scored.group.rollouts, self.group.scored.advantages, strict=True):
            ids = torch.as_tensor(rollout.tokens)
            embeds = self.root.embed(ids)
            embeds = torch.cat([embeds[:1], torch.as_tensor(rollout.latents), embeds[1 + K :]])
            states = self.states(embeds).last_hidden_state[0, -ANSWER - 1 : -1]
            logits = (states @ self.root.lm_head.weight.t() / TEMPERATURE).masked_fill(self.bans, float("-inf"))
            own = logits.log_softmax(-1).gather(-1, ids[-ANSWER:, None])[:, 0]
            ratio = (own - own.detach()).exp()
            adv = float(advantage)
            loss = -torch.minimum(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean() / G
            loss.backward()
            total += loss.item()
        return total

    def evidence(self) -> float:
        after = self.root.embed(torch.tensor([TOKENS.start]))
        for _ in range(K):
            after = torch.cat([after, self.states(after).last_hidden_state[0, -1:]])
        z = after[1:]
        width = self.group.width
        with torch.no_grad():
            readouts = []
            for answer in self.group.answers:
                maps = self.states(torch.cat([after, self.root.embed(answer.ids)]), eager=True).attentions
                rows = width + 1 + K + answer.content.nonzero()[:, 0]
                seen = [m[0, :, rows, width + 1 : width + 1 + K].mean((0, 1)) for m in maps]
                readouts.append(torch.stack(seen).mean(0))
            gamma = (readouts[0] - torch.stack(readouts[1:]).mean(0)).clamp(min=0)
        positive = F.cosine_similarity(z, self.group.positive[None], dim=-1)
        gap = positive - F.cosine_similarity(z[:, None], self.negatives[None], dim=-1).amax(-1)
        weights = EVIDENCE.floor / K + (1 - EVIDENCE.floor) * gamma
        loss = EVIDENCE.weight * (weights * (EVIDENCE.margin - gap).clamp(min=0)).sum()
        loss.backward()
        return loss.item()

    def __call__(self) -> float:
        return self.replay() + self.evidence()


def memory(reset: bool = False) -> tuple[float, float]:
    """(resident, peak resident) in MB; reset forgets the peak so far. Linux."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return tuple(int(lines[key].split()[0]) / 1024 for key in ("VmRSS", "VmHWM"))


def measure(variant: str, repeats: int) -> dict:
    """Run one variant here."""
    torch.set_num_threads(1)
    policy = build_policy()
    group, negatives = build_group()
    step = PublicWay(policy, group, negatives) if variant == "public" else ours(policy, group, negatives, variant)
    for p in policy.root.parameters():
        p.grad = torch.zeros_like(p)
    resident, _ = memory(reset=True)
    seconds = []
    for _ in range(repeats):
        for p in policy.root.parameters():
            p.grad.zero_()
        before = time.process_time()
        loss = step()
        seconds.append(time.process_time() - before)
    norm = torch.stack([p.grad.norm() for p in policy.root.parameters()]).norm().item()
    return {"cpu_s": min(seconds), "peak_mb": memory()[1] - resident, "loss": loss, "gradient_norm": norm}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--variant", choices=VARIANTS)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    if options.variant:
        print(json.dumps(measure(options.variant, options.repeats)))
        return
    results = {}
    print(f"{'':32s} {'CPU s':>8s} {'peak MB':>8s} {'loss':>11s} {'grad norm':>11s}")
    for variant, title in VARIANTS.items():
        repeats = 1 if variant == "public" else options.repeats
        command = [sys.executable, "-m", "tests.benchmarks.learner_step", "--variant", variant]
        run = subprocess.run([*command, "--repeats", str(repeats)], capture_output=True, text=True, check=True)
        results[variant] = r = json.loads(run.stdout.splitlines()[-1])
        print(
            f"{title:32s} {r['cpu_s']:8.2f} {r['peak_mb']:8.0f} {r['loss']:11.6f} {r['gradient_norm']:11.6f}",
            flush=True,
        )
    public, tree = results["public"], results["tree"]
    for key in ("loss", "gradient_norm"):
        if not math.isclose(public[key], tree[key], rel_tol=1e-3, abs_tol=1e-5):
            sys.exit(f"the two ways differ in {key}: {public[key]} and {tree[key]}")
    print(f"\nCPU seconds {public['cpu_s'] / tree['cpu_s']:.1f}× (aim ≥ 15)")
    print(f"peak memory {public['peak_mb'] / tree['peak_mb']:.1f}×")
    print(f"evidence on / off {tree['cpu_s'] / results['tree-grpo']['cpu_s']:.2f} (aim ≤ 1.15)")


if __name__ == "__main__":
    main()
