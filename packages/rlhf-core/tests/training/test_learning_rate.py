import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlhf_core import ConfigError, OptimizerConfig
from rlhf_core.training.learning_rate import learning_rate


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.6, 0.2, 0.2]),
        ("cosine", [0.5, 1.0, 1.0, 0.6, 0.2, 0.2]),
    ],
)
def test_rates_by_hand(schedule, expected):
    config = OptimizerConfig(
        learning_rate=1.0, schedule=schedule, warmup_steps=2, total_steps=4, min_learning_rate_ratio=0.2
    )
    assert [learning_rate(config, step) for step in range(6)] == pytest.approx(expected)


@given(
    warmup=st.integers(0, 20),
    decay=st.integers(1, 50),
    floor=st.floats(0, 1),
    schedule=st.sampled_from(["linear", "cosine", "wsd"]),
)
def test_a_rate_rises_then_falls_between_the_floor_and_the_peak(warmup, decay, floor, schedule):
    config = OptimizerConfig(
        learning_rate=3.0,
        schedule=schedule,
        warmup_steps=warmup,
        total_steps=warmup + decay,
        min_learning_rate_ratio=floor,
    )
    rates = [learning_rate(config, step) for step in range(warmup + decay + 3)]
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert rates[warmup] == pytest.approx(3.0)
    assert rates[-1] == pytest.approx(3.0 * floor)
    assert all(0 <= rate <= 3.0 + 1e-9 for rate in rates)


def test_wsd_is_constant_for_four_fifths_and_then_falls_as_one_minus_the_root():
    config = OptimizerConfig(learning_rate=1.0, schedule="wsd", total_steps=10)
    rates = [learning_rate(config, step) for step in range(11)]
    assert rates[:9] == [1.0] * 9
    assert rates[9] == pytest.approx(1 - 0.5**0.5)
    assert rates[10] == 0


def test_inverse_sqrt_by_hand():
    config = OptimizerConfig(
        learning_rate=1.0, schedule="inverse_sqrt", warmup_steps=4, min_learning_rate_ratio=0.25
    )
    assert [learning_rate(config, step) for step in (0, 3, 4, 16, 1000)] == pytest.approx([0.25, 1, 1, 0.5, 0.25])


def test_a_schedule_without_an_end_is_refused():
    with pytest.raises(ConfigError, match="needs total_steps"):
        learning_rate(OptimizerConfig(schedule="linear"), 0)


@pytest.mark.parametrize("fields", [{"schedule": "cosin"}, {"kind": "sgd"}])
def test_unknown_names_are_refused(fields):
    with pytest.raises(ConfigError, match="must be"):
        OptimizerConfig(**fields)
