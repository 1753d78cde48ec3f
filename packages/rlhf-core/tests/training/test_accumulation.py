"""Micro-batches: how they are cut, that cutting changes nothing, and that several ranks agree."""

import math
import threading
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rlhf_core import Loss, LossTerms, ModelOutputs, accumulate, mean_of, score_in_micro_batches
from rlhf_core.testing.engine_ground import rows
from rlhf_core.training.micro_batches import cut_micro_batches


class Line:
    """A one-parameter float64 "model": the log-prob of a token is slope * its id."""

    def __init__(self) -> None:
        self.slope = torch.tensor(-0.01, dtype=torch.float64, requires_grad=True)
        self.last: list[bool] = []

    def forward(self, batch, fields: Sequence[str]) -> ModelOutputs:
        per_token = self.slope * batch.token_ids * batch.response_mask
        return ModelOutputs(
            log_probs=per_token if "log_probs" in fields else None,
            scores=per_token.sum(dim=1) if "scores" in fields else None,
        )

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        loss.backward()
        self.last.append(last)


def squared(outputs: ModelOutputs, batch, config) -> LossTerms:
    values = outputs.log_probs.square() * batch.response_mask
    return LossTerms(
        total=values.sum(),
        weight=batch.response_mask.sum().double(),
        metrics={"x": mean_of(values, batch.response_mask)},
    )


def nan_for_row_3(outputs: ModelOutputs, batch, config) -> LossTerms:
    terms = squared(outputs, batch, config)
    return LossTerms(total=terms.total * (math.nan if "row-3" in batch.sample_ids else 1), weight=terms.weight)


def run(batch, *, max_tokens, loss=squared, ranks=None):
    model = Line()
    done = accumulate(
        batch,
        Loss(function=loss),
        forward=model.forward,
        backward=model.backward,
        max_tokens=max_tokens,
        ranks=ranks,
    )
    return done, model


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.integers(1, 120))
def test_every_unit_is_in_one_micro_batch_within_the_budget(lengths, max_tokens):
    cut = cut_micro_batches(lengths, rows_per_unit=1, max_tokens=max_tokens)
    assert sorted(unit for piece in cut for unit in piece) == list(range(len(lengths)))
    for piece in cut:
        assert len(piece) == 1 or len(piece) * max(lengths[unit] for unit in piece) <= max_tokens


def test_units_count_all_their_rows():
    assert cut_micro_batches([4, 4, 4, 4], rows_per_unit=2, max_tokens=8) == [[0], [1]]
    assert cut_micro_batches([4, 4, 4, 4], rows_per_unit=2, max_tokens=16) == [[0, 1]]


@pytest.mark.parametrize("max_tokens", [1, 14, 30, 50])
def test_loss_gradient_and_metrics_do_not_depend_on_the_cut(max_tokens):
    whole, reference = run(rows(), max_tokens=10**6)
    cut, model = run(rows(), max_tokens=max_tokens)
    assert cut.loss == pytest.approx(whole.loss, rel=1e-12)
    assert model.slope.grad.item() == pytest.approx(reference.slope.grad.item(), rel=1e-12)
    assert cut.metrics["x"].weight == whole.metrics["x"].weight
    assert cut.metrics["x"].value == pytest.approx(whole.metrics["x"].value, rel=1e-6)
    assert len(model.last) > 1
    assert model.last == [False] * (len(model.last) - 1) + [True]


def test_the_mean_is_global_not_a_mean_of_means():
    done, model = run(rows(), max_tokens=1)
    batch = rows()
    counted = batch.token_ids[batch.response_mask].double()
    expected = (0.01 * counted).square().mean()
    assert done.loss == pytest.approx(expected.item(), rel=1e-12)
    assert model.slope.grad.item() == pytest.approx((2 * -0.01 * counted.square()).mean().item(), rel=1e-12)


def test_a_non_finite_loss_stops_and_names_the_samples():
    done, _ = run(rows(), max_tokens=1, loss=nan_for_row_3)
    assert not done.finite
    assert done.bad_sample_ids == ("row-3",)
    assert math.isnan(done.loss)


def test_nothing_to_learn_from_is_no_division_by_zero():
    from dataclasses import replace

    batch = replace(rows(), response_mask=torch.zeros_like(rows().response_mask))
    done, model = run(batch, max_tokens=20)
    assert (done.loss, done.weight, done.finite) == (0.0, 0.0, True)
    assert model.slope.grad.item() == 0


class Threads:
    """Ranks that are threads of this process."""

    def __init__(self, size: int) -> None:
        self._size, self._barrier, self._slots = size, threading.Barrier(size), [None] * size

    def rank(self, index: int):
        outer = self

        class Rank:
            size = outer._size

            def gather(self, value):
                outer._slots[index] = value
                outer._barrier.wait(30)
                everyones = list(outer._slots)
                outer._barrier.wait(30)
                return everyones

            def sum(self, values):
                return [math.fsum(column) for column in zip(*self.gather(list(values)), strict=True)]

            def max(self, value):
                return max(self.gather(value))

        return Rank()


def on_ranks(parts, **options):
    ranks, results = Threads(len(parts)), [None] * len(parts)

    def work(index):
        results[index] = run(parts[index], ranks=ranks.rank(index), **options)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


@pytest.mark.parametrize("shares", [[[0, 1, 2], [3, 4, 5]], [[0], [1, 2, 3, 4, 5]], [[5, 0], [1], [2, 3, 4]]])
def test_ranks_give_the_result_of_one(shares):
    whole, reference = run(rows(), max_tokens=20)
    results = on_ranks([rows().select(share) for share in shares], max_tokens=20)
    for done, _ in results:
        assert done.loss == pytest.approx(whole.loss, rel=1e-12)
        assert done.metrics["x"].weight == whole.metrics["x"].weight
    averaged = sum(model.slope.grad.item() for _, model in results) / len(shares)
    assert averaged == pytest.approx(reference.slope.grad.item(), rel=1e-12), "engines average over ranks"
    assert len({len(model.last) for _, model in results}) == 1, "collectives must match on all ranks"


def test_all_ranks_learn_of_one_ranks_bad_sample():
    results = on_ranks([rows().select([0, 1, 2]), rows().select([3, 4, 5])], max_tokens=1, loss=nan_for_row_3)
    assert [done.bad_sample_ids for done, _ in results] == [("row-3",), ("row-3",)]


@pytest.mark.parametrize("max_tokens", [1, 20, 1000])
def test_scoring_keeps_the_order_of_the_rows(max_tokens):
    model, batch = Line(), rows()
    outputs = score_in_micro_batches(batch, ("log_probs", "scores"), forward=model.forward, max_tokens=max_tokens)
    expected = model.forward(batch, ("log_probs", "scores"))
    assert outputs.log_probs.dtype == torch.float64
    assert torch.equal(outputs.log_probs, expected.log_probs.detach())
    assert torch.allclose(outputs.scores, expected.scores.detach())
    assert not outputs.log_probs.requires_grad
