"""The trial of a model that was just loaded: our outputs against the model's own forward pass, on a few short rows.

Packed rows, chunked heads and padding are ours; what the model's numbers are is said by its own code, one row at a
time, with Transformers' `eager` attention, which is the definition of each model. What differs is done in a slower
way that does not, or the model is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rlhf_core.data.batch import Batch
from rlhf_core.errors import CapabilityError, ConfigError
from rlhf_core.model.enable_packing import (
    disable_packing,
    enable_packing,
    text_config,
    watch_attention,
    with_attention,
)
from rlhf_core.model.forward import model_outputs
from rlhf_core.model.heads import Heads, kind_of, scalar_head
from rlhf_core.model.hidden_states import hidden_states, padded_states
from rlhf_core.model.log_probs import entropy_from_logits, log_probs_from_logits
from rlhf_core.model.packed_attention import MaskWatch

_LONGEST_WINDOW = 64
"""Windows up to this size are passed by the rows of the trial."""
_FAILURES = (
    AttributeError,
    CapabilityError,
    ImportError,
    IndexError,
    KeyError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a model that does not fit raises somewhere inside."""


_PLAIN = Heads()
_HEADS: dict[str, tuple[Heads, ...]] = {
    "policy": (_PLAIN, Heads(own_logits=True)),
    "reference": (_PLAIN, Heads(own_logits=True)),
    "critic": (_PLAIN,),
    "reward": (_PLAIN, Heads(own_scores=True)),
}
"""The ways of making a role's outputs, the fastest first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """How a model's outputs are had, as its trial found it."""

    packing: bool
    """Whether rows run unpadded, with the prompts they share run once."""
    declined: str = ""
    """Why rows run padded although packing was asked for; empty where it was not, or they do not."""
    own_head: bool = False
    """Whether logits or scores are made by the model's own code, as its head is not a plain one."""
    differences: Mapping[str, float] = field(default_factory=dict)
    """Largest difference from the model's own numbers, of the way taken and of those that were not."""

    @property
    def notice(self) -> str:
        """What whoever runs the model should be told, once; empty if all is as asked for."""
        return f"rows run padded, not packed: {self.declined}" if self.declined else ""


def try_model(
    model: nn.Module,
    role: Literal["policy", "critic", "reference", "reward"],
    *,
    packing: bool = True,
    agree: Callable[[bool], bool] = lambda fine: fine,
) -> Trial:
    """Find out how `model_outputs` gives this model's numbers, and settle it for the model.

    It runs about eight short rows forward. The ranks of a sharded model call it together.

    Args:
        model: a Transformers model on its device, with weights.
        role: `policy` and `reference` are tried for log-probs and entropies, a `critic` for values, `reward` for
            scores.
        packing: whether rows may run unpadded.
        agree: whether all ranks found something fine; asked for each verdict, in the same order on all ranks.

    Raises:
        ConfigError: no way gives the model's own numbers; names the model and the difference.
    """
    training = model.training
    disable_packing(model)
    model.eval()
    try:
        with torch.no_grad():
            return _Trial(model, role, agree).run(packing)
    finally:
        model.train(training)


class _Trial:
    def __init__(self, model: Any, role: str, agree: Callable[[bool], bool]) -> None:
        self._model, self._role, self._agree = model, role, agree
        self._differences: dict[str, float] = {}
        self._compare = {"critic": self._values, "reward": self._scores}.get(role, self._log_probs)

    def run(self, packing: bool) -> Trial:
        with with_attention(self._model, "eager"):
            try:
                self._rows = _trial_rows(self._model)
                self._own = self._own_numbers()
            except CapabilityError as error:
                raise self._refusal(str(error)) from error
            except _FAILURES as error:
                raise self._refusal(f"its own forward pass fails: {type(error).__name__}: {error}") from error
        if not self._agree(not (fault := self._not_causal())):
            raise self._refusal(fault or "another rank found that it attends to later tokens")
        watch = self._watch()
        eager = self._settle_padded(watch)
        heads, declined = Heads.of(self._model), ""
        if packing and heads.own_scores:
            declined = "its scores are made by its own forward pass"
        elif packing:
            declined = enable_packing(self._model, watch, lambda: self._fault("packed"))
        if eager and (declined or not packing):
            self._model.set_attn_implementation("eager")
        return Trial(
            packing=packing and not declined,
            declined=declined,
            own_head=heads.own_logits or heads.own_scores,
            differences=self._differences,
        )

    def _watch(self) -> MaskWatch:
        try:
            return watch_attention(self._model, lambda: padded_states(self._model, self._rows))
        except _FAILURES as error:
            return MaskWatch(unlike=f"{type(error).__name__}: {error}")

    def _settle_padded(self, watch: MaskWatch) -> bool:
        """Choose how the outputs of padded rows are made; True if they need `eager` attention."""
        loaded: str = getattr(self._model.config, "_attn_implementation", None) or "eager"
        # Transformers' `sdpa` leaves out what torch's has no argument for; a few tokens might hide that.
        lossy = loaded == "sdpa" and (watch.soft_cap is not None or watch.sinks)
        fault = ""
        for attention in ("eager",) if lossy else dict.fromkeys((loaded, "eager")):
            with with_attention(self._model, attention):
                for heads in _HEADS[self._role]:
                    heads.settle(self._model)
                    if not (found := self._fault("padded")):
                        return attention != loaded
                    fault = fault or found
        raise self._refusal(fault)

    def _fault(self, name: str) -> str:
        """What is wrong with the outputs as they are made now; the same verdict on all ranks."""
        try:
            gap = self._compare()
            fault = "" if gap.fine else f"{name} rows differ from the model's own forward pass by {gap}"
            self._differences[name] = gap.largest
        except torch.OutOfMemoryError:
            raise
        except CapabilityError as error:
            fault = str(error)
        except _FAILURES as error:
            fault = f"{type(error).__name__}: {error}"
            if self._role == "critic":
                fault = f"its head gives no value for a single token ({fault})"
        return "" if self._agree(not fault) else fault or "another rank found a difference"

    def _refusal(self, fault: str) -> ConfigError:
        return ConfigError(
            f"{kind_of(self._model)} cannot be used as {self._role}: {fault}. Its numbers here would not be those "
            "of the model; use a model of another family"
        )

    # ------------------------------------------------------------ the model's own numbers

    def _own_numbers(self) -> list[Tensor]:
        """For each row its logits; for a critic the score of each row, cut before its last token."""
        rows = self._rows
        cut = 1 if self._role == "critic" else 0
        lengths = (rows.lengths - cut).tolist()
        with self._watched_head():
            return [
                own_forward(self._model, rows.token_ids[row : row + 1, :length]).logits[0].clone()
                for row, length in enumerate(lengths)
            ]

    @contextlib.contextmanager
    def _watched_head(self) -> Iterator[None]:
        """Keep what the model gives to its scalar head: a fresh head is zero and says nothing about the rest."""
        self._head_inputs: list[Tensor] = []
        if self._role in ("policy", "reference"):
            yield
            return

        def keep(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            self._head_inputs.append(args[0].flatten(0, -2)[-1].clone())

        handle = scalar_head(self._model).register_forward_pre_hook(keep)
        try:
            yield
        finally:
            handle.remove()

    def _not_causal(self) -> str:
        """Rows 0 and 1 begin with the same tokens: their logits are the same there, if the model is causal."""
        if self._role not in ("policy", "reference"):
            return ""
        common = int(self._rows.response_mask[0].int().argmax())
        left, right = (own[:common].float().log_softmax(-1).amax(-1) for own in self._own[:2])
        gap = self._gap(left, right)
        return "" if gap.fine else f"a token's logits depend on later tokens (by {gap}), so it has no log-probs"

    # ------------------------------------------------------------ against ours

    def _gap(self, found: Tensor, expected: Tensor, *, relative: bool = False) -> _Gap:
        dtype = self._model.get_input_embeddings().weight.dtype
        return _Gap.of(found, expected, narrow=dtype in (torch.float16, torch.bfloat16), relative=relative)

    def _log_probs(self) -> _Gap:
        rows = self._rows
        found = model_outputs(self._model, rows, ("log_probs", "entropy"))
        pairs = []
        for row, own in enumerate(self._own):
            mask = rows.response_mask[row, 1 : len(own)]
            logits, targets = own[:-1][mask], rows.token_ids[row, 1 : len(own)][mask]
            pairs += [
                (found.log_probs[row, 1 : len(own)][mask], log_probs_from_logits(logits, targets)),  # type: ignore
                (found.entropy[row, 1 : len(own)][mask], entropy_from_logits(logits)),  # type: ignore[index]
            ]
        ours, own = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        return self._gap(ours, own)

    def _values(self) -> _Gap:
        rows, last = self._rows, self._rows.lengths - 1
        values = model_outputs(self._model, rows, ("values",)).values
        found = values[torch.arange(len(last), device=last.device), last]  # type: ignore[index]
        return self._worst(found, hidden_states(self._model, rows).before(_one_hot(last, rows)))

    def _scores(self) -> _Gap:
        rows = self._rows
        scores = model_outputs(self._model, rows, ("scores",)).scores
        if Heads.of(self._model).own_scores:
            return self._worst(scores, None)  # type: ignore[arg-type]
        states = hidden_states(self._model, rows).at(_one_hot(rows.lengths - 1, rows))
        return self._worst(scores, states)  # type: ignore[arg-type]

    def _worst(self, found: Tensor, inputs: Tensor | None) -> _Gap:
        """The gap of values or scores, or of what their head is given."""
        gap = self._gap(found, torch.cat([own.view(1) for own in self._own]), relative=True)
        if inputs is None or not gap.fine:
            return gap
        own = torch.stack(self._head_inputs)
        if own.shape != inputs.shape:
            raise CapabilityError("its scalar head is given something else than the states of tokens")
        given = self._gap(inputs, own, relative=True)
        return gap if given.fine else given


def own_forward(model: Any, ids: Tensor) -> Any:
    """The model's own forward pass; a few old models do not take `use_cache`."""
    takes = signature(model.forward).parameters
    cached = "use_cache" in takes or any(one.kind is one.VAR_KEYWORD for one in takes.values())
    return model(input_ids=ids, **({"use_cache": False} if cached else {}))


def _one_hot(places: Tensor, rows: Batch) -> Tensor:
    return torch.zeros_like(rows.attention_mask).scatter(1, places[:, None], True)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Gap:
    """How far numbers are apart, and whether their dtype explains it."""

    largest: float
    median: float
    fine: bool

    @classmethod
    def of(cls, found: Tensor, expected: Tensor, *, narrow: bool, relative: bool = False) -> _Gap:
        found, expected = found.double(), expected.double()
        gaps = (found - expected).abs()
        largest, median = float(gaps.max()), float(gaps.median())
        size = float(expected.abs().max())
        scale = max(size, 1e-3) if relative else max(1.0, size / 10)
        # A token that is very unlikely, or goes through another expert, may be far off: most may not.
        usual, most = (0.2, float("inf")) if narrow else (1e-3, 1e-2)
        fine = median <= usual * scale and largest <= most * scale
        return cls(largest=largest, median=median, fine=fine)

    def __str__(self) -> str:
        return f"up to {self.largest:.2g}, half of them by more than {self.median:.2g}"


def _trial_rows(model: Any) -> Batch:
    """Three rows, of which two share their prompt, on ordinary tokens."""
    text = text_config(model)
    window = getattr(text, "sliding_window", None) or 0
    prompt = 7 if not 0 < window <= _LONGEST_WINDOW else window + 3
    lengths = [prompt + 12, prompt + 4, prompt + 3]
    vocabulary = int(getattr(text, "vocab_size", 0) or model.get_input_embeddings().num_embeddings)
    special = {getattr(text, name, None) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    ordinary = [token for token in range(vocabulary // 16, vocabulary // 2 + 1) if token not in special]
    width = max(lengths)
    device = model.get_input_embeddings().weight.device
    places = torch.arange(3 * width).view(3, width) * 97 + 11
    ids = torch.tensor(ordinary)[places % len(ordinary)]
    ids[1, :prompt] = ids[0, :prompt]
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    counted = mask & (torch.arange(width) >= prompt)
    return Batch(token_ids=ids.masked_fill(~mask, 0), attention_mask=mask, response_mask=counted).to(device)
