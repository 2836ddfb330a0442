"""How a rank of either stage comes up: process group, prompts, policy, engine."""

from typing import Any

import torch

from launch.engine import TrainEngine, init_distributed
from realvr.config import RLSettings, SftSettings
from realvr.data.prompts import PromptBuilder
from realvr.policy.model import Policy, load_policy

TrainSettings = RLSettings | SftSettings


def join(settings: TrainSettings) -> tuple[torch.device, PromptBuilder, Policy]:
    """Join the ranks and load this one's copy: device, prompt builder, policy. Collective."""
    gpu = settings.learner.gpus > 0
    init_distributed(gpu, settings.learner.threads, settings.cluster.step_deadline_s)
    device, model = torch.device("cuda" if gpu else "cpu"), settings.model
    builder = PromptBuilder(model.path, model.min_visual_tokens, model.max_visual_tokens)
    torch.manual_seed(settings.seed)  # adapters draw their first weights: the same on every rank and every start
    return device, builder, load_policy(model, device)


def engine_of(module: Any, policy: Policy, settings: TrainSettings) -> TrainEngine:
    """The ZeRO-3 engine that trains `module`, which holds the policy's root. Collective."""
    dtype = getattr(torch, settings.model.dtype)
    return TrainEngine(module, settings.optimizer, settings.learner, settings.steps, dtype, policy.family.moe_leaves)
