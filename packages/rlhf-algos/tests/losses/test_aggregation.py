import pytest
import torch
from rlhf_algos.losses.aggregation import aggregate, row_count
from rlhf_core import ConfigError

VALUES = torch.tensor([[1.0, 2.0, 3.0], [10.0, float("nan"), 0.0], [float("inf"), 7.0, 7.0]])
MASK = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])


@pytest.mark.parametrize(
    ("how", "total", "weight"),
    [
        ("token_mean", 16.0, 4.0),
        ("seq_mean_token_mean", 12.0, 3.0),
        ("seq_mean_token_sum", 16.0, 3.0),
        ("max_length", 1.6, 3.0),
    ],
)
def test_hand_computed(how, total, weight):
    got = aggregate(VALUES, MASK, how, max_length=10)
    assert [float(x) for x in got] == pytest.approx([total, weight])


def test_empty_rows_can_be_left_out():
    assert float(aggregate(VALUES, MASK, "seq_mean_token_mean", count_empty_rows=False)[1]) == 2
    assert float(row_count(MASK)) == 3


def test_prompt_mean_over_micro_batches():
    """Rows 0 and 1 answer one prompt with 4 tokens, row 2 another one with none."""
    tokens = torch.tensor([4.0, 4.0, 0.0])
    total, weight = aggregate(VALUES, MASK, "prompt_mean", prompt_tokens=tokens)
    assert [float(total), float(weight)] == pytest.approx([(1 + 2 + 3 + 10) / 4, 1.0])
    parts = [
        aggregate(VALUES[i : i + 1], MASK[i : i + 1], "prompt_mean", prompt_tokens=tokens[i : i + 1])
        for i in (0, 1)
    ]
    assert [float(sum(x)) for x in zip(*parts, strict=True)] == pytest.approx([4.0, 1.0])
    with pytest.raises(ConfigError, match="prompt_tokens"):
        aggregate(VALUES, MASK, "prompt_mean")


def test_unknown_or_incomplete_choice_says_what_to_write():
    with pytest.raises(ConfigError, match="token_mean"):
        aggregate(VALUES, MASK, "mean")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="largest response length"):
        aggregate(VALUES, MASK, "max_length")
