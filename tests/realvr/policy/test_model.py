"""Loading, taking apart, names and adapters."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from launch.errors import UserError
from realvr.config import LoraSettings, ModelSettings
from realvr.policy.model import adapters_off, load_policy


def settings(path: Path, **changes) -> ModelSettings:
    return ModelSettings(path=str(path), dtype="float32", **changes)


@pytest.fixture(params=["tiny_qwen25", "tiny_qwen3"])
def checkpoint(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


def saved(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path / "model.safetensors")


def test_names_and_tensors_are_the_checkpoint_s(checkpoint: Path) -> None:
    policy = load_policy(settings(checkpoint))
    ours = dict(policy.checkpoint_tensors(policy.root.named_parameters())) | dict(policy.tower_tensors())
    theirs = saved(checkpoint)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[n], theirs[n]) for n in theirs)


def test_only_the_language_side_trains(checkpoint: Path) -> None:
    policy = load_policy(settings(checkpoint))
    assert all(p.requires_grad for p in policy.root.parameters())
    assert not any(p.requires_grad for p in policy.tower.parameters())
    assert not any("visual" in n for n, _ in policy.root.named_parameters())
    assert not policy.tower.training and policy.root.training


def test_plain_forwards_still_work(checkpoint: Path) -> None:
    """Without a tree the registered attention is transformers' own, padding mask included."""
    from transformers import AutoModelForImageTextToText

    policy = load_policy(settings(checkpoint))
    whole = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32)
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    with torch.no_grad():
        ours = policy.root.language_model(input_ids=ids, attention_mask=mask).last_hidden_state
        theirs = whole.model.language_model(input_ids=ids, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(ours[mask.bool()], theirs[mask.bool()])


def test_lora_trains_adapters_and_merges(tiny_qwen25: Path) -> None:
    lora = LoraSettings(r=4, alpha=6)
    policy = load_policy(settings(tiny_qwen25, lora=lora))
    trained = [n for n, p in policy.root.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in n for n in trained)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in policy.root.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    merged = dict(policy.checkpoint_tensors(policy.root.named_parameters()))
    assert merged.keys() | dict(policy.tower_tensors()).keys() == saved(tiny_qwen25).keys()

    plain = load_policy(settings(tiny_qwen25))
    ids = torch.arange(5, 15)[None]

    def states(root):
        with torch.no_grad():
            return root.language_model(input_ids=ids).last_hidden_state

    with adapters_off(policy.root):
        torch.testing.assert_close(states(policy.root), states(plain.root))
    adapted = states(policy.root)
    assert (adapted - states(plain.root)).abs().max() > 1e-2
    with torch.no_grad():
        for name, parameter in plain.root.named_parameters():
            parameter.copy_(merged[plain.checkpoint_name(name)])
    torch.testing.assert_close(states(plain.root), adapted, rtol=1e-4, atol=1e-5)


def test_missing_adapter_piece_is_an_error(tiny_qwen25: Path) -> None:
    policy = load_policy(settings(tiny_qwen25, lora=LoraSettings(r=2)))
    named = [(n, p) for n, p in policy.root.named_parameters() if "layers.1.mlp.up_proj.lora_B" not in n]
    with pytest.raises(ValueError, match=r"missing for language_model\.layers\.1\.mlp\.up_proj"):
        list(policy.checkpoint_tensors(named))


def test_unknown_lora_target(tiny_qwen25: Path) -> None:
    with pytest.raises((UserError, ValueError), match="no_such_proj"):
        load_policy(settings(tiny_qwen25, lora=LoraSettings(targets=("no_such_proj",))))


def broken(source: Path, target: Path, edit) -> Path:
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    edit(config)
    (target / "config.json").write_text(json.dumps(config))
    return target


def test_weights_of_another_model(tiny_qwen25: Path, tmp_path: Path) -> None:
    def deeper(config):
        config["text_config"]["num_hidden_layers"] = 4
        config["text_config"].pop("layer_types", None)

    path = broken(tiny_qwen25, tmp_path / "deeper", deeper)
    with pytest.raises(UserError, match=r"weights are missing, .*layers\.3"):
        load_policy(settings(path))


def test_wider_than_its_weights(tiny_qwen25: Path, tmp_path: Path) -> None:
    path = broken(tiny_qwen25, tmp_path / "wider", lambda c: c["text_config"].update(intermediate_size=300))
    with pytest.raises(UserError, match="restore the checkpoint"):
        load_policy(settings(path))


def test_attention_dropout_is_refused(tiny_qwen25: Path, tmp_path: Path) -> None:
    path = broken(tiny_qwen25, tmp_path / "dropout", lambda c: c["text_config"].update(attention_dropout=0.1))
    with pytest.raises(UserError, match="attention_dropout"):
        load_policy(settings(path))


def test_rounded_rotary_frequencies_are_refused(tiny_qwen25: Path) -> None:
    """An engine that casts every buffer to bfloat16 would turn positions by radians."""
    from realvr.policy.kv import KVView, Plan

    policy = load_policy(settings(tiny_qwen25))
    policy.root.bfloat16()
    with pytest.raises(ValueError, match="inv_freq"):
        policy.root.run(torch.zeros(1, 1, 128), torch.zeros(3, 1, 1), KVView(Plan((0,), 1, ()), [()] * 3))


def test_tied_embeddings_are_one_parameter(tiny_qwen25: Path, tmp_path: Path) -> None:
    """As in the small checkpoints: the head's weight is the embeddings', saved and trained once."""
    from safetensors.torch import save_file

    path = broken(tiny_qwen25, tmp_path / "tied", lambda c: c.update(tie_word_embeddings=True))
    kept = {n: t for n, t in saved(path).items() if n != "lm_head.weight"}
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})
    policy = load_policy(settings(path))
    assert policy.root.lm_head.weight is policy.root.language_model.embed_tokens.weight
    ours = dict(policy.checkpoint_tensors(policy.root.named_parameters())) | dict(policy.tower_tensors())
    assert ours.keys() == kept.keys()
