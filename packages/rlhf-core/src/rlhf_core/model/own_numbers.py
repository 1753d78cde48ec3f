"""A model's own numbers on a few short rows, by its own forward pass over a row at a time, and ours beside them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_core.data.batch import Batch
from rlhf_core.data.images import RowImages
from rlhf_core.errors import CapabilityError
from rlhf_core.model.forward import model_outputs
from rlhf_core.model.heads import Heads, scalar_head, text_config
from rlhf_core.model.hidden_states import hidden_states
from rlhf_core.model.log_probs import entropy_from_logits, log_probs_from_logits
from rlhf_core.model.vision import Vision, image_arguments

_LONGEST_WINDOW = 64
"""Windows up to this size are passed by the rows."""


class OwnNumbers:
    """What the model says of the rows by its own code, for the outputs of one role."""

    def __init__(self, model: Any, role: str) -> None:
        self._model, self._role = model, role
        self.rows = _short_rows(model)
        """Three rows, of which two share their prompt."""
        self._own = self._run()

    def gap(self) -> Gap:
        """How far `model_outputs`, as it makes them now, is from these numbers."""
        compare = {"critic": self._values, "reward": self._scores}.get(self._role, self._log_probs)
        return compare()

    def _run(self) -> list[Tensor]:
        """For each row its logits; for a critic the score of each row, cut before its last token."""
        rows = self.rows
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

    def not_causal(self) -> str:
        """Rows 0 and 1 begin with the same tokens: their logits are the same there, if the model is causal."""
        if self._role not in ("policy", "reference"):
            return ""
        common = int(self.rows.response_mask[0].int().argmax())
        left, right = (own[:common].float().log_softmax(-1).amax(-1) for own in self._own[:2])
        gap = self._gap(left, right)
        return "" if gap.fine else f"a token's logits depend on later tokens (by {gap}), so it has no log-probs"

    def _gap(self, found: Tensor, expected: Tensor, *, relative: bool = False) -> Gap:
        dtype = self._model.get_input_embeddings().weight.dtype
        return Gap.of(found, expected, narrow=dtype in (torch.float16, torch.bfloat16), relative=relative)

    def _log_probs(self) -> Gap:
        rows = self.rows
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

    def _values(self) -> Gap:
        rows, last = self.rows, self.rows.lengths - 1
        values = model_outputs(self._model, rows, ("values",)).values
        found = values[torch.arange(len(last), device=last.device), last]  # type: ignore[index]
        return self._worst(found, hidden_states(self._model, rows).before(_one_hot(last, rows)))

    def _scores(self) -> Gap:
        rows = self.rows
        scores = model_outputs(self._model, rows, ("scores",)).scores
        if Heads.of(self._model).own_scores:
            return self._worst(scores, None)  # type: ignore[arg-type]
        states = hidden_states(self._model, rows).at(_one_hot(rows.lengths - 1, rows))
        return self._worst(scores, states)  # type: ignore[arg-type]

    def _worst(self, found: Tensor, inputs: Tensor | None) -> Gap:
        """The gap of values or scores, or of what their head is given."""
        gap = self._gap(found, torch.cat([own.view(1) for own in self._own]), relative=True)
        if inputs is None or not gap.fine:
            return gap
        own = torch.stack(self._head_inputs)
        if own.shape != inputs.shape:
            raise CapabilityError("its scalar head is given something else than the states of tokens")
        given = self._gap(inputs, own, relative=True)
        return gap if given.fine else given


class OwnImageNumbers:
    """What a model says of rows with images, and ours beside it, for log-probs."""

    def __init__(self, model: Any, vision: Vision) -> None:
        self._model = model
        self.rows = vision.trial.to(model.get_input_embeddings().weight.device)
        """Rows with one image, with none and with two."""
        self._own = [self._logits(row) for row in range(self.rows.rows)]

    def _logits(self, row: int, *, other: bool = False) -> Tensor:
        """Of a row by itself, or of its text with other images."""
        one = self.rows.select([row])
        if other:
            one = replace(one, images=tuple(_negative(images) for images in one.images))
        return own_forward(self._model, one.token_ids, **image_arguments(self._model, self._model, one)).logits[0]

    def unseen(self) -> bool:
        """Whether other images make no difference to the model's own forward pass."""
        own, other = self._own[0], self._logits(0, other=True)
        return bool(((own - other).abs() <= 1e-6 * own.abs().max()).all())

    def gap(self) -> Gap:
        """How far `model_outputs` of all rows together is from the model's own forward pass of each by itself."""
        rows = self.rows
        found: Any = model_outputs(self._model, rows, ("log_probs",)).log_probs
        ours, own = [], []
        for row, logits in enumerate(self._own):
            mask = rows.response_mask[row, 1 : len(logits)]
            ours.append(found[row, 1 : len(logits)][mask])
            own.append(log_probs_from_logits(logits[:-1][mask], rows.token_ids[row, 1 : len(logits)][mask]))
        dtype = self._model.get_input_embeddings().weight.dtype
        return Gap.of(torch.cat(ours), torch.cat(own), narrow=dtype in (torch.float16, torch.bfloat16))

    def calls_differ(self) -> bool:
        """Whether two images in place of one make the model call modules with parameters more often.

        Ranks that hold shards of one model could not do that: each call gathers parameters on all of them.
        """
        one, two = (self._calls(row) for row in (0, 2))
        return one != two

    def _calls(self, row: int) -> list[nn.Module]:
        called: list[nn.Module] = []
        handles = [
            module.register_forward_pre_hook(lambda module, _: called.append(module))
            for module in self._model.modules()
            if any(True for _ in module.parameters(recurse=False))
        ]
        try:
            model_outputs(self._model, self.rows.select([row]), ("log_probs",))
        finally:
            for handle in handles:
                handle.remove()
        return called


def _negative(images: RowImages | None) -> RowImages | None:
    if images is None:
        return None
    return replace(images, tensors={**images.tensors, "pixel_values": -images.tensors["pixel_values"]})


def own_forward(model: Any, ids: Tensor, **given: Any) -> Any:
    """The model's own forward pass; a few old models do not take `use_cache`."""
    takes = signature(model.forward).parameters
    cached = "use_cache" in takes or any(one.kind is one.VAR_KEYWORD for one in takes.values())
    return model(input_ids=ids, **given, **({"use_cache": False} if cached else {}))


def _one_hot(places: Tensor, rows: Batch) -> Tensor:
    return torch.zeros_like(rows.attention_mask).scatter(1, places[:, None], True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """How far numbers are apart."""

    largest: float
    median: float
    fine: bool
    """Whether rounding explains it."""

    @classmethod
    def of(cls, found: Tensor, expected: Tensor, *, narrow: bool, relative: bool = False) -> Gap:
        """Of numbers in nats, or `relative` to the largest; `narrow` ones come from a model in 16 bits."""
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


def _short_rows(model: Any) -> Batch:
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
