"""What must hold for every loss: `LossInvariances`."""
# ruff: noqa: D102 - the name of each check is its sentence

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from rlhf_core import Accumulated, Batch, Loss, ModelOutputs, accumulate, trial_rows
from torch import Tensor

from rlhf_algos.testing.samples import in_float32, poisoned, sample_batch, sample_outputs, widened

WHOLE = 10_000  # tokens per micro-batch: all of them at once


def _same(batch: Batch) -> Batch:
    return batch


@dataclass(frozen=True, slots=True)
class LossCase:
    """A loss to be checked."""

    loss: Loss
    rows_per_unit: int = 1
    """2 for losses of pairs, whose rows alternate chosen, rejected; 3 for triples."""
    stop_gradient: bool = False
    """True for a loss whose gradient is not, by intention, the derivative of its value."""
    prepare: Callable[[Batch], Batch] = _same
    """Adds the columns that the loss needs beside those of `sample_batch`; gets the whole global batch, once. The
    `add_columns` of a policy loss's config is called without being asked."""

    def sample(self) -> tuple[Batch, dict[str, Tensor]]:
        """The batch that is checked on, and what the model says of it."""
        batch, outputs = sample_batch(rows_per_unit=self.rows_per_unit)
        batch = self.prepare(batch)
        add_columns = getattr(self.loss.config, "add_columns", None)
        return (batch if add_columns is None else add_columns(batch)), outputs


class LossInvariances:
    """Subclass it and give the fixture `case`; with `params` for several losses."""

    @pytest.fixture
    def case(self) -> LossCase:
        raise NotImplementedError("give the fixture 'case': the LossCase to check")

    def test_micro_batches_do_not_matter(self, case: LossCase) -> None:
        batch, outputs = case.sample()
        whole, expected = step(case, batch, outputs)
        assert expected, "the loss has no gradient"
        for max_tokens in (1, 20, 40):
            cut, found = step(case, batch, outputs, max_tokens)
            assert cut.loss == pytest.approx(whole.loss, rel=1e-9)
            assert cut.weight == pytest.approx(whole.weight, rel=1e-9)
            _assert_equal(found, expected)
            for name, mean in whole.metrics.items():
                assert cut.metrics[name].value == pytest.approx(mean.value, rel=1e-4, abs=1e-6), name

    def test_padding_and_order_do_not_matter(self, case: LossCase) -> None:
        batch, outputs = case.sample()
        whole, expected = step(case, batch, outputs)
        units = list(range(batch.units))
        other, found = step(case, widened(batch.select_units([*units[::-2], *units[-2::-2]]), 5), outputs)
        assert other.loss == pytest.approx(whole.loss, rel=1e-9)
        _assert_equal(found, expected)

    def test_masked_values_are_never_read(self, case: LossCase) -> None:
        batch, outputs = case.sample()
        whole, expected = step(case, batch, outputs)
        other, found = step(case, poisoned(batch), outputs)
        assert other.loss == pytest.approx(whole.loss, rel=1e-9)
        _assert_equal(found, expected)

    def test_the_gradient_is_that_of_the_value(self, case: LossCase) -> None:
        if case.stop_gradient:
            pytest.skip("has a stop-gradient")
        batch, outputs = case.sample()
        fields = case.loss.outputs
        leaves = tuple(outputs[field].clone().requires_grad_() for field in fields)

        def value(*tensors: Tensor) -> Tensor:
            found = sample_outputs(dict(zip(fields, tensors, strict=True)), batch, fields)
            return case.loss(found, batch).total

        assert torch.autograd.gradcheck(value, leaves)

    def test_nothing_to_learn_from_is_zero_not_nan(self, case: LossCase) -> None:
        batch, outputs = case.sample()
        empty = replace(batch, response_mask=torch.zeros_like(batch.response_mask))
        result, found = step(case, empty, outputs)
        assert math.isfinite(result.loss)
        assert all(torch.isfinite(gradient).all() for gradient in found.values())

    @pytest.mark.parametrize("gap", [-100.0, 100.0])
    def test_extreme_log_ratios_are_finite_in_float32(self, case: LossCase, gap: float) -> None:
        batch, outputs = case.sample()
        extreme = {name: value.float() for name, value in outputs.items()}
        extreme["log_probs"] = extreme["log_probs"] + gap
        for name in ("scores", "values"):
            extreme[name] = extreme[name] * gap
        result, found = step(case, in_float32(batch), extreme)
        assert math.isfinite(result.loss)
        assert all(torch.isfinite(gradient).all() for gradient in found.values())

    def test_the_weight_does_not_depend_on_the_model(self, case: LossCase) -> None:
        batch, outputs = case.sample()
        terms = case.loss(sample_outputs(outputs, batch, case.loss.outputs), batch)
        assert float(terms.weight) == pytest.approx(case.loss.weight(batch), rel=1e-9)
        assert terms.total.dim() == 0

    @pytest.mark.parametrize(("length", "units"), [(5, 1), (50, 9)])
    def test_it_takes_the_rows_of_a_memory_trial(self, case: LossCase, length: int, units: int) -> None:
        batch, _ = case.sample()
        rows = trial_rows(batch, length=length, units=units)
        terms = case.loss(_any_outputs(rows, case.loss.outputs), rows)
        assert terms.total.requires_grad
        terms.total.backward()


def step(
    case: LossCase, batch: Batch, outputs: dict[str, Tensor], max_tokens: int = WHOLE
) -> tuple[Accumulated, dict[str, Tensor]]:
    """One step in micro-batches of `max_tokens`: what it added up to, and the gradient of each output."""
    leaves = {name: value.clone().requires_grad_() for name, value in outputs.items()}
    result = accumulate(
        batch,
        case.loss,
        forward=lambda piece, fields: sample_outputs(leaves, piece, fields),
        backward=lambda loss, last: loss.backward(),
        max_tokens=max_tokens,
    )
    return result, {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def _any_outputs(rows: Batch, fields: Sequence[str]) -> ModelOutputs:
    """Outputs of the right shapes that are all -1."""
    tokens = tuple(rows.token_ids.shape)
    shapes: dict[str, tuple[int, ...]] = {"scores": tokens[:1], "aux_loss": ()}
    if "candidate_ids" in rows:
        shapes["candidate_log_probs"] = tuple(rows["candidate_ids"].shape)
    found = {
        name: torch.full(shapes.get(name, tokens), -1.0, dtype=torch.float64, requires_grad=True) for name in fields
    }
    return ModelOutputs(**found)


def _assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)
