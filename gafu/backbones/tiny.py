"""A tiny random Janus checkpoint: model from config, tokenizer and processor built here, nothing downloaded."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.errors import UserError

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
IMAGE, IMAGE_START, IMAGE_END = "<image_placeholder>", "<begin_of_image>", "<end_of_image>"
USER, ASSISTANT = "<|User|>", "<|Assistant|>"
SPECIAL = (PAD, BOS, EOS, IMAGE, IMAGE_START, IMAGE_END, USER, ASSISTANT)
_WORDS = (
    "what which how many where is are the a an of in on at to and or there color colour shape number side dot dots bar "
    "background place row column object circle square triangle cross star red green blue yellow purple orange white "
    "black left right above below top bottom upper lower horizontal vertical first second third fourth yes no true "
    "false True False Yes No zero one two three four five six seven eight nine A B C D"
)
WORDS = tuple(dict.fromkeys(_WORDS.split()))
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}<|User|>: {% else %}<|Assistant|>: {% endif %}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<image_placeholder>\n{% elif c['type'] == 'text' %}{{ c['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{% if m['role'] == 'user' %}\n\n{% else %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|>:{% endif %}"
)


@dataclass(frozen=True)
class Size:
    """Sizes of a tiny Janus; one patch size serves both pathways, as in Janus-Pro."""

    image: int = 64
    patch: int = 8
    """A power of two: the VQ halves the picture log2(patch) times."""
    hidden: int = 64
    layers: int = 4
    heads: int = 4
    intermediate: int = 128
    vision_hidden: int = 32
    vision_layers: int = 2
    vq_channels: int = 32
    """A multiple of 32 (group normalisation)."""
    vq_blocks: int = 1
    codes: int = 64
    code_dim: int = 8
    rope_theta: float = 10_000.0


def vocabulary() -> dict[str, int]:
    """Token → id: special tokens, the 256 bytes, whole words with and without a space before them."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [form for word in WORDS for form in (word, "Ġ" + word)]
    return {token: i for i, token in enumerate(dict.fromkeys([*SPECIAL, *alphabet, *words]))}


def build_tokenizer() -> Any:
    """Byte-level tokenizer: a known word is one token, any other text falls back to its bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE(vocab=vocabulary(), merges=[], ignore_merges=True))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(SPECIAL))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        extra_special_tokens={"image_token": IMAGE, "boi_token": IMAGE_START, "eoi_token": IMAGE_END},
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def write_janus(folder: str | Path, size: Size = Size(), seed: int = 0) -> None:
    """Draw a Janus's weights from `seed` (float32) and save model, tokenizer and processor into a new folder.

    UserError: the folder is not empty, or the sizes do not fit each other.
    """
    import torch
    from transformers import JanusConfig, JanusForConditionalGeneration, JanusImageProcessor, JanusProcessor

    target = Path(folder)
    if target.exists() and any(target.iterdir()):
        raise UserError(f"{folder}: the folder is not empty; give a new one for the tiny checkpoint")
    depth = size.patch.bit_length()
    if 2 ** (depth - 1) != size.patch or size.image % size.patch or size.vq_channels % 32:
        raise UserError(
            f"tiny Janus: image {size.image}, patch {size.patch}, vq_channels {size.vq_channels}; patch should be a "
            "power of two that divides image, and vq_channels a multiple of 32: change them"
        )
    ids = vocabulary()
    tokens = (size.image // size.patch) ** 2
    text = {"model_type": "llama", "vocab_size": len(ids), "hidden_size": size.hidden, "rope_theta": size.rope_theta}
    text |= {"intermediate_size": size.intermediate, "num_hidden_layers": size.layers}
    text |= {"num_attention_heads": size.heads, "num_key_value_heads": size.heads, "max_position_embeddings": 4096}
    text |= {"bos_token_id": ids[BOS], "eos_token_id": ids[EOS], "pad_token_id": ids[PAD]}
    text |= {"initializer_range": size.hidden**-0.5}
    vision = {"hidden_size": size.vision_hidden, "num_hidden_layers": size.vision_layers, "num_attention_heads": 4}
    vision |= {"image_size": size.image, "patch_size": size.patch, "projection_dim": size.hidden, "mlp_ratio": 2.0}
    vision |= {"num_image_tokens": tokens}
    vq = {"base_channels": size.vq_channels, "channel_multiplier": [1] * depth, "num_res_blocks": size.vq_blocks}
    vq |= {"embed_dim": size.code_dim, "latent_channels": size.vq_channels, "num_embeddings": size.codes}
    vq |= {"projection_dim": size.hidden, "image_token_embed_dim": size.hidden}
    config = JanusConfig(
        text_config=text, vision_config=vision, vq_config=vq, image_token_id=ids[IMAGE], tie_word_embeddings=False
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = JanusForConditionalGeneration(config).float()
    model.save_pretrained(target)
    images = JanusImageProcessor(
        size={"height": size.image, "width": size.image}, min_size=4, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    JanusProcessor(images, build_tokenizer(), chat_template=TEMPLATE, num_image_tokens=tokens).save_pretrained(target)
