"""The probe against a plain forward of the whole sequence, and against the reference engine."""

from dataclasses import replace

import pytest
import torch

from launch.errors import UserError
from realvr.config import LatentSettings, ModelSettings, RolloutSettings, SourceSettings
from realvr.data.sources import open_source
from realvr.evaluate.probe import CLOSE, OPEN, Probe
from realvr.rollout.hf_engine import HfEngine
from realvr.rollout.records import Sampling

K = 3


@pytest.fixture(scope="module", params=["tiny_qwen25", "tiny_qwen3"])
def path(request):
    return str(request.getfixturevalue(request.param))


@pytest.fixture(scope="module")
def probe(path):
    return Probe(path, "float32", 4, 64)


@pytest.fixture(scope="module")
def examples():
    """Prompts of unequal length (the batch is padded): one image, a longer question, two images, none."""
    one, longer, two, none = open_source(SourceSettings(kind="shapes", size=40, seed=2))[:4]
    longer = replace(longer, question="is the circle " + longer.question)
    return [one, longer, replace(two, images=two.images + one.images), replace(none, images=(), boxes=())]


def whole(probe, example, latents, answer):
    """Log-probability of the answer and attention [layers, heads, T, T] by one uncached forward of one sequence."""
    prompt = probe.builder.build(example)
    span = [probe.ids.start, *[probe.ids.latent] * len(latents), probe.ids.end]
    branch = probe.tokenizer(f"{OPEN}{answer}{CLOSE}", add_special_tokens=False).input_ids
    ids = torch.cat([prompt.input_ids, torch.tensor([*span, *branch])])
    rows = probe.model.get_input_embeddings()(ids)
    visual, extra = ids == probe.ids.image, {}
    if prompt.pixels is not None:
        seen = probe.family.visual_features(probe.parts.tower, prompt.pixels, prompt.grid_thw)
        rows[visual] = seen.embeds
        extra = probe.family.language_inputs(seen, visual[None])
    rows[ids == probe.ids.latent] = latents
    more = torch.arange(len(span) + len(branch)) + prompt.next_position
    position = torch.cat([prompt.positions, more.expand(3, -1)], dim=1)[:, None]
    out = probe.parts.language_model(inputs_embeds=rows[None], position_ids=position, output_attentions=True, **extra)
    logits = probe.parts.lm_head(out.last_hidden_state)[0].float()
    logits[:, probe.banned] = float("-inf")
    content = [len(ids) - len(branch) + i for i in range(1, len(branch) - 1)]
    logp = sum(float(logits[i - 1].log_softmax(-1)[ids[i]]) for i in content)
    return logp, torch.stack(out.attentions)[:, 0][:, :, content], len(prompt.input_ids), visual


@torch.inference_mode()
def test_branches_equal_one_plain_forward(probe, examples):
    context = probe.context(examples)
    assert len({len(p.input_ids) for p in context.prompts}) == 4
    z = probe.latents(context, K)
    answers = [[e.answer, "seventeen squares"] for e in examples]  # an unknown word is many tokens
    got = probe.branches(probe.prime(context, z), answers, readout=True)
    for b, example in enumerate(examples):
        for i, answer in enumerate(answers[b]):
            logp, attention, length, visual = whole(probe, example, z[b], answer)
            assert got.logp[b, i].item() == pytest.approx(logp, abs=2e-4)
            mean = attention.mean((0, 1, 2))
            assert torch.allclose(got.latents[b, i], mean[length + 1 : length + 1 + K], atol=1e-6)
            padded = got.image[b, i][-length:]
            assert torch.allclose(padded[visual[:length]], mean[:length][visual[:length]], atol=1e-6)
            assert got.image[b, i].sum().item() == pytest.approx(mean[visual].sum().item(), abs=1e-5)


@torch.inference_mode()
def test_latents_are_those_of_the_reference_engine(path, probe, examples):
    model = ModelSettings(path=path, dtype="float32", max_visual_tokens=64)
    engine = HfEngine(model, LatentSettings(k=K, open="forced", close="forced"), RolloutSettings(engine="hf"), 0)
    groups = engine.generate(examples, Sampling(n=1, temperature=0.0, max_new_tokens=K + 4), [0] * len(examples))
    z = probe.latents(probe.context(examples), K)
    for group, own in zip(groups, z, strict=True):
        assert torch.allclose(own, torch.from_numpy(group.rollouts[0].latents), atol=1e-4)


@torch.inference_mode()
def test_a_greedy_answer_is_the_likeliest_continuation(probe, examples):
    context = probe.context(examples)
    primed = probe.prime(context, probe.latents(context, K))
    for text, more in zip(probe.answer(primed, limit=1), probe.answer(primed, limit=3), strict=True):
        assert more.startswith(text)
    every = ["red", "green", "blue", "circle", "left", "none"]
    scores = probe.branches(primed, [every] * len(examples)).logp
    assert torch.isfinite(scores).all() and scores.shape == (4, 6)
    best = probe._logits(primed.state)
    assert torch.isinf(best[:, probe.banned]).all()


def test_markers_alone_and_an_empty_answer(probe, examples):
    context = probe.context(examples)
    bare = probe.prime(context, None)
    assert bare.k == 0 and torch.isfinite(probe.branches(bare, [["red"]] * 4).logp).all()
    with pytest.raises(UserError, match="empty answer cannot be scored"):
        probe.branches(bare, [[" "]] * 4)
