"""The loss contract: weights without a model, metrics that add up, pickling."""

import pickle

import pytest
import torch
from rlhf_core import Largest, Loss, Mean, ModelOutputs, mean_of, merge_metrics, row_parts
from rlhf_core.interfaces.loss import zero_outputs
from rlhf_core.testing.engine_ground import rows, supervised_loss


def test_the_weight_is_known_without_a_model():
    batch = rows()
    assert Loss(function=supervised_loss).weight(batch) == batch.response_mask.sum().item()


def test_zero_outputs_have_the_shapes_of_real_ones():
    batch = rows()
    outputs = zero_outputs(batch, ("log_probs", "values", "scores", "aux_loss"))
    assert outputs.log_probs.shape == outputs.values.shape == batch.token_ids.shape
    assert outputs.scores.shape == (batch.rows,)
    assert outputs.aux_loss.shape == ()
    assert outputs.entropy is None


def test_a_loss_survives_pickling():
    loss = pickle.loads(pickle.dumps(Loss(function=supervised_loss, config=None, outputs=("log_probs",))))
    assert loss.weight(rows()) > 0


def test_means_add_up_whatever_the_parts():
    values, mask = torch.arange(6.0), torch.tensor([1, 0, 1, 1, 1, 0]).bool()
    whole = mean_of(values, mask)
    parts = [{"x": mean_of(values[:2], mask[:2])}, {"x": mean_of(values[2:], mask[2:]), "y": mean_of(values)}]
    merged = merge_metrics(parts)
    assert merged["x"] == whole == Mean(total=9.0, weight=4.0)
    assert merged["y"].value == 2.5
    assert Mean(total=0.0, weight=0.0).value == 0.0


def test_the_largest_number_of_the_parts_is_that_of_the_whole():
    merged = merge_metrics([{"x": Largest(value=1.0)}, {"x": Largest(value=3.0)}, {"x": Largest(value=2.0)}])
    assert merged == {"x": Largest(value=3.0)}
    with pytest.raises(TypeError, match="one kind"):
        merge_metrics([{"x": Largest(value=1.0)}, {"x": Mean(total=1.0, weight=1.0)}])


def test_masked_metrics_ignore_nan_off_the_mask():
    assert mean_of(torch.tensor([1.0, float("nan")]), torch.tensor([True, False])).value == 1.0


def test_supervised_loss_needs_log_probs():
    with pytest.raises(ValueError, match="log_probs"):
        supervised_loss(zero_outputs(rows(), ("values",)), rows(), None)


def test_rows_of_outputs():
    outputs = ModelOutputs(
        log_probs=torch.arange(12.0).view(4, 3), scores=torch.arange(4.0), aux_loss=torch.tensor(7.0)
    )
    mine = outputs.of_rows(slice(2, 4), width=2)
    assert mine.log_probs is not None
    assert mine.scores is not None
    assert mine.aux_loss is not None
    assert mine.log_probs.tolist() == [[6, 7], [9, 10]]
    assert mine.scores.tolist() == [2, 3]
    assert mine.aux_loss.item() == 7
    assert mine.values is None


def test_a_large_metric_is_that_of_its_parts():
    values, mask = torch.randn(700, 1000), torch.rand(700, 1000) > 0.5
    values[~mask] = torch.nan
    assert len(row_parts(values)) == 3
    assert torch.equal(torch.cat(row_parts(values)).isnan(), values.isnan())
    found = mean_of(values, mask)
    assert found.weight == mask.sum()
    assert found.total == pytest.approx(float(values[mask].double().sum()), rel=1e-4, abs=1e-2)
    assert mean_of(torch.ones(700, 1000), mask[:, :1]).total == 1000 * mask[:, :1].sum()
    (whole,) = row_parts(values[:3])
    assert whole.data_ptr() == values.data_ptr()
