"""Settings of the ReaLVR jobs. Every default is the paper's where the paper has a value."""

from typing import Any, Literal

from pydantic import Field, model_validator

from launch.config import JobSettings, LearnerSettings, OptimizerSettings, Settings


class LoraSettings(Settings):
    r: int = Field(default=16, ge=1)
    """Rank of the adapters."""
    alpha: int = Field(default=16, ge=1)
    """Scale: the update is alpha/r · B·A."""
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Modules of the language model that get adapters. Dropout is 0: the train and eval forwards are one."""


class ModelSettings(Settings):
    path: str
    """Checkpoint: a local folder or a hub id. Its config.json selects the family."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the weights in learner and rollout."""
    lora: LoraSettings | None = None
    """Train adapters instead of all weights; None trains language model, embeddings and head."""
    gradient_checkpointing: bool = True
    """Recompute the prefix in the backward pass; latents and gradients are the same with it off."""
    min_visual_tokens: int = Field(default=4, ge=1)
    """Fewest visual tokens an image is resized to."""
    max_visual_tokens: int = Field(default=2560, ge=1)
    """Most visual tokens an image is resized to."""


class LatentSettings(Settings):
    k: int = Field(default=8, ge=1)
    """Latents in a span."""
    open: Literal["free", "forced"] = "free"
    """`forced` makes `<|lvr_start|>` the first token; `free` samples it. Only the first start opens a span."""
    close: Literal["free", "forced"] = "free"
    """`forced` puts `<|lvr_end|>` after the K-th latent; `free` samples it. Only a closed span is valid."""


class SourceSettings(Settings):
    kind: Literal["shapes", "digits", "visual_cot", "virl39k", "meta", "jsonl", "table", "mixture"]
    """Reader: generated scenes, handwritten digits in scenes; Visual-CoT's files, ViRL39K's parquet, a meta file of
    conversations (LVR, ReaLVR); plain JSON lines; any JSONL, parquet, CSV, TSV or hub set by `fields`; a mixture."""
    path: str | None = None
    """File of the reader; also a folder of files or a pattern (`part-*.parquet`)."""
    hub: str | None = None
    """Hub id in place of a path (table, virl39k)."""
    fields: dict[str, str | tuple[str, ...]] = {}
    """Which column is what, for example {question: problem, options: [A, B, C, D]}; only names that differ."""
    image_root: str | None = None
    """Folder that image paths are relative to; None means the file's own folder."""
    box_space: Literal["normalised", "pixel", "thousand", "square"] | None = None
    """Space of the boxes in a user's own file; it must be declared where there are boxes."""
    size: int = Field(default=4096, ge=1)
    """Number of examples of a generated set."""
    seed: int = 0
    """Seed of a generated set (sets with different seeds share no scene) and of a mixture's order."""
    sources: tuple[dict[str, Any], ...] = ()
    """Parts of a mixture: sources like this one, each with a `weight` (its share, default 1)."""
    options: dict[str, Any] = {}
    """Further options of the reader."""

    @model_validator(mode="after")
    def _parts(self) -> "SourceSettings":
        if (self.kind == "mixture") != bool(self.sources):
            raise ValueError("`sources` and `kind: mixture` go together: list the parts of a mixture under `sources`")
        self.parts()
        return self

    def parts(self) -> list[tuple[float, "SourceSettings"]]:
        """(weight, source) of a mixture's parts."""
        found = []
        for entry in self.sources:
            weight = entry.get("weight", 1.0)
            if not isinstance(weight, int | float) or isinstance(weight, bool) or not 0 < weight < float("inf"):
                raise ValueError(f"a part's weight is {weight!r}; it should be a positive number")
            found.append((float(weight), SourceSettings(**{k: v for k, v in entry.items() if k != "weight"})))
        return found


class DataSettings(Settings):
    train: SourceSettings
    """Training set."""
    validation: SourceSettings | None = None
    """Validation set; None validates nothing."""
    validation_size: int = Field(default=128, ge=1)
    """How many validation examples are used."""
    max_prompt_tokens: int = Field(default=4096, ge=16)
    """Longer prompts are left out and counted; prompts are never cut."""
    max_bad_records: int = Field(default=0, ge=0)
    """Unreadable records tolerated (each is named in the log) before the run stops."""


class RolloutSettings(Settings):
    engine: Literal["vllm", "hf"] = "vllm"
    """`vllm` is the real engine; `hf` is the short reference loop."""
    workers: int = Field(default=1, ge=1)
    """Engines in the fleet."""
    cpus: float = Field(default=1, ge=0)
    """CPUs Ray reserves for a worker."""
    gpus: float = Field(default=1, ge=0)
    """GPUs Ray reserves for a worker."""
    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs that share one engine."""
    group_size: int = Field(default=8, ge=2)
    """Completions a prompt, G. One completion has no group to be compared with."""
    prompts_per_step: int = Field(default=512, ge=1)
    """Prompts an optimizer step (paper: 512 up to 30B, 1,600 at 235B)."""
    temperature: float = Field(default=0.6, gt=0)
    """Sampling temperature; the learner divides its logits by it too."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus; below 1 it biases the ratio, which then wants `grpo.old: rollout`."""
    max_new_tokens: int = Field(default=192, ge=1)
    """Longest completion, latents counted."""
    overlap: int = Field(default=0, ge=0, le=1)
    """Batches generated ahead of the learner: 1 samples with weights one step old."""
    sync: Literal["auto", "shm", "nccl", "ipc"] = "auto"
    """How weights reach vLLM: `shm` through a file in shared memory (same host; `auto`), `nccl`/`ipc` between GPUs."""
    engine_args: dict[str, Any] = {}
    """Extra vLLM engine arguments (for example gpu_memory_utilization, max_model_len)."""


class RewardSettings(Settings):
    function: str
    """Dotted path of a function in TRL's signature: f(completions, **columns) -> list of floats."""
    weight: float = 1.0
    """Weight in the sum."""
    timeout_s: float = Field(default=5.0, gt=0)
    """Seconds a call may take (a group at once, then one completion at a time); a slower completion gets 0, counted."""
    local: bool = False
    """Allow a function that is in no installed package (a file in the folder you start from): it runs as your code."""


DEFAULT_REWARDS = (
    RewardSettings(function="realvr.rewards.rewards.accuracy"),
    RewardSettings(function="realvr.rewards.rewards.format"),
)


class GrpoSettings(Settings):
    normalisation: Literal["grpo", "bnpo", "dr_grpo"] = "grpo"
    """`grpo`: mean of each completion's token mean; `bnpo`: mean over tokens; `dr_grpo`: by max_new_tokens."""
    clip: float = Field(default=0.2, gt=0)
    """PPO clip on both sides."""
    beta: float = Field(default=0.0, ge=0)
    """Weight of the KL to the starting policy (k3 estimator); 0 keeps no reference."""
    old: Literal["own", "rollout"] = "own"
    """Old log-probabilities: the learner's own, detached, or the rollout's with truncated importance correction."""
    tis_cap: float = Field(default=2.0, gt=0)
    """Cap of the truncated importance weight exp(own − rollout) with `old: rollout`."""
    std_eps: float = 1e-4
    """Added to the group's standard deviation (ddof=1)."""


class EvidenceSettings(Settings):
    weight: float = Field(default=0.2, ge=0)
    """λ: weight of the evidence loss; 0 trains by GRPO alone."""
    margin: float = 0.5
    """m: the hinge wants cos(z,p⁺) − max cos(z,p⁻) ≥ m."""
    floor: float = Field(default=0.3, ge=0, le=1)
    """η: share of the weight spread evenly over latents; 1 is uniform routing, 0 is pure contrast."""
    routing: Literal["contrast", "raw", "uniform", "causal"] = "contrast"
    """Which latents get the weight: readout of the right answer minus the mean of the wrong ones; of the right alone;
    none; the right answer's fall in log-probability when the latent is replaced."""
    negatives: int = Field(default=16, ge=0)
    """N⁻: distinct prototypes of other images; 0 uses cos⁺ alone (ablation)."""
    prototype: Literal["shared", "per_slot"] = "shared"
    """One p⁺ for all latents, or one per latent in the order of the ROI's tokens."""
    trajectory: Literal["on_policy", "saved"] = "on_policy"
    """Regenerate latents with gradient through the recursion, or take the replay's states one position earlier."""
    detach_weights: bool = True
    """Stop the gradient at the routing weights; false needs a differentiable readout."""
    mass_matched: bool = False
    """Scale the weights of an example to sum to 1."""
    normalise_gamma: bool = False
    """Scale γ of an example to sum to 1 before mixing with the floor."""
    bank: int = Field(default=1024, ge=0)
    """Prototypes of earlier steps that top up the global batch."""
    text_only: Literal["train", "skip"] = "train"
    """Rows without an image: train by GRPO with evidence weight 0, or leave them out (counted)."""


class ValidationSettings(Settings):
    every: int = Field(default=25, ge=0)
    """Validate every N steps and at the end; 0 never."""
    metric: str = "validation/accuracy"
    """The metric (higher is better) whose best checkpoint is kept."""


class RLSettings(JobSettings):
    """`realvr rl`: GRPO on text, evidence on latents (stage 2)."""

    job: Literal["realvr.rl"] = "realvr.rl"
    steps: int = Field(default=100, ge=1)
    """Optimizer steps."""
    model: ModelSettings
    latent: LatentSettings = LatentSettings()
    data: DataSettings
    rollout: RolloutSettings = RolloutSettings()
    rewards: tuple[RewardSettings, ...] = DEFAULT_REWARDS
    """Reward functions and their weights."""
    grpo: GrpoSettings = GrpoSettings()
    evidence: EvidenceSettings = EvidenceSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    learner: LearnerSettings = LearnerSettings()
    groups_per_micro_batch: int = Field(default=1, ge=1)
    """Groups in one forward of a rank, B."""
    max_idle_steps: int = Field(default=0, ge=0)
    """Steps in a row that may have no gradient at all (all rewards alike in every group, no evidence) before the run
    ends; a small batch that has been learnt has such steps."""
    validation: ValidationSettings = ValidationSettings()
    debug: Literal["none", "rollout-only", "replay"] = "none"
    """`rollout-only` writes rollouts and trains nothing; `replay` trains on the rollouts that a former run wrote."""
    replay_from: str | None = None
    """Run folder whose `rollouts/` the `replay` mode reads."""


class InterventionSettings(Settings):
    enabled: bool = True
    """Replace and transplant latents on the plain transformers model; needs the checkpoint in memory once more."""
    n: int = Field(default=200, ge=1)
    """Examples (with a closed span) whose latents are replaced."""
    top: tuple[int, ...] = (1, 2, 4, 8)
    """How many latents are replaced; numbers above K are left out."""
    orders: tuple[Literal["contrast", "raw", "random"], ...] = ("contrast", "raw", "random")
    """Which latents go first: by right minus mean wrong readout, by readout of the right answer, at random."""
    replacements: tuple[Literal["donor", "mean", "zero"], ...] = ("donor", "mean", "zero")
    """What takes their place: another example's latents, the mean over examples, zeros."""
    wrong_answers: int = Field(default=3, ge=1)
    """Most probable wrong answers a readout is contrasted with."""
    batch: int = Field(default=64, ge=1)
    """Examples in one forward."""
    pictures: int = Field(default=48, ge=0)
    """Edit pairs kept with images and readout for the report."""


class EvaluateSettings(JobSettings):
    """`realvr evaluate`: what a checkpoint answers, and whether its latents are used and carry evidence."""

    job: Literal["realvr.evaluate"] = "realvr.evaluate"
    name: str = "evaluate"
    """Run name: the folder below `runs_dir`; evaluation.json and items.jsonl are written there."""
    label: str = ""
    """Name of the checkpoint in tables; empty means the run name."""
    model: ModelSettings
    latent: LatentSettings = LatentSettings()
    data: SourceSettings
    """Validation set: accuracy, closed spans, replacement of latents."""
    n: int = Field(default=200, ge=1)
    """Examples taken from `data`."""
    twins: SourceSettings | None = None
    """Source of counterfactual pairs (shapes, digits); None measures no flips and no latent distances."""
    twins_per_edit: int = Field(default=50, ge=1)
    """Pairs of each edit."""
    engine: Literal["vllm", "hf"] = "vllm"
    """Engine that decodes the answers."""
    engine_args: dict[str, Any] = {}
    """Extra vLLM engine arguments."""
    max_new_tokens: int = Field(default=128, ge=1)
    """Longest completion, latents counted; decoding is greedy and stops after `</answer>`."""
    repetition_penalty: float | None = None
    """None takes the checkpoint's generation_config.json (1 where it has none)."""
    interventions: InterventionSettings = InterventionSettings()
    bootstrap: int = Field(default=10_000, ge=100)
    """Resamples behind a bootstrap interval."""


class ProbeSettings(Settings):
    steps: int = Field(default=150, ge=0)
    """Steps of the tower's own training; afterwards it is frozen. 0 leaves it random."""
    lr: float = Field(default=2e-3, gt=0)
    """Peak learning rate."""
    images_per_step: int = Field(default=32, ge=1)
    """Images a step."""


class BaseSettings(JobSettings):
    """`realvr base`: train a tiny model from scratch; it stands in for a pretrained model in demos and tests."""

    job: Literal["realvr.base"] = "realvr.base"
    model: ModelSettings
    data: DataSettings
    """A generated set (shapes, digits); several questions a scene share the image's forward."""
    probe: ProbeSettings = ProbeSettings()
    steps: int = Field(default=1400, ge=1)
    """Optimizer steps of an attempt at most."""
    images_per_step: int = Field(default=16, ge=1)
    """Images a step, each with `questions_per_scene` questions."""
    optimizer: OptimizerSettings = OptimizerSettings(lr=2e-3, weight_decay=0.01, warmup=50, final_fraction=0.05)
    stop_accuracy: float = Field(default=0.955, ge=0, le=1)
    """An attempt ends early when training accuracy over 100 steps reaches this."""
    target_accuracy: float = Field(default=0.84, ge=0, le=1)
    """Validation accuracy below which another seed is tried."""
    attempts: int = Field(default=3, ge=1)
    """How many seeds are tried before the run fails."""


class SftModelSettings(ModelSettings):
    min_visual_tokens: int = Field(default=128, ge=1)
    """Fewest visual tokens an image is resized to (paper, stage 1)."""
    max_visual_tokens: int = Field(default=5120, ge=1)
    """Most visual tokens an image is resized to (paper, stage 1)."""


class ExtensionSettings(Settings):
    max_steps: int = Field(default=0, ge=0)
    """Further steps allowed when the guards are not met at the end of the schedule; 0 never extends."""
    round_steps: int = Field(default=50, ge=1)
    """Steps between two looks at the guards."""
    lr_fraction: float = Field(default=0.25, gt=0, le=1)
    """Learning rate at the start of a round as a fraction of the peak; it falls to 0 in the round."""
    min_cosine: float = Field(default=0.55, ge=-1, le=1)
    """Guard: mean cosine between free-running latents and the ROI's visual tokens on validation examples."""
    min_drop: float = Field(default=0.12, ge=-1, le=1)
    """Guard: fall in the right answer's probability when all latents are those of another example."""


class SftSettings(JobSettings):
    """`realvr sft`: stage 1, cross-entropy of the text + weight · MSE of the latent states, teacher forcing."""

    job: Literal["realvr.sft"] = "realvr.sft"
    steps: int = Field(default=2500, ge=1)
    """Optimizer steps."""
    model: SftModelSettings
    latent: LatentSettings = LatentSettings()
    data: DataSettings
    examples_per_step: int = Field(default=64, ge=1)
    """Examples an optimizer step, over all ranks."""
    examples_per_micro_batch: int = Field(default=1, ge=1)
    """Examples in one padded forward of a rank."""
    mse_weight: float = Field(default=0.1, ge=0)
    """Weight of the MSE between states and visual embeddings."""
    roi_tokens: Literal["all", "k"] = "all"
    """A span holds all visual tokens of its box, or `latent.k` of them, evenly spaced (as many as inference feeds)."""
    newline: bool = True
    """A line break between the span and the answer."""
    untagged: float = Field(default=0.0, ge=0, le=1)
    """Share of examples whose answer stands without tags, which leaves the format for RL to learn (demo)."""
    lesson_cache_mb: int = Field(default=0, ge=0)
    """Prepared examples, with what the frozen tower sees, that a rank keeps for later epochs; 0 keeps none."""
    optimizer: OptimizerSettings = OptimizerSettings(lr=1e-5)
    learner: LearnerSettings = LearnerSettings()
    validation: ValidationSettings = ValidationSettings(every=250)
    validation_batch: int = Field(default=16, ge=1)
    """Validation examples that a rank decodes at a time."""
    max_new_tokens: int = Field(default=128, ge=1)
    """Longest completion in validation, latents counted."""
    extension: ExtensionSettings = ExtensionSettings()
