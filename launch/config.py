"""Configuration: pydantic models that refuse unknown keys. A field's docstring is its help text.

Settings shared by every job live here; a pipeline's own settings live beside the pipeline.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Settings(BaseModel):
    """Base of every block of settings: unknown keys are errors, values are checked, blocks are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True)


class TrackingSettings(Settings):
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Weights & Biases mode. `metrics.jsonl` in the run folder is written whatever this says."""
    project: str = "realvr"
    """W&B project."""
    entity: str | None = None
    """W&B team or user; None means the account's default."""
    samples_every: int = Field(default=10, ge=0)
    """Write a table of rollouts (image, ROI box, readout weights) every N steps; 0 writes none."""


class CheckpointSettings(Settings):
    every: int = Field(default=25, ge=1)
    """Save a checkpoint every N optimizer steps (and always at the end and when asked to stop)."""
    keep: int = Field(default=2, ge=1)
    """How many of the newest checkpoints stay on disk; the best one by validation stays besides."""


class ClusterSettings(Settings):
    address: str = "local"
    """`local` starts Ray on this machine and stops it at the end; `auto` or `host:port` joins a running cluster."""
    num_cpus: float | None = None
    """CPUs that a local Ray may use; None means all of them."""
    deadline_s: float = Field(default=600, gt=0)
    """Seconds to wait for the cluster to offer the resources a run needs before giving up and saying what is missing."""
    step_deadline_s: float = Field(default=3600, gt=0)
    """Seconds that one remote operation (a rollout batch, a learner step, a weight sync, a save) may take."""


class OptimizerSettings(Settings):
    lr: float = Field(default=5e-7, gt=0)
    """Peak learning rate (paper: 5e-7 in stage 2, 1e-5 in stage 1)."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's two decay rates."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.1
    """Decoupled weight decay."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Decay after the warm-up."""
    warmup: float = Field(default=0.03, ge=0)
    """Warm-up: a fraction of all steps below 1, a number of steps from 1 on."""
    final_fraction: float = Field(default=0.0, ge=0, le=1)
    """Learning rate at the last step as a fraction of the peak."""
    clip: float = Field(default=1.0, gt=0)
    """Global gradient-norm clip."""


class LearnerSettings(Settings):
    ranks: int = Field(default=1, ge=1)
    """Learner processes; ZeRO-3 shards parameters, gradients and optimizer state over them."""
    cpus: float = Field(default=1, ge=0)
    """CPUs Ray reserves for a rank (fractions allow sharing on a small machine)."""
    gpus: float = Field(default=1, ge=0)
    """GPUs Ray reserves for a rank; 0 trains on CPUs with gloo."""
    threads: int = Field(default=1, ge=1)
    """Intra-op threads of a rank when it runs on CPUs."""
    deepspeed: dict = {}
    """Extra DeepSpeed configuration, merged over the one built here (for example offload or bucket sizes)."""


class JobSettings(Settings):
    """What every job has; a pipeline's config model extends it."""

    job: str
    """Entry point of group `launch.jobs`, for example `realvr.rl`."""
    name: str = "run"
    """Run name: the folder below `runs_dir`."""
    runs_dir: str = "runs"
    """Where run folders live (on a cluster: a shared file system)."""
    seed: int = 0
    """Seed of everything random."""
    resume: Literal["auto", "never", "require"] = "auto"
    """`auto` continues the run folder if it has a checkpoint; `never` refuses a used folder; `require` refuses an empty one."""
    tracking: TrackingSettings = TrackingSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    cluster: ClusterSettings = ClusterSettings()
