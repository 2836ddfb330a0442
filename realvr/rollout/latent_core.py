"""Latent decoding as a state machine on tensors: which row is fed a latent, which tokens a row may sample.

It knows no engine. An adapter tells it which requests live (`add`, `remove`), lets it replace input embeddings before
the forward (`overlay`) and edit logits before sampling (`step`). Neither of the two waits for the device.

Grammar of a completion, K latents a span (paper, section "Latent span"; `LatentSettings`):

    TEXT --START--> K rows forced LATENT --> END forced, or sampled while AWAIT --END--> SPENT (or TEXT: budget left)
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from realvr.config import LatentSettings
from realvr.families.base import TokenIds

TEXT, SPENT, AWAIT, FORCE_START, FORCE_LATENT, FORCE_END, INERT = range(7)  # classes of a row's next token


@dataclass(frozen=True)
class Grammar:
    """Token ids and switches of the latent grammar; `max_spans` spans may be opened in a completion."""

    start: int
    latent: int
    end: int
    banned: tuple[int, ...]
    eos: tuple[int, ...]
    k: int
    open_forced: bool = False
    close_forced: bool = False
    max_spans: int = 1

    @classmethod
    def of(cls, ids: TokenIds, latent: LatentSettings) -> "Grammar":
        forced = {"open_forced": latent.open == "forced", "close_forced": latent.close == "forced"}
        return cls(ids.start, ids.latent, ids.end, ids.banned, ids.eos, latent.k, **forced)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Grammar":
        """The inverse of `to_dict`: workers of an engine get the grammar as plain JSON types."""
        return cls(**{name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()})

    def to_dict(self) -> dict[str, Any]:
        return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}

    def bans(self, vocabulary: int, device: torch.device) -> torch.Tensor:
        """Table [7, V] of what each class of row may not sample; a forced row keeps one token, so its log-prob is 0."""
        table = torch.zeros(7, vocabulary, dtype=torch.bool)
        table[TEXT, [*self.banned, self.latent, self.end]] = True
        table[SPENT, [*self.banned, self.latent, self.end, self.start]] = True
        table[AWAIT, [*self.banned, self.latent, self.start, *self.eos]] = True
        for row, token in ((FORCE_START, self.start), (FORCE_LATENT, self.latent), (FORCE_END, self.end)):
            table[row] = True
            table[row, token] = False
        return table.to(device)

    def replay(self, completion: Iterable[int]) -> tuple[int, int, int]:
        """State after the completion's tokens except for the last one's own transition, which `step` makes.

        Returns (latents in the open span or −1 outside, spans opened, latents stored). A latent's token enters the
        completion one step after the latent was stored, so the tokens alone tell all three.
        """
        count, opened, stored = -1, 0, 0
        tokens = list(completion)
        for i, token in enumerate(tokens):
            last = i == len(tokens) - 1
            if token == self.latent:
                count, stored = count + 1, stored + 1
            elif token == self.start and not last:
                count, opened = 0, opened + 1
            elif token == self.end and not last:
                count = -1
        return count, opened, stored


class LatentCore:
    """The latents and counters of all live requests of one worker, in slots of device tensors.

    The last slot is inert: rows of requests that are not latent (warm-up, padding) point there. Slots grow when needed.
    """

    def __init__(self, grammar: Grammar, slots: int, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        self.grammar, self.device = grammar, device
        self.capacity = grammar.k * grammar.max_spans  # latents a request may store
        self.store = torch.zeros(slots + 1, self.capacity, hidden, dtype=dtype, device=device)
        self.position = torch.full((slots + 1, self.capacity), -1, dtype=torch.int64, device=device)
        # Columns: latents in the open span (−1: none is open), spans opened, latents stored, prompt length.
        self.state = torch.tensor([[-1, 0, 0, 0]], device=device).repeat(slots + 1, 1)
        self.live = torch.zeros(slots + 1, dtype=torch.bool, device=device)
        self.free = list(range(slots))
        self.slot_of: dict[str, int] = {}
        self.key_of: dict[str, str] = {}
        self.done: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # finished or preempted, waiting for take()
        self.taken: set[str] = set()  # taken while live: their rows are dropped on removal
        self.resumed = 0
        self._bans: torch.Tensor | None = None
        self._slots_cache: tuple[list[str], torch.Tensor] | None = None

    # ---- host side: requests come and go ---------------------------------------------------------------------------

    def add(self, request_id: str, key: str, tokens: Sequence[int], prompt_length: int) -> None:
        """A new or resumed request with all its tokens so far. `key` names its latents for `take`.

        The counters are taken from the tokens, whatever this core counted before: after a preemption tokens that were
        sampled ahead may have been dropped.
        """
        slot = self.slot_of.get(request_id)
        if slot is None:
            if key in self.key_of.values():
                raise ValueError(f"latent key {key!r} is in use: give each completion its own key (no n > 1)")
            slot = self._new_slot()
            self.slot_of[request_id], self.key_of[request_id] = slot, key
            self._slots_cache = None
            saved = self.done.pop(key, None)
            if saved is None:
                self.position[slot] = -1
            else:
                self.store[slot], self.position[slot] = saved
        count, opened, stored = self.grammar.replay(tokens[prompt_length:])
        self.resumed += len(tokens) > prompt_length
        self.position[slot, stored:] = -1
        self.state[slot] = torch.tensor([count, opened, stored, prompt_length], device=self.device)
        self.live[slot] = True

    def remove(self, request_id: str) -> None:
        """A request finished, was aborted or (model runner V2) preempted; its latents wait for `take` or `add`."""
        slot = self.slot_of.pop(request_id, None)
        if slot is None:
            return
        self._slots_cache = None
        self.live[slot] = False
        key = self.key_of.pop(request_id)
        if key in self.taken:
            self.taken.discard(key)
        else:
            self.done[key] = (self.store[slot].clone(), self.position[slot].clone())
        self.free.append(slot)

    def take(self, keys: Sequence[str]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Latents [n, d] and positions [n] in the whole sequence, by key, on the CPU; each can be taken once.

        A worker hears of a finished request only with the next scheduled step, so the last ones of a batch are still
        live here and are read from their slots. Keys that were never added (aborted while waiting) are left out.
        """
        out: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        live = {key: request_id for request_id, key in self.key_of.items()}
        for key in keys:
            saved = self.done.pop(key, None)
            if saved is None and key in live:
                slot = self.slot_of[live[key]]
                saved = (self.store[slot], self.position[slot])
                self.taken.add(key)
            if saved is not None:
                position = saved[1].cpu()
                n = int((position >= 0).sum())
                out[key] = (saved[0][:n].float().cpu().clone(), position[:n].clone())  # a live slot goes on changing
        return out

    def slots(self, request_ids: Sequence[str]) -> torch.Tensor:
        """Slot of each request [R] on the device; kept as long as the batch holds the same requests."""
        cached = self._slots_cache
        if cached is None or cached[0] != request_ids:
            inert = self.live.shape[0] - 1
            index = torch.tensor([self.slot_of.get(r, inert) for r in request_ids], dtype=torch.int64)
            self._slots_cache = cached = (list(request_ids), index.to(self.device, non_blocking=True))
        return cached[1]

    def _new_slot(self) -> int:
        if not self.free:
            old = self.live.shape[0] - 1
            grow = [t[:old] for t in (self.store, self.position, self.state, self.live)]
            fresh = [torch.zeros_like(grow[0]), torch.full_like(grow[1], -1), torch.zeros_like(grow[2])]
            fresh.append(torch.zeros_like(grow[3]))
            inert = [t[old:] for t in (self.store, self.position, self.state, self.live)]
            joined = [torch.cat(parts) for parts in zip(grow, fresh, inert, strict=True)]
            self.store, self.position, self.state, self.live = joined
            self.free = list(range(old, 2 * old))
            self._slots_cache = None
        return self.free.pop()

    # ---- device side: once a step ----------------------------------------------------------------------------------

    def overlay(
        self, embeds: torch.Tensor, input_ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        """Rows [C, d] with the stored latent wherever (slot, position) holds one and the token is LATENT.

        embeds [C, d]; input_ids, positions, slots [C]. Rows of prompts need not be among them.
        """
        hit = (self.position[slots] == positions[:, None]) & (input_ids == self.grammar.latent)[:, None]  # [C, M]
        rows = self.store[slots, hit.to(torch.uint8).argmax(1)]
        return torch.where(hit.any(1, keepdim=True), rows.to(embeds.dtype), embeds)

    def step(
        self,
        logits: torch.Tensor,
        hidden: torch.Tensor,
        last_ids: torch.Tensor,
        last_positions: torch.Tensor,
        slots: torch.Tensor,
        valid: torch.Tensor,
    ) -> None:
        """Advance every row by its last fed token, store the latents that begin here, ban tokens in `logits` in place.

        logits [R, V]; hidden [R, d] after the final norm at the last fed token; last_ids, last_positions, slots [R];
        valid [R] is False for rows whose sample is discarded (unfinished prefill): they change nothing.
        """
        g = self.grammar
        on = self.live[slots] & valid
        count, opened, stored, prompt_length = self.state[slots].unbind(1)
        generated = last_positions >= prompt_length
        begins = generated & (last_ids == g.start) & (count < 0) & (opened < g.max_spans)
        ends = (last_ids == g.end) & (count == g.k)
        count = torch.where(ends, -1, torch.where(begins, 0, count))
        opened = opened + begins
        emit = on & (count >= 0) & (count < g.k)

        inert = self.live.shape[0] - 1
        target = torch.where(emit, slots, inert)
        column = torch.where(emit, stored, 0)
        self.store[target, column] = hidden.to(self.store.dtype)
        self.position[target, column] = torch.where(emit, last_positions + 1, -1)

        kind = torch.where(opened < g.max_spans, TEXT, SPENT)
        if g.open_forced:
            kind = torch.where(last_positions + 1 == prompt_length, FORCE_START, kind)
        kind = torch.where(count == g.k, FORCE_END if g.close_forced else AWAIT, kind)
        kind = torch.where(emit, FORCE_LATENT, kind)
        kind = torch.where(on, kind, INERT)

        advanced = torch.stack([count + emit, opened, stored + emit, prompt_length], dim=1)
        self.state[torch.where(on, slots, inert)] = advanced
        if self._bans is None or self._bans.shape[1] != logits.shape[1]:
            self._bans = g.bans(logits.shape[1], self.device)
        logits.masked_fill_(self._bans[kind], float("-inf"))
