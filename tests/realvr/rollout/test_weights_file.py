"""Weights on their way: checksum, names, shapes; and the source that the native back ends read."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from launch.errors import UserError
from realvr.rollout.weights_file import check_weights, checkpoint_shapes, file_checksum, tensor_shapes, write_weights

SHAPES = {"model.a": (2, 3), "model.b": (4,), "visual.c": (5,), "visual.d": (1,)}


def tensors(without: str = "", **changes: torch.Tensor) -> dict[str, torch.Tensor]:
    made = {name: torch.zeros(shape) for name, shape in SHAPES.items() if not without or not name.startswith(without)}
    return made | changes


@pytest.mark.parametrize("without", ["", "visual."])
def test_whole_model_with_or_without_the_tower_is_accepted(tmp_path: Path, without: str) -> None:
    path = tmp_path / "w.safetensors"
    checksum = write_weights(path, tensors(without))
    check_weights(path, checksum, SHAPES, "visual.")
    assert set(load_file(path)) == set(tensors(without)) == set(tensor_shapes(path))


@pytest.mark.parametrize(
    ("held", "message"),
    [
        (tensors("model.a"), "lacks model.a"),
        (tensors("visual.c"), "lacks visual.c"),  # half a tower is not "without the tower"
        (tensors(**{"lm_head": torch.zeros(1)}), "unknown lm_head"),
        (tensors(**{"model.a": torch.zeros(3, 2)}), "another shape for model.a"),
    ],
)
def test_partial_or_foreign_weights_are_refused(tmp_path: Path, held: dict[str, torch.Tensor], message: str) -> None:
    path = tmp_path / "w.safetensors"
    with pytest.raises(UserError, match=message):
        check_weights(path, write_weights(path, held), SHAPES, "visual.")


def test_changed_or_missing_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    checksum = write_weights(path, tensors())
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1  # one bit of one weight
    path.write_bytes(raw)
    assert file_checksum(path) != checksum
    with pytest.raises(UserError, match="checksum"):
        check_weights(path, checksum, SHAPES, "visual.")
    path.unlink()
    with pytest.raises(UserError, match="not found"):
        check_weights(path, checksum, SHAPES, "visual.")


def test_shapes_of_a_checkpoint(tiny_qwen25: Path, tmp_path: Path) -> None:
    held = load_file(tiny_qwen25 / "model.safetensors")
    assert checkpoint_shapes(tiny_qwen25) == {name: tuple(t.shape) for name, t in held.items()}
    with pytest.raises(UserError, match=r"no \*\.safetensors"):
        checkpoint_shapes(tmp_path)
