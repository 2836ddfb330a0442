"""Stage-1 losses against loops in float64, values and gradients, on one rank and on two."""

import math

import pytest
import torch

from gafu.alignment import BindHead, binding_loss, reconstruction_loss, relation_loss, target_energy
from gafu.config import AlignmentSettings
from gafu.lpips import TAPS, load_lpips
from launch.errors import UserError
from tests.gafu.ranks import on_ranks

SETTINGS = AlignmentSettings()


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _same(ours: torch.Tensor, theirs: torch.Tensor, *inputs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(torch.autograd.grad(ours, inputs), torch.autograd.grad(theirs, inputs))


@pytest.mark.parametrize("n", [1, 2, 3])
def test_reconstruction(n: int):
    lpips = load_lpips(allow_random=True).double()
    predicted, image = _random(n, 3, 32, 32).requires_grad_(), _random(n, 3, 32, 32, seed=1).clamp(-1, 1)
    ours = reconstruction_loss(predicted, image, lpips, SETTINGS, n)
    wanted = 0
    for a, b in zip(predicted, image, strict=True):
        gap = a - b
        wanted = wanted + (gap.abs().sum() + 0.5 * (gap**2).sum()) / gap.numel()
        x, y = ((p - lpips.shift[0]) / lpips.scale[0] for p in (a, b))
        for index, module in enumerate(lpips.features):
            x, y = module(x), module(y)
            if index in TAPS:
                head = lpips.heads[TAPS.index(index)]
                cells = 0
                for i in range(x.shape[1]):
                    for j in range(x.shape[2]):
                        u, v = (t[:, i, j] / t[:, i, j].norm().clamp(min=1e-10) for t in (x, y))
                        cells = cells + (head * (u - v) ** 2).sum()
                wanted = wanted + 0.5 * cells / (x.shape[1] * x.shape[2])
    _same(ours, wanted / n, predicted)


def test_lpips_is_zero_for_the_same_picture_only():
    lpips, a = load_lpips(allow_random=True).double(), _random(2, 3, 32, 32)
    assert lpips(a, a).tolist() == [0, 0] and (lpips(a, a + 0.1 * _random(2, 3, 32, 32, seed=1)) > 0).all()
    assert not any(p.requires_grad for p in lpips.parameters())
    with pytest.raises(UserError, match="8×8 pixels, it wants 16"):
        lpips(a[..., :8, :8], a[..., :8, :8])


def test_where_lpips_weights_come_from(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    with pytest.raises(UserError, match=r"lpips_weights: not given, and .*vgg16.* does not exist; give a file"):
        load_lpips()
    with pytest.raises(UserError, match="does not exist"):
        load_lpips(str(tmp_path / "none.pth"), allow_random=True)
    assert load_lpips(allow_random=True).source.startswith("random trunk")
    (tmp_path / "bad.pth").write_bytes(b"no weights")
    with pytest.raises(UserError, match=r"bad.pth: no readable weights"):
        load_lpips(str(tmp_path / "bad.pth"))

    from gafu.lpips import LPIPS

    state = {k: torch.randn_like(v) for k, v in LPIPS("x").state_dict().items() if k.startswith("features")}
    (tmp_path / "checkpoints").mkdir()
    torch.save(state, tmp_path / "checkpoints" / "vgg16-397923af.pth")
    found = load_lpips()
    assert found.source.startswith("torchvision VGG16 with even heads")
    torch.testing.assert_close(found.features[28].weight, state["features.28.weight"])
    torch.save(state, tmp_path / "headless.pth")
    with pytest.raises(UserError, match=r"headless.pth: heads.0 is missing"):
        load_lpips(str(tmp_path / "headless.pth"))
    stage = {0: 1, 2: 1, 5: 2, 7: 2, 10: 3, 12: 3, 14: 3, 17: 4, 19: 4, 21: 4, 24: 5, 26: 5, 28: 5}
    packaged = {k.replace("features", f"net.slice{stage[int(k.split('.')[1])]}"): v for k, v in state.items()}
    packaged |= {f"lin{i}.model.1.weight": torch.rand(1, c, 1, 1) for i, c in enumerate((64, 128, 256, 512, 512))}
    torch.save(packaged, tmp_path / "whole.pth")
    found = load_lpips(str(tmp_path / "whole.pth"))
    assert found.source == "file whole.pth"
    torch.testing.assert_close(found.heads[4].detach(), packaged["lin4.model.1.weight"].flatten())
    torch.testing.assert_close(found.features[0].bias, state["features.0.bias"])


def test_lpips_with_a_weight_must_be_there():
    with pytest.raises(UserError, match="set it to 0"):
        reconstruction_loss(_random(1, 3, 16, 16), _random(1, 3, 16, 16), None, SETTINGS, 1)
    assert reconstruction_loss(_random(1, 3, 16, 16), _random(1, 3, 16, 16), None, AlignmentSettings(lpips=0), 1) == 0


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("by_energy", [False, True])
def test_binding(n: int, by_energy: bool):
    head, tokens, target = BindHead(6, 4).double(), _random(n, 12, 6).requires_grad_(), _random(n, 3, 4, 4, seed=1)
    target.requires_grad_()
    ours = binding_loss(head, tokens, target, n, target_energy(target) if by_energy else None)
    wanted, energy = 0, 0
    for a in range(n):
        for i in range(3):
            for j in range(4):
                gap = head.project.weight @ tokens[a, 4 * i + j] - target[a, i, j].detach()
                wanted = wanted + (gap**2).sum() / 12 / n
                energy = energy + float((target[a, i, j] ** 2).sum()) / 12 / n
    _same(ours, wanted / (energy + 1e-6) if by_energy else wanted, tokens, head.project.weight)
    assert target.grad is None and torch.autograd.grad(ours, target, allow_unused=True)[0] is None


def _pairs(nodes: torch.Tensor) -> torch.Tensor:
    found = [a @ b / (a.norm() * b.norm()) for i, a in enumerate(nodes) for j, b in enumerate(nodes) if i != j]
    found = torch.stack(found)
    return found - found.sum() / len(found)


def _apart(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    return 1 - (ours @ theirs) / (ours.norm() * theirs.norm())


def _relation_reference(tokens: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """G on 4×4, U on 8×8, scales 2 and 4: windows written out."""
    terms = []
    for side in (2, 4):
        scale = 0
        for g_image, u_image in zip(tokens.unflatten(1, (4, 4)), u.unflatten(1, (8, 8)), strict=True):
            nodes = []
            for plane, size in ((g_image, 4), (u_image, 8)):
                step = size // side
                cells = [plane[i : i + step, j : j + step] for i in range(0, size, step) for j in range(0, size, step)]
                nodes.append(torch.stack([cell.sum((0, 1)) / step**2 for cell in cells]))
            scale = scale + _apart(_pairs(nodes[0]), _pairs(nodes[1])) / len(tokens)
        terms.append(scale)
    if len(tokens) >= 3:
        terms.append(_apart(_pairs(tokens.mean(1)), _pairs(u.mean(1))))
    return sum(terms) / len(terms)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_relations(n: int):
    tokens, u = _random(n, 16, 6).requires_grad_(), _random(n, 64, 9, seed=1).requires_grad_()
    ours = relation_loss(tokens, (4, 4), u, (8, 8), (2, 4))
    assert ours.images == n
    _same(ours.loss, _relation_reference(tokens, u.detach()), tokens)
    assert torch.autograd.grad(ours.loss, u, allow_unused=True)[0] is None


def test_relations_ignore_scale_and_have_a_minimum():
    u = _random(4, 64, 6)
    assert abs(float(relation_loss(3 * u, (8, 8), u, (8, 8), (4, 8)).loss)) < 1e-9
    assert math.isfinite(float(relation_loss(torch.zeros(4, 64, 6), (8, 8), u, (8, 8), (4, 8)).loss))


def _share(rank: int, world: int, per_rank: list[int]) -> dict[str, torch.Tensor]:
    n = sum(per_rank)
    mine = slice(sum(per_rank[:rank]), sum(per_rank[: rank + 1]))
    weight = _random(6, 6, seed=2).requires_grad_()
    tokens, u, target = (_random(n, 16, d, seed=s)[mine] for d, s in ((6, 0), (6, 1), (4, 3)))
    relation = relation_loss(tokens @ weight, (4, 4), u, (4, 4), (2, 4))
    head = BindHead(6, 4).double()
    torch.nn.init.constant_(head.project.weight, 0.3)
    bound = binding_loss(head, tokens @ weight, target.unflatten(1, (4, 4)), n, target_energy(target))
    loss = relation.loss + bound
    return {"loss": loss.detach(), "gradient": torch.autograd.grad(loss, weight)[0], "images": relation.images}


@pytest.mark.parametrize("per_rank", [[2, 2], [1, 3], [1, 1]])
def test_two_ranks_add_up_to_one(per_rank: list[int], tmp_path):
    one = _share(0, 1, [sum(per_rank)])
    two = on_ranks(2, _share, tmp_path, per_rank)
    assert [share["images"] for share in two] == [sum(per_rank)] * 2
    for key in ("loss", "gradient"):
        torch.testing.assert_close(sum(share[key] for share in two), one[key])
