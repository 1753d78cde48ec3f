"""A batch of samples that grow by one token per step, with their key/value states cached."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from rlhf_core import FinishReason, GenerationRequest, Sample
from torch import Tensor
from torch.nn.functional import pad

from rlhf_rollout.backends.transformers.states import join_rows, new_states, select_rows
from rlhf_rollout.backends.transformers.stop_strings import StopStrings
from rlhf_rollout.backends.transformers.token_sampling import draw_tokens, penalise


@dataclass(kw_only=True, slots=True, eq=False)
class Draw:
    """One sample while it is being drawn."""

    request: GenerationRequest
    generator: torch.Generator
    stop_token_ids: frozenset[int]
    """End-of-text and the request's own."""
    stop_strings: StopStrings | None = None
    """Looks for the request's strings; None if it has none."""
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def sequence(self) -> tuple[int, ...]:
        """Prompt and sampled tokens."""
        return (*self.request.prompt_token_ids, *self.tokens)

    def append(self, token: int, log_prob: float, version: int, *, max_model_len: int) -> None:
        """Add a token and see whether the sample is finished."""
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        self.versions.append(version)
        if token in self.stop_token_ids or (self.stop_strings is not None and self.stop_strings.ended_by(token)):
            self.finish_reason = "stop"
        elif (
            len(self.tokens) >= self.request.sampling.max_tokens
            or len(self.request.prompt_token_ids) + len(self.tokens) >= max_model_len
        ):
            self.finish_reason = "length"

    def sample(self) -> Sample:
        """The sample; its finish reason is `abort` if it was cut off."""
        return Sample(
            token_ids=self.tokens,
            log_probs=self.log_probs,
            weight_versions=self.versions,
            finish_reason=self.finish_reason or "abort",
        )


class Decoder:
    """The running samples of one model. Rows are padded on the left, so that all grow at the right end.

    A prompt is computed once for all of its samples that join together. Not safe to share between threads.
    """

    def __init__(self, model: Any, *, max_model_len: int) -> None:
        self.model = model
        self.draws: list[Draw] = []
        self._max_model_len = max_model_len
        self._states: Any = None
        self._mask: Bool[Tensor, "rows length"] = torch.zeros(0, 0, dtype=torch.bool)

    def forget_states(self) -> None:
        """Drop the cached states, which belong to old weights; the next step computes them anew."""
        self._states = None

    @torch.inference_mode()
    def step(self, joining: Sequence[Draw], *, version: int) -> None:
        """Sample one token for every running draw and for those that join now; the finished ones leave."""
        logits = []
        if self.draws:
            logits.append(self._advance() if self._states is not None else self._compute(self.draws))
        if joining:
            running = (self._states, self._mask)
            logits.append(self._compute(joining))
            if self.draws:
                self._merge(*running)
            self.draws.extend(joining)
        self._append(torch.cat(logits), version)
        self.keep(draw for draw in self.draws if draw.finish_reason is None)

    def next_joining(self, waiting: Sequence[Draw], room: int) -> int:
        """How many of the first waiting draws are to join now, if there is room for so many more."""
        return min(room, len(waiting))

    @torch.inference_mode()
    def keep(self, draws: Iterable[Draw]) -> None:
        """Drop all draws but the given ones."""
        wanted = set(map(id, draws))
        rows = [row for row, draw in enumerate(self.draws) if id(draw) in wanted]
        if len(rows) == len(self.draws):
            return
        self.draws = [self.draws[row] for row in rows]
        if not rows:
            self._states = None
        if self._states is None:
            return
        index = torch.tensor(rows, device=self.model.device)
        mask = self._mask[index]
        padding = int((~mask).long().cumprod(dim=1).sum(dim=1).min())
        self._mask = mask[:, padding:]
        select_rows(self._states, index, padding)

    def _append(self, logits: Float[Tensor, "rows vocab"], version: int) -> None:
        logits = logits.float()
        for row, draw in enumerate(self.draws):
            penalise(logits[row], draw.request.sampling, draw.request.prompt_token_ids, draw.tokens)
            if len(draw.tokens) < draw.request.sampling.min_tokens:
                logits[row, list(draw.stop_token_ids)] = -torch.inf
        tokens, log_probs = draw_tokens(
            logits, [draw.request.sampling for draw in self.draws], [draw.generator for draw in self.draws]
        )
        for draw, token, log_prob in zip(self.draws, tokens.tolist(), log_probs.tolist(), strict=True):
            draw.append(token, log_prob, version, max_model_len=self._max_model_len)

    def _advance(self) -> Float[Tensor, "rows vocab"]:
        """Logits after each running draw's last token."""
        last = torch.tensor([draw.tokens[-1:] for draw in self.draws], device=self.model.device)
        self._mask = pad(self._mask, (0, 1), value=True)
        return self._forward(last, self._mask.sum(dim=1, keepdim=True) - 1)

    def _compute(self, draws: Sequence[Draw]) -> Float[Tensor, "rows vocab"]:
        """Logits after the sequences of `draws`, from the first token on; replaces states and mask by theirs."""
        unique = {sequence: index for index, sequence in enumerate(dict.fromkeys(d.sequence for d in draws))}
        width = max(map(len, unique))
        device = self.model.device
        ids = torch.tensor([[0] * (width - len(s)) + list(s) for s in unique], device=device)
        self._mask = torch.arange(width, device=device) >= width - torch.tensor(
            [[len(s)] for s in unique], device=device
        )
        self._states = new_states(self.model.config)
        logits = self._forward(ids, (self._mask.long().cumsum(dim=1) - 1).clamp(min=0))
        rows = torch.tensor([unique[draw.sequence] for draw in draws], device=device)
        select_rows(self._states, rows, 0)
        self._mask = self._mask[rows]
        return logits[rows]

    def _forward(
        self, ids: Int[Tensor, "rows new"], positions: Int[Tensor, "rows new"]
    ) -> Float[Tensor, "rows vocab"]:
        return self.model(
            input_ids=ids,
            attention_mask=self._mask.long(),
            position_ids=positions,
            past_key_values=self._states,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]

    def _merge(self, states: Any, mask: Bool[Tensor, "rows length"]) -> None:
        """Put rows with these states above the ones just computed, all padded to one length on the left."""
        width = max(mask.shape[1], self._mask.shape[1])
        above, below = width - mask.shape[1], width - self._mask.shape[1]
        join_rows(states, self._states, above, below)
        self._mask = torch.cat([pad(mask, (above, 0)), pad(self._mask, (below, 0))])


class SeparateDecoder:
    """A `Decoder` for each request: a sample's log-probs follow from its request alone, to the last bit.

    Products of matrices round differently for other sizes, so that in a batch of several requests the last bits of
    a row depend on when the others came and how long they are. Here a batch has the samples of one request, which
    start together. It takes as many forward passes per step as there are requests.
    """

    def __init__(self, model: Any, *, max_model_len: int) -> None:
        self._model, self._max_model_len = model, max_model_len
        self._decoders: dict[int, Decoder] = {}

    @property
    def model(self) -> Any:
        """The model of all of them."""
        return self._model

    @model.setter
    def model(self, model: Any) -> None:
        self._model = model
        for decoder in self._decoders.values():
            decoder.model = model

    @property
    def draws(self) -> list[Draw]:
        """All running draws."""
        return [draw for decoder in self._decoders.values() for draw in decoder.draws]

    def forget_states(self) -> None:
        """See Decoder."""
        for decoder in self._decoders.values():
            decoder.forget_states()

    def step(self, joining: Sequence[Draw], *, version: int) -> None:
        """See Decoder."""
        joined: dict[int, list[Draw]] = {}
        for draw in joining:
            joined.setdefault(id(draw.request), []).append(draw)
        for request in joined:
            if request not in self._decoders:
                self._decoders[request] = Decoder(self._model, max_model_len=self._max_model_len)
        for request, decoder in self._decoders.items():
            decoder.step(joined.get(request, ()), version=version)
        self._forget_finished()

    def next_joining(self, waiting: Sequence[Draw], room: int) -> int:
        """See Decoder. The draws of a request join together, or as many as run at once, when no others do."""
        taken = 0
        while taken < len(waiting):
            request = waiting[taken].request
            together = sum(draw.request is request for draw in waiting)
            alone = taken == 0 and all(draw.request is request for draw in self.draws)
            if together > room and not alone:
                break
            taken, room = taken + min(together, room), room - min(together, room)
            if room <= 0:
                break
        return taken

    def keep(self, draws: Iterable[Draw]) -> None:
        """See Decoder."""
        kept = list(draws)
        for decoder in self._decoders.values():
            decoder.keep(kept)
        self._forget_finished()

    def _forget_finished(self) -> None:
        self._decoders = {request: one for request, one in self._decoders.items() if one.draws}
