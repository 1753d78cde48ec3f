import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlhf_core import OptimizerConfig
from rlhf_train import learning_rate


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
    schedule=st.sampled_from(["linear", "cosine"]),
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
