"""Groups into tensors."""

import numpy as np
import pytest
import torch

from realvr.learner.batching import (
    answer_branch,
    filler,
    latent_sums,
    local_counts,
    plan_micro_batches,
    prepare_group,
)
from realvr.learner.statistics import combine, mean_of, values
from realvr.policy.spans import State
from tests.realvr.learner.samples import EVIDENCE, K, World


def test_plan_is_sorted_complete_and_deterministic() -> None:
    plan = plan_micro_batches([5, 9, 5, 7, 9], 2)
    assert plan == [[1, 4], [3, 0], [2]]
    assert plan_micro_batches([], 3) == []


def test_padding_and_masks(qwen25: World) -> None:
    groups = qwen25.groups()
    batch = qwen25.micro_batch(groups)
    for b, group in enumerate(groups):
        width = group.width
        assert torch.equal(batch.prompts.ids_BP[b, -width:], group.prompt.input_ids)
        assert (batch.prompts.ids_BP[b, :-width] == qwen25.tokens.pad).all()
        assert batch.prompts.visual_BP[b].sum() == len(group.features.embeds)
        for g, rollout in enumerate(group.scored.group.rollouts):
            n = len(rollout.tokens)
            assert batch.completions.ids_BGN[b, g, :n].tolist() == rollout.tokens.tolist()
            assert batch.completions.loss_BGN[b, g].sum() == group.parsed[g].loss.sum()
            assert (batch.completions.states_BGN[b, g, n:] == State.FORCED).all()
        assert not batch.completions.loss_BGN[b, len(group.parsed) :].any()
        assert batch.answers.present_BA[b].sum() == 1 + len(group.scored.wrong_answers)
    latents = np.concatenate([r.latents for g in groups for r in g.scored.group.rollouts])
    assert np.array_equal(batch.completions.latents_Md.numpy(), latents)
    assert batch.evidence_B.tolist() == [True, True, True, False]
    assert batch.closed_BG.tolist() == [
        [True, True, False, False, False],
        [False, False, True, False, True],
        [False, False, False, True, False],
        [True, True, False, False, False],
    ]
    starts = [[int(batch.completions.ids_BGN[b, g, i]) for b, g, i in ((0, 1, batch.span_BG[0, 1]),)]]
    assert starts == [[qwen25.tokens.latent]]


def test_latents_in_the_last_column_are_not_fed(qwen25: World) -> None:
    example = qwen25.example("cut", (qwen25.picture("cut", 56, 56),), (), "Is?")
    group = qwen25.group(example, [qwen25.span(2, end=False), qwen25.words("no")], ())
    batch = qwen25.micro_batch([group])
    assert batch.completions.latent_BGN[0].tolist() == [[False, True, False], [False] * 3]
    assert len(batch.completions.latents_Md) == 1
    loss, slope = qwen25.compare([group])
    assert loss < 1e-6 and slope < 1e-6


@pytest.mark.parametrize("text", ["red circle", " 42\n", "unknown wörd", ""])
def test_answer_branch_holds_the_characters(qwen25: World, text: str) -> None:
    branch = answer_branch(qwen25.builder.tokenizer, text, qwen25.tokens)
    decoded = qwen25.builder.tokenizer.decode(branch.ids[branch.content])
    assert decoded == text.strip()
    assert branch.ids[0] == qwen25.tokens.end and not branch.content[0]
    if text:
        assert branch.content[-1]
        whole = qwen25.builder.tokenizer.decode(branch.ids[1:])
        assert whole == f"<answer>{text.strip()}"


def test_counts_and_latent_sums(qwen25: World) -> None:
    groups = [*qwen25.groups(), filler(qwen25.tokens, qwen25.width)]
    counts = local_counts(groups)
    rollouts = [r for g in groups[:-1] for r in g.scored.group.rollouts]
    assert counts["completions"] == len(rollouts) and counts["evidence_rows"] == 3
    assert counts["tokens"] == sum(int(p.loss.sum()) for g in groups[:-1] for p in g.parsed)
    total, number = latent_sums(groups, K, qwen25.width)
    assert number.tolist() == [sum(len(r.latents) > t for r in rollouts) for t in range(K)]
    torch.testing.assert_close(total[0], torch.as_tensor(sum(r.latents[0] for r in rollouts if len(r.latents))))


def test_a_completion_against_the_grammar_names_the_record(qwen25: World) -> None:
    example = qwen25.example("bad", (), (), "Is?")
    with pytest.raises(ValueError, match="record bad, completion 0: token 0"):
        qwen25.group(example, [[qwen25.tokens.end]], ())


def test_latents_that_do_not_fit_name_the_record(qwen25: World) -> None:
    from dataclasses import replace

    good = qwen25.groups()[0]
    rollouts = list(good.scored.group.rollouts)
    rollouts[0] = replace(rollouts[0], latents=rollouts[0].latents[:1])
    scored = replace(good.scored, group=replace(good.scored.group, rollouts=tuple(rollouts)))
    with pytest.raises(ValueError, match="record one, completion 0: latents stand at"):
        prepare_group(
            scored, good.prompt, good.features, qwen25.builder.tokenizer, qwen25.tokens, qwen25.latent, EVIDENCE
        )


def test_statistics_combine() -> None:
    mask = torch.tensor([True, False, True])
    parts = [
        {"a": mean_of(torch.tensor([1.0, 9.0, 3.0]), mask), "b_max": torch.tensor(2.0), "c_sum": torch.tensor(1.0)},
        {"a": mean_of(torch.tensor([8.0])), "b_max": torch.tensor(5.0), "c_sum": torch.tensor(1.0)},
    ]
    assert values(combine(parts)) == {"a": 4.0, "b_max": 5.0, "c_sum": 2.0}
    assert values({"empty": mean_of(torch.zeros(0))}) == {}
