"""A checkpoint without latent tokens gets them; one that has them is left alone."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

from launch.errors import UserError
from realvr.families.add_tokens import add_tokens
from realvr.families.base import END, LATENT, START


def without(checkpoint: Path, folder: Path) -> Path:
    """The same checkpoint as if it had never had latent tokens (they are the last of its vocabulary)."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    ids = tokenizer.convert_tokens_to_ids([START, LATENT, END])
    model = AutoModelForImageTextToText.from_pretrained(checkpoint)
    assert ids == list(range(len(tokenizer) - 3, len(tokenizer)))
    model.resize_token_embeddings(len(tokenizer) - 3)
    model.save_pretrained(folder)
    for name in ("processor_config.json", "tokenizer_config.json", "chat_template.jinja"):
        if (checkpoint / name).exists():
            (folder / name).write_text((checkpoint / name).read_text())
    content = json.loads((checkpoint / "tokenizer.json").read_text())
    content["added_tokens"] = [t for t in content["added_tokens"] if t["id"] not in ids]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def test_tokens_are_added_at_the_mean(tiny_qwen25: Path, tmp_path: Path) -> None:
    bare = without(tiny_qwen25, tmp_path / "bare")
    ids = add_tokens(str(bare), tmp_path / "latent")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "latent")
    assert tokenizer(f"{START}{LATENT}{END}", add_special_tokens=False)["input_ids"] == ids
    before = AutoModelForImageTextToText.from_pretrained(bare).get_input_embeddings().weight
    after = AutoModelForImageTextToText.from_pretrained(tmp_path / "latent")
    weight = after.get_input_embeddings().weight
    assert torch.equal(weight[: min(ids)], before)
    torch.testing.assert_close(weight[ids], before.mean(0).expand(3, -1))
    torch.testing.assert_close(after.lm_head.weight[ids], after.lm_head.weight[: min(ids)].mean(0).expand(3, -1))


def test_refuses_what_has_them_and_a_used_folder(tiny_qwen25: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="already"):
        add_tokens(str(tiny_qwen25), tmp_path / "new")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    with pytest.raises(UserError, match="not empty"):
        add_tokens(str(tiny_qwen25), tmp_path / "used")
