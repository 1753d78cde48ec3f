import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rlhf_algos.advantages.registry import make_advantage
from rlhf_algos.advantages.returns import turn_ends
from rlhf_algos.advantages.steps import step_advantages, step_index
from rlhf_core import Batch

T, F = True, False


def batch(mask, rewards=None):
    mask = torch.tensor(mask)
    columns = {} if rewards is None else {"rewards": torch.tensor(rewards, dtype=torch.float64)}
    everything = torch.ones_like(mask)
    return Batch(token_ids=everything.long(), attention_mask=everything, response_mask=mask, columns=columns)


def test_steps_end_with_turns_and_rewards():
    mask = torch.tensor([[F, T, T, F, T, T, T]])
    assert turn_ends(mask).int().tolist() == [[0, 0, 1, 0, 0, 0, 1]]
    rewards = torch.tensor([[0.0, 0.0, 0.0, 9.0, 0.5, 0.0, 0.0]])
    assert step_index(rewards, mask)[mask].tolist() == [0, 0, 1, 2, 2]


def test_a_row_of_fewer_steps_leaves_the_later_ones_to_the_others():
    """Steps of the rows: (1, 2), (3), (0, 4). The second steps are compared among the first and the third row."""
    rows = batch(
        [[F, T, F, T], [F, T, F, F], [F, T, F, T]],
        [[0.0, 1.0, 0.0, 2.0], [0.0, 3.0, 0.0, 0.0], [0.0, 0.0, 0.0, 4.0]],
    )
    scores = torch.tensor([3.0, 3.0, 4.0], dtype=torch.float64)
    got = step_advantages(make_advantage("rloo"), scores, torch.zeros(3, dtype=torch.long), rows)
    expected = torch.tensor([[0, 3 - 3.5, 0, 2 - 4], [0, 3 - 3.5, 0, 0], [0, 4 - 3, 0, 4 - 2]], dtype=torch.float64)
    torch.testing.assert_close(got, expected)


def test_groups_rewarded_at_the_end_alone_have_one_advantage_per_response():
    rows = batch([[F, T, F, T]] * 4, [[0.0, 0, 0, 1], [0.0, 0, 0, 0], [0.0, 1, 0, 1], [0.0, 0, 0, 1]])
    scores, ids = torch.tensor([1.0, 0.0, 2.0, 1.0], dtype=torch.float64), torch.tensor([0, 0, 1, 1])
    got = step_advantages(make_advantage("grpo", {"scale": "none"}), scores, ids, rows)
    assert got.tolist() == [[0, 0.5, 0, 0.5], [0, -0.5, 0, -0.5], [0, 0.5, 0, 0], [0, -0.5, 0, 0]]
    without = batch([[F, T, F, T]] * 4)
    assert step_advantages(make_advantage("grpo"), scores, ids, without).shape == (4,)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000))
def test_without_baseline_the_advantages_are_the_rewards_to_go(seed):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(4, 8, generator=generator) > 0.4
    rewards = torch.randn(4, 8, generator=generator, dtype=torch.float64) * (
        torch.rand(4, 8, generator=generator) > 0.6
    )
    rows = batch(mask.tolist(), rewards.tolist())
    scores = (rewards * mask).sum(1)
    got = step_advantages(make_advantage("reinforce"), scores, torch.zeros(4, dtype=torch.long), rows)
    to_go = (rewards * mask).flip(1).cumsum(1).flip(1).masked_fill(~mask, 0)
    if got.dim() == 1:
        got = got.unsqueeze(1).expand(mask.shape).masked_fill(~mask, 0)
    # Within a step every token has the return of the whole step, whose reward falls at its end.
    torch.testing.assert_close(got, to_go)
