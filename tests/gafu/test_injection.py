"""Injection: identity at the start, a loop-written reference, own-call binding, cached generation, LoRA, baselines."""

import pytest
import torch

from gafu.backbones import load_backbone
from gafu.backbones.base import Adapter, Row
from gafu.config import BackboneSettings, InjectionSettings, LoraSettings, PreferenceSettings
from gafu.injection import Injection, add_lora, chosen_layers, lora_off
from gafu.preference import SplitGradients, answer_ce, donors, forward_kl, mask_understanding, preference
from launch.errors import UserError
from tests.gafu.adapter_suite import ROWS, pictures

GRID = (2, 3)
KINDS = ("text", "visual", "entry")


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _load(folder, dtype: str = "float32") -> Adapter:
    return load_backbone(BackboneSettings(path=str(folder), dtype=dtype, gradient_checkpointing=False))


@pytest.fixture(scope="module")
def adapter(tiny_janus) -> Adapter:
    return _load(tiny_janus)


@pytest.fixture(scope="module")
def u(adapter) -> torch.Tensor:
    return adapter.understanding_tokens(adapter.preprocess(pictures(2)).understanding)


def _injection(adapter: Adapter, awake: bool = True, **settings) -> Injection:
    """awake: what starts at zero is drawn instead."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        injection = Injection(InjectionSettings(**settings), adapter.geometry, GRID)
        for name, parameter in injection.named_parameters():
            if awake and name.endswith(("o.weight", "enter.weight")):
                torch.nn.init.normal_(parameter, std=0.2)
    return injection


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layers", ["all", "sparse", (3,)])
def test_a_fresh_injection_changes_no_bit(adapter, u, kind, layers):
    batch, tokens = adapter.build_batch(ROWS), _random(2, 6, 64)
    plain = adapter(batch, u)
    for awake in (False, True):
        injection = _injection(adapter, awake, kind=kind, layers=layers, sparse_count=2)
        same = torch.equal(adapter(batch, u, injection.bind(adapter, batch, tokens)), plain)
        assert same is not awake


def test_which_layers():
    assert chosen_layers(InjectionSettings(), 30) == tuple(range(29))
    sparse = chosen_layers(InjectionSettings(layers="sparse"), 30)
    assert len(sparse) == 10 and sparse[0] == 1 and sparse[-1] == 27 and len(set(sparse)) == 10
    assert chosen_layers(InjectionSettings(layers=(5, 2, 5)), 30) == (2, 5)
    assert chosen_layers(InjectionSettings(kind="concat"), 30) == ()
    with pytest.raises(UserError, match="give layers from 0 to 3"):
        chosen_layers(InjectionSettings(layers=(4,)), 4)
    with pytest.raises(UserError, match="sparse_count is 10; the backbone has 3 layers"):
        chosen_layers(InjectionSettings(layers="sparse"), 4)


def _reference(adapter, injection, batch, tokens, hidden, layer) -> torch.Tensor:
    """A token at a time."""
    part, settings = injection.layers[str(layer)], injection.settings
    positions = adapter.gtoken_positions(batch, GRID)
    rows = [row.clone() for row in hidden]
    norm = lambda x, w: x / (x.square().mean() + 1e-6).sqrt() * w  # noqa: E731
    turn = lambda x, p: adapter.rotary(x[None, None, None], p.view(1, 1))[0, 0, 0]  # noqa: E731
    readers = batch.visual if settings.kind == "visual" else batch.text
    for n, row in enumerate(batch.image_rows.tolist()):
        content = []
        for t, token in enumerate(tokens[n]):
            x = injection.project.weight @ token + injection.project.bias
            if settings.key_positions != "native":
                x = x + injection.rows[t // GRID[1]] + injection.columns[t % GRID[1]]
            content.append(norm(x, injection.norm.weight))
        out = []
        for s in range(hidden.shape[1]):
            if not readers[row, s]:
                out.append(rows[row][s])
                continue
            query, mixed = part.q.weight @ norm(hidden[row, s], part.norm.weight), []
            for head in range(part.heads):
                cut = slice(head * part.head_dim, (head + 1) * part.head_dim)
                q, scores = query[cut], []
                for t, c in enumerate(content):
                    k = (part.k.weight @ c)[cut]
                    if settings.key_positions == "learned":
                        scores.append(q @ k)
                    else:
                        scores.append(turn(q, batch.positions[row, s]) @ turn(k, positions[n, t]))
                weights = torch.softmax(torch.stack(scores) / part.head_dim**0.5, 0)
                mixed.append(sum(w * (part.v.weight @ c)[cut] for w, c in zip(weights, content, strict=True)))
            out.append(hidden[row, s] + part.o.weight @ torch.cat(mixed))
        rows[row] = torch.stack(out)
    return torch.stack(rows)


LOOKUPS = [(n, "text", places) for n in (1, 2, 3) for places in ("native", "both")]


@pytest.mark.parametrize(("n", "kind", "key_positions"), [*LOOKUPS, (1, "visual", "learned")])
def test_a_lookup_against_a_loop_with_gradients(adapter, n, kind, key_positions):
    rows = [ROWS[0], ROWS[2], Row("where", "left"), ROWS[0]][: n + 1]
    batch = adapter.build_batch(rows)
    images = len(batch.image_rows)
    injection = _injection(adapter, kind=kind, key_positions=key_positions, heads=2, layers=(1,)).double()
    tokens = _random(images, 6, 64, seed=3).double().requires_grad_()
    hidden = _random(*batch.ids.shape, 64, seed=4).double().requires_grad_()
    lookup = injection.bind(adapter, batch, tokens).queries(batch.positions, batch.text, batch.visual)
    ours, wanted = lookup.after_layer(1, hidden), _reference(adapter, injection, batch, tokens, hidden, 1)
    torch.testing.assert_close(ours, wanted)
    assert lookup.after_layer(0, hidden) is hidden
    inputs = [tokens, hidden, *(p for name, p in injection.named_parameters() if name != "null")]
    weight = _random(*hidden.shape, seed=5).double()
    torch.testing.assert_close(
        torch.autograd.grad((ours * weight).sum(), inputs), torch.autograd.grad((wanted * weight).sum(), inputs)
    )


@pytest.mark.parametrize("kind", [*KINDS, "concat"])
def test_rows_read_the_g_of_their_own_image(adapter, u, kind):
    injection = _injection(adapter, kind=kind)
    batch = adapter.build_batch(ROWS, extra_slots=injection.extra_slots)
    assert batch.slots == adapter.geometry.u_tokens + (6 if kind == "concat" else 0)
    tokens = _random(2, 6, 64)
    changed = torch.stack([tokens[0], tokens[0]])
    one, other = (adapter(batch, u, injection.bind(adapter, batch, t)) for t in (tokens, changed))
    assert torch.equal(one[0], other[0]) and torch.equal(one[2], other[2])
    assert (one[1] - other[1])[batch.answers[1]].abs().max() > 1e-5


def test_padding_does_not_matter_with_injection(adapter, u):
    injection, tokens = _injection(adapter), _random(2, 6, 64)
    for pad in ("right", "left"):
        batch = adapter.build_batch(ROWS, pad=pad)
        logits = adapter(batch, u, injection.bind(adapter, batch, tokens), keep=batch.answers)
        for i in (0, 1):
            alone = adapter.build_batch([ROWS[i]])
            bound = injection.bind(adapter, alone, tokens[i : i + 1])
            wanted = adapter(alone, u[i : i + 1], bound, keep=alone.answers)
            torch.testing.assert_close(logits[batch.targets[1] == i], wanted, rtol=1e-4, atol=1e-5)


def test_text_alone_passes_through(adapter, u):
    injection, batch = _injection(adapter), adapter.build_batch([ROWS[2]])
    bound = injection.bind(adapter, batch, _random(0, 6, 64))
    assert torch.equal(adapter(batch, u[:0], bound), adapter(batch, u[:0]))
    assert _injection(adapter, kind="none").bind(adapter, batch, _random(0, 6, 64)) is None


def test_tokens_must_fit(adapter):
    batch = adapter.build_batch(ROWS)
    with pytest.raises(ValueError, match=r"tokens are \(3, 6\); .* want \(2, 6\)"):
        _injection(adapter).bind(adapter, batch, _random(3, 6, 64))


def test_checkpointing_keeps_each_calls_g(tiny_janus, u):
    """The trap: matched, then shuffled forward, then the backward of both."""
    adapter, found = _load(tiny_janus), []
    trained = add_lora(adapter, LoraSettings(r=2, alpha=2))
    for i, parameter in enumerate(trained):
        parameter.data = 0.1 * _random(*parameter.shape, seed=i)
    injection, batch, tokens = _injection(adapter), adapter.build_batch(ROWS), _random(2, 6, 64).requires_grad_()
    for recompute in (False, True):
        adapter.checkpoint_layers(recompute)
        adapter.train()
        losses = []
        for g in (tokens, tokens.detach()[[1, 0]]):
            bound = injection.bind(adapter, batch, g)
            losses.append(adapter(batch, u, bound, keep=batch.answers).square().mean())
        inputs = [tokens, *(p for n, p in injection.named_parameters() if n != "null"), *trained]
        found.append([torch.autograd.grad(loss, inputs, allow_unused=True, retain_graph=True) for loss in losses])
    torch.testing.assert_close(found[0], found[1])
    assert found[0][0][0].abs().max() > 0 and found[0][1][0] is None


@pytest.mark.parametrize("kind", [*KINDS, "concat"])
def test_generation_projects_g_once_and_equals_whole_forwards(adapter, u, kind):
    injection = _injection(adapter, kind=kind)
    calls = {"project": 0, "keys": 0}

    def count(name: str):
        def hook(*_):
            calls[name] += 1

        return hook

    injection.project.register_forward_hook(count("project"))
    for part in injection.layers.values():
        part.k.register_forward_hook(count("keys"))
    prompts, tokens, extra = [Row(r.question, None, r.image) for r in ROWS], _random(2, 6, 64), injection.extra_slots
    batch = adapter.build_batch(prompts, extra, pad="left")
    found = adapter.generate(batch, u, injection.bind(adapter, batch, tokens), max_new_tokens=5)
    assert calls == {"project": 1, "keys": len(injection.layers)}
    for i, ids in enumerate(found):
        image = slice(i, i + prompts[i].image)
        for step in range(len(ids)):  # the answer so far, as one whole forward
            batch = adapter.build_batch([prompts[i]], extra)
            more = torch.tensor([ids[:step]], dtype=torch.long)
            grown = torch.arange(batch.ids.shape[1] + step)[None]
            off, on = torch.zeros_like(more, dtype=torch.bool), torch.ones_like(more, dtype=torch.bool)
            batch = type(batch)(
                torch.cat([batch.ids, more], 1),
                torch.cat([batch.mask, on], 1),
                grown,
                torch.cat([batch.visual, off], 1),
                torch.cat([batch.labels, more], 1),
                batch.image_rows,
                batch.slots,
            )
            with torch.no_grad():
                logits = adapter(batch, u[image], injection.bind(adapter, batch, tokens[image]))
            assert int(logits[0, -1].argmax()) == ids[step]


def test_lora_off_is_the_original(tiny_janus, u):
    adapter = _load(tiny_janus)
    batch = adapter.build_batch(ROWS)
    plain = adapter(batch, u)
    trained = add_lora(adapter, LoraSettings())
    assert len(trained) == 2 * 7 * 4 and {p.shape[0] for p in trained[::2]} == {16}
    assert all(p.requires_grad for p in trained) and {id(p) for p in trained} == {
        id(p) for p in adapter.parameters() if p.requires_grad
    }
    for i, parameter in enumerate(trained):
        parameter.data = 0.1 * _random(*parameter.shape, seed=i)
    assert not torch.allclose(adapter(batch, u), plain)
    with lora_off(adapter):
        assert torch.equal(adapter(batch, u), plain)
    assert not torch.allclose(adapter(batch, u), plain) and all(p.requires_grad for p in trained)


@pytest.mark.parametrize("kind", [*KINDS, "concat"])
def test_bfloat16_with_checkpointing(tiny_janus, kind):
    """A bfloat16 backbone beside a float32 trained part."""
    adapter = _load(tiny_janus, "bfloat16")
    injection = _injection(adapter, awake=False, kind=kind)
    batch = adapter.build_batch(ROWS, injection.extra_slots)
    u = adapter.understanding_tokens(adapter.preprocess(pictures(2)).understanding)
    tokens = _random(2, 6, 64).requires_grad_()
    if kind != "concat":
        assert torch.equal(adapter(batch, u, injection.bind(adapter, batch, tokens)), adapter(batch, u))
    lora = add_lora(adapter, LoraSettings(r=2, alpha=2))
    assert {p.dtype for p in lora} == {torch.float32} and u.dtype == torch.bfloat16
    injection = _injection(adapter, kind=kind)
    adapter.checkpoint_layers(True)
    adapter.train()
    logits = adapter(batch, u, injection.bind(adapter, batch, tokens), keep=batch.answers)
    answer_ce(logits, *batch.targets, 3).sum().backward()
    assert logits.dtype == torch.bfloat16 and tokens.grad.abs().max() > 0 and tokens.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in lora) and any(p.grad.abs().max() > 0 for p in lora)


def test_a_step_in_parts_has_the_gradient_of_the_whole_objective(tiny_janus):
    """5·CE + DPO + λ·KL over three branches with a masked U, in one autograd call and in parts."""
    adapter = _load(tiny_janus).double()
    lora = add_lora(adapter, LoraSettings(r=2, alpha=2))
    injection = _injection(adapter).double()
    trained = [*lora, *injection.parameters()]
    for i, parameter in enumerate(lora):
        parameter.data = 0.1 * _random(*parameter.shape, seed=i).double()
    rows = [ROWS[0], ROWS[1], Row("where is the bar", "left")]
    batch = adapter.build_batch(rows)
    u = adapter.understanding_tokens(adapter.preprocess(pictures(3)).understanding)
    tokens, masked, counts = _random(3, 6, 64).double(), torch.tensor([True, False, False]), torch.ones(3).bool()
    targets, sample = batch.targets
    settings = PreferenceSettings(cap=None, negative=1.0)

    def branch(g: torch.Tensor) -> torch.Tensor:
        seen = mask_understanding(u, masked, injection.null)
        return adapter(batch, seen, injection.bind(adapter, batch, g), keep=batch.answers)

    with torch.no_grad(), lora_off(adapter):
        reference = adapter(batch, mask_understanding(u, masked, injection.null), keep=batch.answers)

    def losses() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        matched, shuffled = branch(tokens), branch(tokens[donors(3)].detach())
        up, down = (answer_ce(logits, targets, sample, 3) for logits in (matched, shuffled))
        return up, down, forward_kl(reference, shuffled, counts, sample, len(sample))

    up, down, kl = losses()
    whole = 5 * up.mean() + torch.nn.functional.softplus(-0.1 * (down - up)).mean() + 0.7 * kl
    wanted = torch.autograd.grad(whole, trained)
    up, down, kl = losses()
    found = preference(up, down, counts, 0.1, 3)
    split = SplitGradients(trained)
    split.add("plain", 5 * up.mean(), again=True)
    split.add("positive", found.positive)
    split.add("plain", 0.7 * kl, again=True)
    split.add("negative", found.negative)
    split.finish(settings)
    # Llama's norms compute in float32 whatever the weights are.
    torch.testing.assert_close([p.grad for p in trained], list(wanted), rtol=1e-4, atol=1e-6)
    assert injection.null.grad.abs().max() > 0
