"""LPIPS on VGG16, with a record of whose weights it has: what is not there is never replaced in silence."""

import re
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import normalize

from launch.errors import UserError

WIDTHS = (64, 64, "pool", 128, 128, "pool", 256, 256, 256, "pool", 512, 512, 512, "pool", 512, 512, 512)
TAPS = (3, 8, 15, 22, 29)  # the last activation of each of the five stages
CACHED = "vgg16-397923af.pth"  # torchvision's name of its ImageNet VGG16


def _trunk(divisor: int = 1) -> nn.Sequential:
    """VGG16's features, index by index as torchvision counts them; `divisor` makes them narrower."""
    modules: list[nn.Module] = []
    before = 3
    for width in WIDTHS:
        if width == "pool":
            modules.append(nn.MaxPool2d(2))
            continue
        modules += [nn.Conv2d(before, width // divisor, 3, padding=1), nn.ReLU()]
        before = width // divisor
    return nn.Sequential(*modules)


class LPIPS(nn.Module):
    """Perceptual distance of Zhang et al. (2018); frozen. `source` says where its weights come from."""

    def __init__(self, source: str, divisor: int = 1):
        super().__init__()
        self.source = source
        self.features = _trunk(divisor)
        channels = [self.features[tap - 1].out_channels for tap in TAPS]
        self.heads = nn.ParameterList(nn.Parameter(torch.ones(c) / c) for c in channels)
        self.register_buffer("shift", torch.tensor([-0.030, -0.088, -0.188]).view(1, 3, 1, 1))
        self.register_buffer("scale", torch.tensor([0.458, 0.448, 0.450]).view(1, 3, 1, 1))
        self.requires_grad_(False)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Distance of each pair: a, b [n, 3, H, W] in [-1, 1] → [n]. UserError below 16 pixels a side."""
        if min(a.shape[-2:]) < 16:
            raise UserError(
                f"LPIPS: pictures are {a.shape[-2]}×{a.shape[-1]} pixels, it wants 16 a side; set alignment.lpips to 0"
            )
        x = (torch.cat([a, b]) - self.shift) / self.scale
        total = a.new_zeros(len(a))
        for index, module in enumerate(self.features):
            x = module(x)
            if index in TAPS:
                one, other = normalize(x, dim=1, eps=1e-10).chunk(2)
                weight = self.heads[TAPS.index(index)][:, None, None]
                total = total + ((one - other).square() * weight).sum(1).mean((1, 2))
        return total


def load_lpips(path: str | None = None, allow_random: bool = False, seed: int = 0) -> LPIPS:
    """The first of: the weights at `path`; torchvision's VGG16 in the local cache, with even heads; a random narrow
    trunk, if allowed. Record `.source` with the run: distances of different sources cannot be compared.

    A file at `path` holds trunk and heads, under the names of the `lpips` package or torchvision's
    (`features.0.weight`, …; heads `lin0.model.1.weight` or `lin0.weight`); .pth or .safetensors.

    Raises:
        UserError: a file that is missing or incomplete; nothing found and `allow_random` off.
    """
    if path is not None:
        return _from_file(Path(path))
    cached = Path(torch.hub.get_dir()) / "checkpoints" / CACHED
    if cached.is_file():
        model = LPIPS(f"torchvision VGG16 with even heads ({CACHED})")
        _fill(model, _read(cached), cached, heads=False)
        return model
    if allow_random:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = LPIPS(f"random trunk, an eighth as wide, seed {seed}", divisor=8)
            for module in model.features:
                if isinstance(module, nn.Conv2d):
                    nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                    nn.init.zeros_(module.bias)
        return model
    raise UserError(
        f"alignment.lpips_weights: not given, and {cached} does not exist; give a file with LPIPS weights, set "
        "alignment.lpips to 0, or (tests only) alignment.lpips_random to true"
    )


def _from_file(path: Path) -> LPIPS:
    if not path.is_file():
        raise UserError(f"alignment.lpips_weights: {path} does not exist; give a file with VGG16 trunk and LPIPS heads")
    model = LPIPS(f"file {path.name}")
    _fill(model, _read(path), path, heads=True)
    return model


def _read(path: Path) -> dict[str, torch.Tensor]:
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle, zip and safetensors each raise their own
        reason = str(error).splitlines()[0]
        raise UserError(f"{path}: no readable weights ({reason}); download the file again") from error


def _fill(model: LPIPS, found: dict[str, torch.Tensor], path: Path, heads: bool) -> None:
    named: dict[str, torch.Tensor] = {}
    for name, tensor in found.items():
        trunk = re.fullmatch(r"(?:features|net\.slice\d)\.(\d+)\.(weight|bias)", name)
        head = re.fullmatch(r"lin(\d)\.(?:model\.1\.)?weight", name)
        if trunk:
            named[f"features.{trunk[1]}.{trunk[2]}"] = tensor
        elif head and heads:
            named[f"heads.{head[1]}"] = tensor.flatten()
    for name, parameter in model.named_parameters():
        if not heads and name.startswith("heads."):
            continue
        if name not in named:
            raise UserError(f"{path}: {name} is missing; the file should hold VGG16's features and the LPIPS heads")
        if named[name].shape != parameter.shape:
            raise UserError(
                f"{path}: {name} has shape {tuple(named[name].shape)}, VGG16 wants {tuple(parameter.shape)}; give "
                "VGG16's weights"
            )
        parameter.copy_(named[name])
