import pytest
import torch
from rlhf_algos.losses.online.value import ValueClipConfig, value_clip
from rlhf_core import Batch, ConfigError, ModelOutputs

MASK = torch.tensor([[False, True, True, True]])


def run(config, values=(0.0, 1.0, 3.0, 0.5)):
    batch = Batch(
        token_ids=torch.zeros(1, 4, dtype=torch.long),
        attention_mask=torch.ones(1, 4, dtype=torch.bool),
        response_mask=MASK,
        columns={
            "old_values": torch.tensor([[9.0, 0.5, 1.0, 0.5]]),
            "returns": torch.tensor([[9.0, 2.0, 4.0, 1.0]]),
        },
    )
    values = torch.tensor([values], requires_grad=True)
    return values, value_clip(ModelOutputs(values=values), batch, config)


def test_by_hand():
    _, terms = run(ValueClipConfig(clip_range=0.2))
    # clipped values 0.7, 1.2, 0.5
    assert float(terms.total.detach()) == pytest.approx((1.3**2 + 2.8**2 + 0.25) / 2)
    assert float(terms.weight) == 3
    assert terms.metrics["value_clip_fraction"].value == pytest.approx(2 / 3)
    assert terms.metrics["value_error"].value == pytest.approx((1 + 1 + 0.25) / 3)


def test_without_clipping_the_gradient_points_to_the_returns():
    values, terms = run(ValueClipConfig(clip_range=None, aggregation="seq_mean_token_mean"))
    assert float(terms.total.detach()) == pytest.approx((1 + 1 + 0.25) / 6)
    terms.total.backward()
    assert values.grad[0].tolist() == pytest.approx([0, -1 / 3, -1 / 3, -0.5 / 3])


def test_a_value_within_the_range_is_not_counted_as_clipped():
    """0.6 + (0.1 - 0.6) is a little above 0.1 in float32: rounding, no clipping."""
    batch = Batch(
        token_ids=torch.zeros(1, 1, dtype=torch.long),
        attention_mask=torch.ones(1, 1, dtype=torch.bool),
        response_mask=torch.ones(1, 1, dtype=torch.bool),
        columns={"old_values": torch.tensor([[0.6]]), "returns": torch.tensor([[0.0]])},
    )
    values = torch.tensor([[0.1]], requires_grad=True)
    terms = value_clip(ModelOutputs(values=values), batch, ValueClipConfig(clip_range=1.0))
    assert terms.metrics["value_clip_fraction"].value == 0
    terms.total.backward()
    assert float(terms.total.detach()) == float(values.detach().square().sum() / 2)
    assert float(values.grad) == pytest.approx(0.1)


def test_refused():
    with pytest.raises(ConfigError, match="clip_range"):
        ValueClipConfig(clip_range=0.0)
    with pytest.raises(ConfigError, match="outputs"):
        value_clip(ModelOutputs(), None, ValueClipConfig())  # type: ignore[arg-type]
