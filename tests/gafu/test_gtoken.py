"""GToken encoder and decoder: places, shapes, and equality with a loop-written reference."""

import math

import pytest
import torch

from gafu.config import GTokenSettings
from gafu.gtoken import Block, GTokenDecoder, GTokenEncoder
from gafu.rope import cell_centres, plane_angles, rotate

SMALL = GTokenSettings(width=16, layers=2, heads=2, ffn=24, grid=(2, 3), rope_base=10.0)


def test_the_paper_sizes_are_the_default():
    with torch.device("meta"):
        encoder, decoder = GTokenEncoder(GTokenSettings(), 8, 4096), GTokenDecoder(GTokenSettings(), 8, 4096)
        assert encoder(torch.zeros(2, 24, 24, 8)).shape == (2, 256, 4096)
        assert decoder(torch.zeros(2, 256, 4096), (24, 24)).shape == (2, 24, 24, 8)
    assert encoder.translate.queries.shape == (256, 1024) and decoder.translate.queries.shape == (1, 1024)
    assert len(encoder.translate.blocks) == len(decoder.translate.blocks) == 6
    assert encoder.translate.blocks[0].ffn[0].out_features == 4096 and encoder.translate.blocks[0].heads == 8


def test_a_query_sits_at_the_centre_of_its_cell():
    assert cell_centres((3, 2), (3, 2)).tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [2, 0], [2, 1]]
    assert cell_centres((2, 1), (4, 4)).tolist() == [[0.5, 1.5], [2.5, 1.5]]  # covers rows 0–1, 2–3 and all columns
    assert cell_centres((16, 16), (24, 24))[17].tolist() == [1.75, 1.75]


def test_rotation_against_a_loop():
    torch.manual_seed(0)
    places, x = torch.rand(5, 2).double() * 9, torch.randn(3, 2, 5, 8, dtype=torch.float64)
    turned = rotate(x, plane_angles(places, 8, 10.0))
    for t in range(5):
        for pair in range(4):
            axis, index = divmod(pair, 2)
            angle = float(places[t, axis]) * 10.0 ** (-index / 2)
            a, b = x[:, :, t, 2 * pair], x[:, :, t, 2 * pair + 1]
            torch.testing.assert_close(turned[:, :, t, 2 * pair], a * math.cos(angle) - b * math.sin(angle))
            torch.testing.assert_close(turned[:, :, t, 2 * pair + 1], a * math.sin(angle) + b * math.cos(angle))
    with pytest.raises(ValueError, match="multiple of 4"):
        plane_angles(places, 6, 10.0)


def _reference(block: Block, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """One layer, a sample and a head at a time."""
    out, size = [], x.shape[-1] // block.heads
    for sample in x:
        normed = block.norm_attention(sample)
        heads = []
        for head in range(block.heads):
            part = slice(head * size, (head + 1) * size)
            q, k = rotate(block.q(normed)[:, part], angles), rotate(block.k(normed)[:, part], angles)
            heads.append(torch.softmax(q @ k.T / math.sqrt(size), -1) @ block.v(normed)[:, part])
        sample = sample + block.o(torch.cat(heads, -1))
        out.append(sample + block.ffn(block.norm_ffn(sample)))
    return torch.stack(out)


def test_encoder_and_decoder_against_a_plain_reference_with_gradients():
    torch.manual_seed(0)
    encoder, decoder = GTokenEncoder(SMALL, 5, 12).double(), GTokenDecoder(SMALL, 5, 12).double()
    latents = torch.randn(2, 4, 6, 5, dtype=torch.float64)
    tokens = encoder(latents)
    back = decoder(tokens, (4, 6))
    assert tokens.shape == (2, 6, 12) and back.shape == (2, 4, 6, 5)

    source, target = cell_centres((4, 6), (4, 6)), cell_centres((2, 3), (4, 6))
    x = torch.cat([encoder.translate.enter(latents.flatten(1, 2)), encoder.translate.queries.expand(2, 6, 16)], 1)
    angles = plane_angles(torch.cat([source, target]), 8, 10.0)
    for block in encoder.translate.blocks:
        x = _reference(block, x, angles)
    wanted = encoder.translate.leave(encoder.translate.norm(x[:, 24:]))
    torch.testing.assert_close(tokens, wanted)
    parameters = list(encoder.parameters())
    ours = torch.autograd.grad(tokens.square().sum(), parameters)
    theirs = torch.autograd.grad(wanted.square().sum(), parameters)
    torch.testing.assert_close(ours, theirs)

    x = torch.cat([decoder.translate.enter(tokens), decoder.translate.queries.expand(2, 24, 16)], 1)
    angles = plane_angles(torch.cat([target, source]), 8, 10.0)
    for block in decoder.translate.blocks:
        x = _reference(block, x, angles)
    torch.testing.assert_close(back, decoder.translate.leave(decoder.translate.norm(x[:, 6:])).view(2, 4, 6, 5))


def test_images_do_not_see_one_another():
    torch.manual_seed(0)
    encoder, latents = GTokenEncoder(SMALL, 5, 12).double(), torch.randn(3, 4, 6, 5, dtype=torch.float64)
    for one in range(3):
        torch.testing.assert_close(encoder(latents)[one], encoder(latents[one : one + 1])[0])


def test_locality_makes_attention_peak_at_its_own_place():
    torch.manual_seed(0)
    near = {}
    for locality in (0.0, 12.0):
        block = Block(GTokenSettings(width=32, layers=1, heads=1, ffn=8, rope_base=10.0, locality=locality))
        for linear in (block.q, block.k):
            torch.nn.init.zeros_(linear.weight)
            if not locality:
                torch.nn.init.zeros_(linear.bias)
        places = cell_centres((6, 6), (6, 6))
        angles = plane_angles(places, 32, 10.0)
        q = rotate(block.q(torch.zeros(36, 32)), angles.float())
        k = rotate(block.k(torch.zeros(36, 32)), angles.float())
        scores = q @ k.T / 32**0.5
        torch.testing.assert_close(scores.diagonal(), torch.full((36,), locality))
        near[locality] = torch.softmax(scores, -1).diagonal().mean()
        if locality:
            assert (scores.argmax(-1) == torch.arange(36)).all()
    assert near[12.0] > 8 * near[0.0]


def test_a_width_that_does_not_split_is_refused():
    with pytest.raises(ValueError, match="no multiple of 4; change width or heads"):
        GTokenSettings(width=20, heads=4)
