"""Configuration: pydantic models that refuse unknown keys. A field's docstring is its help text.

Settings shared by every job live here; a pipeline's own settings live beside the pipeline.
"""

import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from launch.config_errors import blocks, user_error
from launch.config_files import Layers, read_layers, to_yaml
from launch.errors import UserError
from launch.jobs import get_job, job_names


class Settings(BaseModel):
    """Base of every block of settings: unknown keys are errors, values are checked, blocks are immutable."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


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
    checksums: bool = True
    """Store a checksum of every file and compare it before resuming; false compares sizes only (terabytes)."""


class ClusterSettings(Settings):
    address: str = "local"
    """`local` starts Ray on this machine and stops it at the end; `auto` or `host:port` joins a running cluster."""
    num_cpus: float | None = None
    """CPUs that a local Ray may use; None means all of them."""
    deadline_s: float = Field(default=600, gt=0)
    """Seconds to wait for the cluster to offer what a run needs before giving up and saying what is missing."""
    step_deadline_s: float = Field(default=3600, gt=0)
    """Seconds that one remote operation (a rollout batch, a learner step, a weight sync, a save) may take."""


class LimitSettings(Settings):
    wall_clock_s: float | None = Field(default=None, gt=0)
    """Seconds that one attempt may take; None means until the end of the batch job that `launch slurm` made, if any."""
    save_before_s: float | None = Field(default=None, ge=0)
    """Save and stop this many seconds before that limit; None measures it: 1.5 × (slowest step + slowest save) + 30."""


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
    """Learning rate at the end of training (after the last step) as a fraction of the peak."""
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

    may_change: ClassVar[frozenset[str]] = frozenset(
        {"name", "runs_dir", "resume", "tracking", "checkpoint", "cluster", "limits", "steps"}
    )
    """Fields and blocks (dotted) that a resumed run may change: they leave the mathematics of a step alone."""

    job: str
    """Entry point of group `launch.jobs`, for example `realvr.rl`."""
    name: str = Field(default="run", pattern=r"^\w[\w.\-]*(/\w[\w.\-]*)*$")
    """Run name: the folder below `runs_dir`; letters, digits, `_ . -`, and `/` for folders in folders."""
    runs_dir: str = "runs"
    """Where run folders live (on a cluster: a shared file system)."""
    seed: int = 0
    """Seed of everything random."""
    resume: Literal["auto", "never", "require"] = "auto"
    """`auto` continues a folder with a checkpoint; `never` refuses a used folder; `require` refuses one without."""
    tracking: TrackingSettings = TrackingSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    cluster: ClusterSettings = ClusterSettings()
    limits: LimitSettings = LimitSettings()


AnySettings = TypeVar("AnySettings", bound=Settings)


def load_config(path: str | Path, overrides: Sequence[str] = (), job: str | None = None) -> JobSettings:
    """Settings of the job that the file names.

    Args:
        path: a YAML file; it may say `extends: other.yaml` (relative to itself).
        overrides: `a.b.c=VALUE`, values in YAML, in the order given; lists replace.
        job: the job that the caller runs; the file may then leave `job:` out, and may not name another.

    Raises:
        UserError: a missing or malformed file, an unknown key or job, a value that does not fit.
    """
    layers = read_layers(path, overrides)
    name = layers.values.get("job", job)
    if name is None:
        raise UserError(f"{path}: job is missing; it should be one of: {', '.join(job_names())}")
    place = layers.origin(("job",))
    if job is not None and name != job:
        raise UserError(
            f"{place}: job is {name!r}, but this command runs '{job}'; use `launch run`, or the other command"
        )
    try:
        model = get_job(str(name)).settings
    except UserError as error:
        raise UserError(f"{place}: {error}") from error
    layers.values["job"] = name
    return _validate(model, layers)


def load_settings(model: type[AnySettings], path: str | Path, overrides: Sequence[str] = ()) -> AnySettings:
    """As `load_config`, for a model that the caller gives."""
    return _validate(model, read_layers(path, overrides))


def dump_config(settings: BaseModel) -> str:
    """YAML of all fields, defaults included; `load_config` reads it back as the same settings."""
    return to_yaml(settings.model_dump(mode="json"))


@dataclass(frozen=True)
class FieldRow:
    """One line of the list of fields."""

    name: str
    """Dotted name; `[]` marks the items of a list."""
    type: str
    default: str
    """In YAML; `required` where there is none."""
    help: str


def describe(model: type[BaseModel]) -> list[FieldRow]:
    """Every field of a settings model, blocks opened up, in the order of the models."""
    return list(_describe(model, "", None))


def _describe(model: type[BaseModel], prefix: str, defaults: BaseModel | None) -> Iterator[FieldRow]:
    for name, info in model.model_fields.items():
        default = getattr(defaults, name) if defaults is not None else info.get_default(call_default_factory=True)
        required = defaults is None and info.is_required()
        inner = blocks(info.annotation)
        kind, help_text = _type_text(info.annotation, info), " ".join((info.description or "").split())
        if kind != "block":
            yield FieldRow(prefix + name, kind, "required" if required else _default_text(default), help_text)
        elif required or not isinstance(default, BaseModel):
            yield FieldRow(prefix + name, kind, "required", help_text)
        below = f"{prefix}{name}{'[]' if kind.startswith('list') else ''}."
        for block in inner:
            yield from _describe(block, below, default if isinstance(default, block) else None)


def _default_text(value: Any) -> str:
    if isinstance(value, tuple | list):
        value = [item.model_dump(mode="json") if isinstance(item, BaseModel) else item for item in value]
    return to_yaml(value.model_dump(mode="json") if isinstance(value, BaseModel) else value, one_line=True)


def _type_text(annotation: Any, info: FieldInfo | None = None) -> str:
    """`int ≥ 1`, `vllm | hf`, `list of float`, `block | null`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "block"
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        text = " | ".join(map(str, parts))
    elif origin in (typing.Union, types.UnionType):
        text = " | ".join(dict.fromkeys(map(_type_text, parts)))
    elif origin in (tuple, list):
        text = "list of " + " and ".join(dict.fromkeys(_type_text(part) for part in parts if part is not ...))
    elif origin is dict or annotation is dict:
        text = "mapping"
    elif annotation is type(None):
        text = "null"
    else:
        text = getattr(annotation, "__name__", str(annotation))
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    limits = [
        (sign, getattr(rule, key))
        for rule in (info.metadata if info else ())
        for key, sign in signs.items()
        if hasattr(rule, key)
    ]
    return " ".join([text, *(f"{sign} {value}" for sign, value in limits)])


def _validate(model: type[AnySettings], layers: Layers) -> AnySettings:
    try:
        return model.model_validate(layers.values)
    except ValidationError as error:
        raise user_error(error, model, layers) from error
