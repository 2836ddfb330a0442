"""Tiny random checkpoints: a tokenizer built here, a processor and a model from config, nothing downloaded.

`test` is for parity checks (grouped-query attention, real patch sizes); `demo` is the smallest model that learns the
generated worlds on two cores: a low rotary base and wide initial weights matter there.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from launch.errors import UserError
from realvr.families.base import END, LATENT, START

EOS, PAD = "<|im_end|>", "<|endoftext|>"
SPECIAL = (
    PAD,
    "<|im_start|>",
    EOS,
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    START,
    LATENT,
    END,
)
TAGS = ("<answer>", "</answer>")
_WORDS = (
    "system user assistant You are a helpful "
    "what which how many number side colour color shape digit is the of in to and "
    "What Which How Is Are Does there "
    "circle square triangle cross star ring diamond "
    "red green blue yellow purple orange grey white black "
    "left right above below top bottom topleft topright bottomleft bottomright "
    "none yes no Yes No zero one two three four five six seven eight nine "
    "A B C D E F G H 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18"
)
WORDS = tuple(_WORDS.split())
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif c['type'] == 'text' %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Size:
    """Sizes of a tiny checkpoint; `std` None keeps the model's own initialisation."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    layers: int
    rope_theta: float
    vision_hidden: int
    vision_depth: int
    vision_heads: int
    patch: int
    temporal: int
    window: int  # pixels, Qwen2.5-VL
    max_position: int
    max_visual_tokens: int
    std: float | None


def tiny_size(size: str, patch: int) -> Size:
    """`test` or `demo`; `patch` is the family's own patch size (the demo's is 8, so that 64×64 px are 16 tokens)."""
    if size == "test":
        return Size(128, 4, 2, 32, 256, 3, 1e4, 64, 3, 2, patch, 2, 4 * patch, 4096, 1024, 0.08)
    if size == "demo":
        return Size(64, 2, 2, 32, 128, 3, 10.0, 64, 2, 2, 8, 1, 64, 1024, 256, None)
    raise UserError(f"size: unknown tiny size {size!r}; choose test or demo")


def mrope_section(head_dim: int, interleaved: bool) -> list[int]:
    """Rotary pairs of the time, row and column axes; interleaved families want time to have the most."""
    half = head_dim // 2
    time = half - 2 * (half // 3) if interleaved else half // 4
    row = (half - time) // 2
    return [time, row, half - time - row]


@cache
def vocabulary() -> dict[str, int]:
    """Every byte, then each word of the generated worlds (bare and after a space), then tags and special tokens."""
    from tokenizers.pre_tokenizers import ByteLevel

    plain = [*sorted(ByteLevel.alphabet()), *(form for word in WORDS for form in (word, "Ġ" + word)), "Ġ?"]
    return {token: i for i, token in enumerate([*dict.fromkeys(plain), *TAGS, *SPECIAL])}


def build_tokenizer() -> Any:
    """Byte-level tokenizer without merges: a known word is one token, any other text falls back to its bytes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    plain = {t: i for t, i in vocabulary().items() if t not in (*SPECIAL, *TAGS)}
    core = Tokenizer(models.BPE(vocab=plain, merges=[], ignore_merges=True))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_tokens([AddedToken(t, normalized=False) for t in TAGS])
    core.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=EOS, pad_token=PAD, model_max_length=32768, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def config_ids() -> dict[str, int]:
    """Vision token ids as the Qwen-VL configs name them."""
    ids = vocabulary()
    names = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
    names |= {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
    return {field: ids[token] for field, token in names.items()}


def text_sizes(sizes: Size) -> dict[str, Any]:
    """Fields that the text configs of both families have in common."""
    ids = vocabulary()
    return {
        "vocab_size": len(ids),  # no padding rows: a sampled id without a token could not be decoded
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "max_position_embeddings": sizes.max_position,
        "initializer_range": sizes.hidden**-0.5,
        "bos_token_id": None,
        "eos_token_id": ids[EOS],
        "pad_token_id": None,
    }


def build_processor(sizes: Size, processor_class: type) -> Any:
    """Image and video processor with the checkpoint's patch sizes, around the tokenizer."""
    from transformers import Qwen2VLImageProcessor, Qwen2VLVideoProcessor, Qwen3VLVideoProcessor

    area = (2 * sizes.patch) ** 2
    shared = {"patch_size": sizes.patch, "temporal_patch_size": sizes.temporal, "merge_size": 2}
    shared |= {"image_mean": [0.5] * 3, "image_std": [0.25] * 3}
    shared["size"] = {"shortest_edge": 4 * area, "longest_edge": sizes.max_visual_tokens * area}
    video = Qwen3VLVideoProcessor if processor_class.__name__.startswith("Qwen3") else Qwen2VLVideoProcessor
    return processor_class(
        image_processor=Qwen2VLImageProcessor(**shared),
        tokenizer=build_tokenizer(),
        video_processor=video(**shared),
        chat_template=TEMPLATE,
    )


def write(folder: str, sizes: Size, seed: int, config: Any, model_class: type, processor_class: type) -> None:
    """Draw the weights from `seed` (float32) and save model, tokenizer, processor and generation config."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    target = Path(folder)
    if target.exists() and any(target.iterdir()):
        raise UserError(f"{folder}: the folder is not empty; give a new one for the tiny checkpoint")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).float()
        if sizes.std is not None:
            for parameter in model.parameters():
                if parameter.dim() >= 2:
                    torch.nn.init.normal_(parameter, std=sizes.std)
    ids = vocabulary()
    disable_progress_bar()
    model.generation_config.eos_token_id = ids[EOS]
    model.generation_config.pad_token_id = ids[PAD]
    model.save_pretrained(target)
    build_processor(sizes, processor_class).save_pretrained(target)
