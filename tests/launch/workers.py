"""Workers that the tests run in groups, and the plain references that they are compared with."""

import os
import signal
import subprocess
import time
from pathlib import Path

import torch
from torch import nn

from launch.config import LearnerSettings, OptimizerSettings
from launch.errors import UserError


class Speaker:
    """Says who it is; misbehaves on request."""

    def __init__(self, word: str = "", bad_rank: int | None = None):
        self.word = word
        if self.rank == bad_rank:
            raise UserError(f"workers: rank {bad_rank} of the test is bad; choose another")

    @property
    def rank(self) -> int:
        return int(os.environ.get("RANK", "-1"))

    def say(self, *words: str) -> str:
        print("saying", self.word, *words)
        return " ".join([self.word, str(self.rank), *words])

    def environment(self, *names: str) -> list[str | None]:
        return [os.environ.get(name) for name in names]

    def pid(self) -> int:
        return os.getpid()

    def complain(self, rank: int) -> str:
        if self.rank == rank:
            raise UserError("train.jsonl record 7: no question; add one")
        return "fine"

    def fail(self, rank: int) -> None:
        if self.rank == rank:
            raise ZeroDivisionError("divided by nothing")
        time.sleep(60)

    def die(self, rank: int) -> None:
        if self.rank == rank:
            print("last words")
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    def hang_here(self, rank: int) -> str:
        if self.rank == rank:
            time.sleep(60)
        return "done"

    def start_child(self) -> int:
        """A process in a session of its own, as inference engines start."""
        return subprocess.Popen(["sleep", "600"], start_new_session=True).pid

    def exit_code_of_a_child(self, code: int) -> int:
        return subprocess.run(["sh", "-c", f"exit {code}"], check=False).returncode


class Experts(nn.ModuleList):
    """Two matrices of which a batch takes one, so that ranks and calls differ."""

    def forward(self, x: torch.Tensor, choice: int) -> torch.Tensor:
        return self[choice % 2](x)


class Tiny(nn.Module):
    """A frozen embedding, a normalised hidden layer and experts used twice, a head, a rotary buffer."""

    def __init__(self, width: int = 24, seed: int = 0):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(50, width).requires_grad_(False)
            self.hidden = nn.Linear(width, width)
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, 50, bias=False)
            self.experts = Experts(nn.Linear(width, width, bias=False) for _ in range(2))
        self.register_buffer(
            "inv_freq", 1.0 / 10000 ** (torch.arange(width, dtype=torch.float) / width), persistent=False
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for call in range(2):  # a recursion: the same module twice in one graph
            x = x + self.experts(x, call * tokens.shape[1])
            x = self.norm(x + torch.tanh(self.hidden(x + self.inv_freq.to(x.dtype))))
        return nn.functional.cross_entropy(
            self.head(x).flatten(0, 1).float(), tokens.roll(-1, 1).flatten(), reduction="sum"
        )


# Micro-steps of each optimizer step: their number varies from step to step, never between ranks.
MICRO_STEPS = (1, 3, 2)


def tokens_of(step: int, rank: int, micro: int) -> torch.Tensor:
    """A batch addressed by step, rank and micro-step; its length differs between ranks."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randint(0, 50, (2, 5 + rank + micro), generator=generator)


def plain_adamw(
    settings: OptimizerSettings, rates: list[float], world: int, dtype: torch.dtype = torch.float64
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """One process, torch's own AdamW: parameters and gradient norms after one step for each rate."""
    model = Tiny().to(dtype)
    groups = [
        {
            "params": [model.hidden.weight, model.head.weight, *model.experts.parameters()],
            "weight_decay": settings.weight_decay,
        },
        {"params": [model.hidden.bias, model.norm.weight, model.norm.bias], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps)
    norms = []
    for step, rate in enumerate(rates):
        adamw.zero_grad()
        places = [(rank, micro) for rank in range(world) for micro in range(MICRO_STEPS[step])]
        count = sum(tokens_of(step, *place).numel() for place in places)
        sum(model(tokens_of(step, *place)) / count for place in places).backward()
        trained = [p for p in model.parameters() if p.requires_grad]
        norms.append(float(nn.utils.clip_grad_norm_(trained, settings.clip)))
        for group in adamw.param_groups:
            group["lr"] = rate
        adamw.step()
    return {name: p.detach() for name, p in model.named_parameters()}, norms


class Trainer:
    """A TrainEngine on `Tiny`, with losses normalised by the global token count."""

    def __init__(self, optimizer: OptimizerSettings, **options):
        from launch.engine import init_distributed

        init_distributed(gpu=False, threads=1, timeout_s=60)
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.build(optimizer, **options)

    def build(
        self,
        optimizer: OptimizerSettings,
        width: int = 24,
        dtype: str = "float32",
        sharded_at_birth: bool = False,
        deepspeed: dict | None = None,
    ) -> None:
        """A fresh module and engine in the same process group."""
        import contextlib

        from launch.engine import TrainEngine, zero_init_context

        # Threshold 0: also small tensors are sharded, so that every path is taken.
        zero = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
        learner = LearnerSettings(ranks=self.world, gpus=0, deepspeed=deepspeed or zero)
        kind = getattr(torch, dtype)
        early = zero_init_context(optimizer, learner, kind) if sharded_at_birth else contextlib.nullcontext()
        with early:
            module = Tiny(width)
        self.engine = TrainEngine(module, optimizer, learner, total_steps=10, dtype=kind, moe_leaves=("Experts",))

    def train(self, first: int, last: int, noise: float = 0.0, die_on: int = -1, nan_on: int = -1) -> list[tuple]:
        """Steps first … last - 1: (loss sum on this rank, gradient norm, learning rate) each."""
        out = []
        for step in range(first, last):
            places = [(r, m) for r in range(self.world) for m in range(MICRO_STEPS[step])]
            count = sum(tokens_of(step, *place).numel() for place in places)
            total = 0.0
            for micro in range(MICRO_STEPS[step]):
                loss = self.engine(tokens_of(step, self.rank, micro)) / count
                loss = loss * (1 + noise * torch.rand(()))  # uses the random state
                if self.rank == nan_on and micro == 0:
                    loss = loss * float("nan")
                self.engine.backward(loss)
                total += float(loss)
                if self.rank == die_on:
                    os.kill(os.getpid(), signal.SIGKILL)
            stats = self.engine.step()
            out.append((total, stats.grad_norm, stats.lr))
        return out

    def weights(self, bucket_bytes: int = 2**20, trained_only: bool = False) -> tuple[dict, list[int]]:
        """Whole parameters, and how many came in each bucket."""
        found, sizes = {}, []
        for bucket in self.engine.iter_full_parameters(bucket_bytes, trained_only):
            sizes.append(len(bucket))
            found.update({name: tensor.clone() for name, tensor in bucket})
        return found, sizes

    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        from launch.engine import shape_of

        return [(name, shape_of(parameter)) for name, parameter in self.engine.module.named_parameters()]

    def buffers(self) -> dict[str, tuple[str, torch.Tensor]]:
        return {name: (str(buffer.dtype), buffer.clone()) for name, buffer in self.engine.module.named_buffers()}

    def save(self, folder: str) -> None:
        self.engine.save(Path(folder), {"rank": self.rank, "cursor": [1, 2, 3]})

    def load(self, folder: str) -> dict:
        return self.engine.load(Path(folder))

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed + self.rank)
