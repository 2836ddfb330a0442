"""The method written plainly from its description: one sequence a sample, whole forwards, eager attention maps.

Slow and obvious on purpose. It shares with the product the transformers model and the tensors of a group, nothing else:
no tree, no KV, no chunks, no grammar code, no objectives. The learner must agree with it in loss and gradient.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from realvr.config import EvidenceSettings, GrpoSettings
from realvr.families.base import TokenIds
from realvr.learner.batching import LearnerGroup

NAME = "reference_eager"


def eager_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, maps=None, **kwargs):
    """Plain causal attention; whole maps [H, S, S] are appended to `maps`."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    later = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).triu(1)
    share = (query @ key.transpose(2, 3) * scaling).masked_fill(later, float("-inf")).softmax(-1)
    if maps is not None:
        maps.append(share[0])
    return (share @ value).transpose(1, 2), share


AttentionInterface.register(NAME, eager_attention)


@dataclass
class Reference:
    """language_model: a transformers text model; head: its output weight [V, d]; features_kwargs: deepstack, if any."""

    language_model: torch.nn.Module
    head: torch.Tensor
    tokens: TokenIds
    k: int
    temperature: float
    grpo: GrpoSettings
    evidence: EvidenceSettings
    max_new_tokens: int

    def embed(self, ids) -> torch.Tensor:
        return self.language_model.embed_tokens(torch.as_tensor(ids))

    def states(self, group: LearnerGroup, after: torch.Tensor, maps: list | None = None) -> torch.Tensor:
        """Last states [P + n, d] of the prompt followed by embeddings `after` [n, d]."""
        prompt = group.prompt
        embeds = self.embed(prompt.input_ids)
        places = prompt.visual_mask.nonzero()[:, 0]
        embeds = embeds.index_put((places,), group.features.embeds.to(embeds.dtype))
        following = prompt.next_position + torch.arange(len(after)).expand(3, -1)
        extra = {}
        if group.features.deepstack:
            mask = torch.cat([prompt.visual_mask, torch.zeros(len(after), dtype=torch.bool)])
            extra = {"visual_pos_masks": mask[None], "deepstack_visual_embeds": list(group.features.deepstack)}
        config = self.language_model.config
        before, config._attn_implementation = config._attn_implementation, NAME
        out = self.language_model(
            inputs_embeds=torch.cat([embeds, after])[None],
            position_ids=torch.cat([prompt.positions, following], 1)[:, None],
            attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool),
            use_cache=False,
            maps=maps,
            **extra,
        ).last_hidden_state[0]
        config._attn_implementation = before
        return out

    def rules(self, ids: list[int]) -> tuple[list[bool], list[set[int]]]:
        """By token: whether it is in the loss, and which ids it could not be."""
        t = self.tokens
        started, ended = None, None
        loss, bans = [], []
        for i, token in enumerate(ids):
            banned = {*t.banned, t.latent}
            if started is None:
                banned |= {t.end}
            elif ended is None:
                banned |= {t.start, *t.eos}
            else:
                banned |= {t.start, t.end}
            loss.append(token != t.latent)
            bans.append(banned)
            if token == t.start:
                started = i
            if token == t.end:
                ended = i
        if started is not None:
            loss[started] = False
            for i in range(started, (ended if ended is not None else started) + 1):
                loss[i] = False
        return loss, bans

    def logprob(self, state: torch.Tensor, token: int, banned: set[int]) -> torch.Tensor:
        logits = (self.head @ state) / self.temperature
        keep = torch.ones_like(logits)
        keep[list(banned)] = 0
        return logits[token] - torch.log((keep * torch.exp(logits - logits.max())).sum()) - logits.max()

    def completion_states(self, group: LearnerGroup, number: int) -> torch.Tensor:
        """State that predicts each token of a completion [N, d]; saved latents stand in for `<|lvr|>` embeddings."""
        rollout = group.scored.group.rollouts[number]
        after = [self.embed(int(t)) for t in rollout.tokens]
        for latent, place in zip(rollout.latents, rollout.latent_positions, strict=True):
            after[place] = torch.as_tensor(latent).to(after[0].dtype)
        first = len(group.prompt.input_ids) - 1
        return self.states(group, torch.stack(after))[first : first + len(after)]

    def token_losses(self, group: LearnerGroup, number: int) -> torch.Tensor:
        """Losses of one completion's loss tokens."""
        rollout = group.scored.group.rollouts[number]
        ids = rollout.tokens.tolist()
        loss, bans = self.rules(ids)
        states = self.completion_states(group, number)
        advantage = float(group.scored.advantages[number])
        losses = []
        for i, token in enumerate(ids):
            if not loss[i]:
                continue
            own = self.logprob(states[i], token, bans[i])
            ratio = torch.exp(own - own.detach())
            weight = 1.0
            if self.grpo.old == "rollout":
                weight = torch.exp(own.detach() - float(rollout.logprobs[i])).clamp(max=self.grpo.tis_cap)
            losses.append(-weight * torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage))
        return torch.stack(losses) if losses else torch.zeros(0, dtype=states.dtype)

    def grpo_loss(self, groups: list[LearnerGroup]) -> torch.Tensor:
        by_completion = [self.token_losses(g, i) for g in groups for i in range(len(g.scored.group.rollouts))]
        tokens = sum(len(x) for x in by_completion)
        if self.grpo.normalisation == "bnpo":
            return sum(x.sum() for x in by_completion) / tokens
        if self.grpo.normalisation == "dr_grpo":
            return sum(x.sum() for x in by_completion) / (len(by_completion) * self.max_new_tokens)
        return sum(x.mean() for x in by_completion if len(x)) / len(by_completion)

    def regenerate(self, group: LearnerGroup) -> torch.Tensor:
        """z_1 … z_K by growing the sequence and running all of it again. [K, d], gradient through the recursion."""
        after = self.embed([self.tokens.start])
        latents = []
        for _ in range(self.k):
            latents.append(self.states(group, after)[-1:])
            after = torch.cat([after, latents[-1]])
        return torch.cat(latents)

    def branch(self, text: str, tokenizer) -> tuple[list[int], list[int]]:
        """Token ids of the tagged answer and the indices of those that hold the answer's characters."""
        text = text.strip()
        encoded = tokenizer(f"<answer>{text}</answer>", add_special_tokens=False, return_offsets_mapping=True)
        inside = range(len("<answer>"), len("<answer>") + len(text))
        content = [i for i, (a, b) in enumerate(encoded["offset_mapping"]) if any(c in inside for c in range(a, b))]
        return encoded["input_ids"], content

    def after_answer(self, latents: torch.Tensor, ids: list[int]) -> torch.Tensor:
        return torch.cat([self.embed([self.tokens.start]), latents, self.embed([self.tokens.end, *ids])])

    def readout(self, group: LearnerGroup, latents: torch.Tensor, text: str, tokenizer) -> torch.Tensor:
        """r_t(y) [K]: attention from the answer's content tokens to each latent, mean over layers, heads, tokens."""
        ids, content = self.branch(text, tokenizer)
        maps: list[torch.Tensor] = []
        self.states(group, self.after_answer(latents, ids), maps)
        start = len(group.prompt.input_ids)
        rows = [start + self.k + 2 + i for i in content]
        columns = slice(start + 1, start + 1 + self.k)
        return torch.stack([m[:, rows, columns].mean((0, 1)) for m in maps]).mean(0)

    def answer_logprob(self, group: LearnerGroup, latents: torch.Tensor, text: str, tokenizer) -> torch.Tensor:
        """Log-probability of the answer's content tokens after the latents."""
        ids, content = self.branch(text, tokenizer)
        states = self.states(group, self.after_answer(latents, ids))
        start = len(group.prompt.input_ids)
        banned = {*self.tokens.banned, self.tokens.latent, self.tokens.start, self.tokens.end}
        return sum(self.logprob(states[start + self.k + 1 + i], ids[i], banned) for i in content)

    def gamma(self, group: LearnerGroup, latents: torch.Tensor, tokenizer, mean: torch.Tensor) -> torch.Tensor:
        e = self.evidence
        right = group.scored.group.example.answer
        if e.routing == "uniform":
            return torch.zeros(self.k)
        if e.routing == "causal":
            whole = self.answer_logprob(group, latents, right, tokenizer)
            drops = []
            for t in range(self.k):
                changed = torch.cat([latents[:t], mean[t : t + 1].to(latents.dtype), latents[t + 1 :]])
                drops.append(whole - self.answer_logprob(group, changed, right, tokenizer))
            return torch.stack(drops).clamp(min=0)
        r = self.readout(group, latents, right, tokenizer)
        if e.routing == "raw":
            return r
        wrong = [self.readout(group, latents, y, tokenizer) for y in group.scored.wrong_answers]
        return (r - sum(wrong) / len(wrong)).clamp(min=0) if wrong else torch.zeros(self.k)

    def weights(self, gamma: torch.Tensor) -> torch.Tensor:
        e = self.evidence
        if e.normalise_gamma and gamma.sum() > 0:
            gamma = gamma / gamma.sum()
        floor = 1.0 if e.routing == "uniform" else e.floor
        w = floor / self.k + (1 - floor) * gamma
        if e.mass_matched and w.sum() > 0:
            w = w / w.sum()
        return w.detach() if e.detach_weights else w

    def positives(self, group: LearnerGroup) -> torch.Tensor:
        """p⁺ of each latent [K, d]: the mean of the boxes' visual tokens (all without a box), or one token a slot."""
        tokens = group.features.embeds.detach().double()
        chosen: list[int] = []
        for box in group.prompt.roi:
            chosen += [i for i in box.tolist() if i not in chosen]
        region = tokens[chosen] if chosen else tokens
        if self.evidence.prototype == "per_slot":
            return torch.stack([region[(2 * j + 1) * len(region) // (2 * self.k)] for j in range(self.k)])
        return region.mean(0).expand(self.k, -1)

    def hinge(self, z, weights, positives, negatives) -> torch.Tensor:
        total = 0.0
        for t in range(self.k):
            gap = F.cosine_similarity(z[t], positives[t].to(z.dtype), dim=0)
            if len(negatives):
                gap = gap - torch.stack([F.cosine_similarity(z[t], n.to(z.dtype), dim=0) for n in negatives]).max()
            total = total + weights[t] * (self.evidence.margin - gap).clamp(min=0)
        return total

    def evidence_loss(self, groups, negatives, tokenizer, mean) -> torch.Tensor:
        """Mean of ℓ over the groups that have an image (λ not applied); negatives: a list [n, d] for each group."""
        losses = []
        for group, others in zip(groups, negatives, strict=True):
            if not len(group.features.embeds):
                continue
            if self.evidence.trajectory == "saved":
                losses.append(self.saved_loss(group, others, tokenizer, mean))
                continue
            z = self.regenerate(group)
            weights = self.weights(self.gamma(group, z, tokenizer, mean))
            losses.append(self.hinge(z, weights, self.positives(group), others))
        return sum(losses) / len(losses)

    def saved_loss(self, group, others, tokenizer, mean) -> torch.Tensor:
        """The hinge on the replay's states one position before each saved latent, mean over closed completions."""
        closed = [i for i, r in enumerate(group.scored.group.rollouts) if self.tokens.end in r.tokens.tolist()]
        if not closed:
            return torch.zeros(())
        rollouts = group.scored.group.rollouts
        latents = torch.as_tensor(rollouts[closed[0]].latents).to(self.head.dtype)
        weights = self.weights(self.gamma(group, latents, tokenizer, mean))
        losses = []
        for i in closed:
            states = self.completion_states(group, i)
            z = torch.stack([states[p] for p in rollouts[i].latent_positions])
            losses.append(self.hinge(z, weights, self.positives(group), others))
        return sum(losses) / len(losses)

    def loss(self, groups, negatives, tokenizer, mean) -> torch.Tensor:
        total = self.grpo_loss(groups)
        if self.evidence.weight > 0:
            total = total + self.evidence.weight * self.evidence_loss(groups, negatives, tokenizer, mean)
        return total
