import pytest
import torch
from rlhf_algos.advantages.registry import make_advantage
from rlhf_core import Batch, ConfigError

T, F = True, False
PROMPT = 9


def episodes(rewards, *, states=None):
    """Two episodes of two turns of one token: prompt, turn, observation, turn."""
    columns = {"rewards": torch.tensor(rewards)} if rewards is not None else {}
    if states is not None:
        columns["turn_states"] = torch.tensor(states)
    return Batch(
        token_ids=torch.tensor([[PROMPT, 1, 5, 2], [PROMPT, 3, 5, 4]]),
        attention_mask=torch.ones(2, 4, dtype=torch.bool),
        response_mask=torch.tensor([[F, T, F, T]] * 2),
        columns=columns,
    )


def advantages(batch, scores, ids=(0, 0), **options):
    return make_advantage("gigpo", options)(torch.tensor(scores), torch.tensor(ids), batch).tolist()


def test_turns_from_the_same_state_are_compared():
    """Both saw observation 5 before the second turn. Returns with gamma 0.5: (1 + 0.5, 1) and (0, 0)."""
    batch = episodes([[0.0, 1.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    got = advantages(batch, [2.0, 0.0], gamma=0.5)
    assert got == [[0, 1 + 0.75, 0, 1 + 0.5], [0, -1 - 0.75, 0, -1 - 0.5]]
    half = advantages(batch, [2.0, 0.0], gamma=0.5, turn_weight=0.5)
    assert half[0] == [0, 1 + 0.375, 0, 1 + 0.25]


def test_a_state_may_come_at_another_time_or_in_another_row():
    """State 7 comes first in one episode and second in the other; the other two states come once."""
    batch = episodes([[0.0, 0.0, 0.0, 3.0], [0.0, 0.0, 0.0, 1.0]], states=[[0, 7, 0, 8], [0, 6, 0, 7]])
    got = advantages(batch, [3.0, 1.0], gamma=0.5)
    # Returns of the turns in state 7: 1.5 and 1.
    assert got == [[0, 1 + 0.25, 0, 1], [0, -1, 0, -1 - 0.25]]


def test_states_of_other_prompts_are_other_states():
    batch = episodes([[0.0, 0.0, 0.0, 3.0], [0.0, 0.0, 0.0, 1.0]])
    assert advantages(batch, [3.0, 1.0], ids=(0, 1)) == [[0, 0, 0, 0], [0, 0, 0, 0]]


def test_without_rewards_of_turns_the_score_is_the_last_ones():
    got = advantages(episodes(None), [3.0, 1.0], gamma=0.5)
    assert got == [[0, 1 + 0.5, 0, 1 + 1], [0, -1 - 0.5, 0, -1 - 1]]


def test_refused():
    with pytest.raises(ConfigError, match="gamma"):
        make_advantage("gigpo", {"gamma": 1.5})
    with pytest.raises(ConfigError, match="group, none"):
        make_advantage("gigpo", {"scale": "batch"})
