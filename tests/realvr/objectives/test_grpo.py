"""The policy loss against a loop-written reference and against TRL's own code on a tiny model."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realvr.config import GrpoSettings
from realvr.objectives.grpo import GlobalCounts, group_advantages, k3, policy_loss

NORMALISATIONS = ("grpo", "bnpo", "dr_grpo")


def batch(seed: int = 0, n: int = 5, t: int = 7):
    """Completions of unequal length, one with a hole (a span), one without any loss token."""
    random = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=random, dtype=torch.float64)  # noqa: E731
    mask = torch.arange(t)[None] < torch.tensor([t, t - 2, t, 3, 0])[:n, None]
    mask[0, 1:4] = False
    own = -draw(n, t).abs()
    return {
        "logprobs": own.clone().requires_grad_(),
        "advantages": draw(n),
        "mask": mask,
        "rollout": own + 0.5 * draw(n, t),
        "old": own + 0.3 * draw(n, t),
        "reference": own + 0.4 * draw(n, t),
    }


def counts_of(mask: torch.Tensor, longest: int = 11) -> GlobalCounts:
    return GlobalCounts(mask.shape[0], int(mask.sum()), longest)


def loop_loss(b, how: str, s: GrpoSettings, longest: int = 11) -> torch.Tensor:
    """The same loss written token by token."""
    sums, lengths = [], []
    for i in range(len(b["advantages"])):
        terms = []
        for t in range(b["mask"].shape[1]):
            if not b["mask"][i, t]:
                continue
            logp, a = b["logprobs"][i, t], b["advantages"][i]
            ratio = torch.exp(logp - b["old"][i, t])
            bounded = ratio.clamp(1 - s.clip, 1 + s.clip)
            term = -min(ratio * a, bounded * a)
            if s.old == "rollout":
                term = term * min(math.exp(float(logp) - float(b["rollout"][i, t])), s.tis_cap)
            if s.beta:
                d = b["reference"][i, t] - logp
                term = term + s.beta * ratio * (torch.exp(d) - d - 1)
            terms.append(term)
        sums.append(sum(terms, start=torch.zeros((), dtype=torch.float64)))
        lengths.append(len(terms))
    if how == "grpo":
        return sum(x / max(n, 1) for x, n in zip(sums, lengths, strict=True)) / len(sums)
    return sum(sums) / (sum(lengths) if how == "bnpo" else len(sums) * longest)


@pytest.mark.parametrize("how", NORMALISATIONS)
@pytest.mark.parametrize("old", ["own", "rollout"])
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_equals_the_loop_in_loss_and_gradient(how, old, beta):
    b = batch()
    s = GrpoSettings(normalisation=how, old=old, beta=beta, tis_cap=1.3)
    loss, sums = policy_loss(
        b["logprobs"],
        b["advantages"],
        b["mask"],
        counts_of(b["mask"]),
        s,
        old_logprobs=b["old"],
        rollout_logprobs=b["rollout"],
        reference_logprobs=b["reference"],
    )
    (gradient,) = torch.autograd.grad(loss, b["logprobs"])
    wanted = loop_loss(b, how, s)
    (wanted_gradient,) = torch.autograd.grad(wanted, b["logprobs"])
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient, wanted_gradient, rtol=1e-12, atol=1e-15)
    assert gradient[~b["mask"]].abs().max() == 0
    assert float(sums["clipped"]) > 0 and (old == "own" or float(sums["capped"]) > 0)


@pytest.mark.parametrize("how", NORMALISATIONS)
def test_any_split_into_micro_batches_sums_to_the_global_loss(how):
    b = batch(3)
    counts = counts_of(b["mask"])
    whole, _ = policy_loss(b["logprobs"], b["advantages"], b["mask"], counts, GrpoSettings(normalisation=how))
    parts = [
        policy_loss(b["logprobs"][i], b["advantages"][i], b["mask"][i], counts, GrpoSettings(normalisation=how))[0]
        for i in (slice(0, 1), slice(1, 4), slice(4, 5))
    ]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-12, atol=0)


def test_own_policy_gradient_is_the_plain_score_function():
    b = batch(1)
    loss, _ = policy_loss(b["logprobs"], b["advantages"], b["mask"], counts_of(b["mask"]), GrpoSettings())
    (gradient,) = torch.autograd.grad(loss, b["logprobs"])
    lengths = b["mask"].sum(1, keepdim=True).clamp(min=1)
    torch.testing.assert_close(gradient, -b["advantages"][:, None] * b["mask"] / lengths / 5, rtol=1e-12, atol=1e-15)


def test_what_is_masked_may_be_infinite():
    """A forced token that the bans forbid has log-probability −∞."""
    b = batch()
    logprobs = b["logprobs"].detach().masked_fill(~b["mask"], -torch.inf).requires_grad_()
    rollout = b["rollout"].masked_fill(~b["mask"], -torch.inf)
    s = GrpoSettings(old="rollout", beta=0.1)
    loss, sums = policy_loss(
        logprobs,
        b["advantages"],
        b["mask"],
        counts_of(b["mask"]),
        s,
        rollout_logprobs=rollout,
        reference_logprobs=rollout,
    )
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(logprobs.grad).all()
    assert all(torch.isfinite(x) for x in sums.values())


def test_missing_inputs_are_refused():
    b = batch()
    arguments = (b["logprobs"], b["advantages"], b["mask"], counts_of(b["mask"]))
    with pytest.raises(ValueError, match="rollout's log-prob"):
        policy_loss(*arguments, GrpoSettings(old="rollout"))
    with pytest.raises(ValueError, match="reference policy"):
        policy_loss(*arguments, GrpoSettings(beta=0.1))


def test_gap_is_measured_with_own_old_too():
    b = batch()
    _, sums = policy_loss(
        b["logprobs"],
        b["advantages"],
        b["mask"],
        counts_of(b["mask"]),
        GrpoSettings(),
        rollout_logprobs=b["rollout"],
    )
    gaps = (b["logprobs"] - b["rollout"]).abs()[b["mask"]]
    torch.testing.assert_close(sums["gap"], gaps.sum().detach())
    torch.testing.assert_close(sums["gap_max"], gaps.max().detach())


@given(st.lists(st.floats(-3, 3, width=32), min_size=2, max_size=9), st.floats(-2, 2, width=32))
@settings(deadline=None, max_examples=60)
def test_advantages(rewards, shift):
    row = torch.tensor([rewards], dtype=torch.float64)
    got = group_advantages(row)
    mean = sum(rewards) / len(rewards)
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
    wanted = torch.tensor([[0.0 if len(set(rewards)) == 1 else (r - mean) / (std + 1e-4) for r in rewards]]).double()
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(group_advantages(row + shift), got, rtol=1e-4, atol=1e-4)


def test_equal_rewards_give_exactly_zero_and_one_completion_is_refused():
    assert group_advantages(torch.full((1, 7), 0.1)).abs().max() == 0  # the mean of seven 0.1 is not 0.1
    with pytest.raises(ValueError, match="at least 2"):
        group_advantages(torch.ones(3, 1))


def test_k3_is_zero_at_equality_and_positive_elsewhere():
    x = torch.tensor([-1.0, -2.0])
    assert k3(x, x).abs().max() == 0
    assert (k3(x, x + torch.tensor([0.5, -0.5])) > 0).all()


def test_reference_kl_has_the_gradient_of_the_reverse_kl():
    """Expectation over the policy of the loss's gradient = gradient of the exact KL(policy ‖ reference)."""
    logits = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.1, 0.2, -0.4], dtype=torch.float64).log_softmax(-1)
    policy = logits.log_softmax(-1)
    (wanted,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)
    got = torch.zeros(3, dtype=torch.float64)
    for token in range(3):
        loss, _ = policy_loss(
            policy[token].reshape(1, 1),
            torch.zeros(1, dtype=torch.float64),
            torch.ones(1, 1),
            GlobalCounts(1, 1, 1),
            GrpoSettings(beta=1.0),
            reference_logprobs=reference[token].reshape(1, 1),
        )
        got += policy[token].exp().detach() * torch.autograd.grad(loss, logits, retain_graph=True)[0]
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-15)


@pytest.fixture(scope="module")
def trl_trainer(tmp_path_factory):
    """TRL's GRPOTrainer on a tiny text model: its own loss code is the reference."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    words = {w: i for i, w in enumerate(["<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyz"])}
    raw = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(words),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            initializer_range=0.5,
        )
    )
    arguments = GRPOConfig(
        output_dir=str(tmp_path_factory.mktemp("trl")),
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=9,
        temperature=0.6,
        epsilon=0.2,
        use_cpu=True,
        bf16=False,
        report_to=[],
        gradient_checkpointing=False,
    )
    return GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["a b", "c d"]}),
        processing_class=tokenizer,
    )


@pytest.mark.parametrize("how", NORMALISATIONS)
@pytest.mark.parametrize("old", ["own", "rollout"])
@pytest.mark.parametrize("beta", [0.0, 0.05])
def test_equals_trl(trl_trainer, how, old, beta):
    """Same batch, same model: loss and every parameter's gradient agree with TRL's, also with old and new apart."""
    trainer, model = trl_trainer, trl_trainer.model
    random = torch.Generator().manual_seed(1)
    prompt, completion = (torch.randint(3, 29, (6, n), generator=random) for n in (3, 9))
    mask = (torch.arange(9)[None] < torch.tensor([9, 5, 1, 0, 7, 9])[:, None]).long()
    advantages = torch.randn(6, generator=random)
    ids = torch.cat([prompt, completion], 1)

    def own_logprobs() -> torch.Tensor:
        attention = torch.cat([torch.ones_like(prompt), mask], 1)
        logits = model(input_ids=ids, attention_mask=attention).logits[:, 2:-1] / 0.6
        return logits.log_softmax(-1).gather(-1, completion[..., None])[..., 0]

    own = own_logprobs().detach()
    noisy = lambda scale: own + scale * torch.randn(own.shape, generator=random)  # noqa: E731
    before, rollout, reference = noisy(0.3), noisy(0.6), noisy(0.4)
    s = GrpoSettings(normalisation=how, old=old, beta=beta, tis_cap=1.5)
    trainer.loss_type, trainer.beta, trainer.current_gradient_accumulation_steps = how, beta, 1
    # With `own` the importance weight must not enter; with `rollout` it is TRL's truncated vLLM correction.
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = old == "rollout"
    inputs = {
        "prompt_ids": prompt,
        "prompt_mask": torch.ones_like(prompt),
        "completion_ids": completion,
        "completion_mask": mask,
        "advantages": advantages,
        "old_per_token_logps": before,
        "ref_per_token_logps": reference,
        "importance_sampling_ratio": torch.exp(own - rollout).clamp(max=1.5),
    }
    theirs = trainer._compute_loss(model, inputs)
    their_gradients = torch.autograd.grad(theirs, list(model.parameters()))
    logprobs = own_logprobs()
    ours, _ = policy_loss(
        logprobs,
        advantages,
        mask,
        GlobalCounts(6, int(mask.sum()), 9),
        s,
        old_logprobs=before,
        rollout_logprobs=rollout,
        reference_logprobs=reference,
    )
    our_gradients = torch.autograd.grad(ours, list(model.parameters()))
    torch.testing.assert_close(ours, theirs.reshape(()), rtol=1e-5, atol=1e-6)
    for mine, other in zip(our_gradients, their_gradients, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=2e-6)
    inputs.pop("old_per_token_logps")
    at_own, _ = policy_loss(
        logprobs, advantages, mask, GlobalCounts(6, int(mask.sum()), 9), s,
        rollout_logprobs=rollout, reference_logprobs=reference,
    )  # fmt: skip
    torch.testing.assert_close(at_own, trainer._compute_loss(model, inputs).reshape(()), rtol=1e-5, atol=1e-6)
