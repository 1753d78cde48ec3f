"""Our own estimators under the suite that we publish for everybody's."""

import pytest
import torch
from rlhf_algos.advantages.registry import ADVANTAGES, make_advantage
from rlhf_algos.testing import AdvantageInvariances

CASES = {
    **{name: (name, {}) for name in ADVANTAGES},
    "gdpo": ("gdpo", {"parts": {"right": 1.0, "short": 0.5}}),
    "pass_at_k": ("pass_at_k", {"k": 3, "pass_score": 0.55}),
    "best_of_group plain": ("best_of_group", {"scale": "none"}),
    "gigpo scaled": ("gigpo", {"scale": "group", "turn_weight": 0.5}),
    "grpo advantages": ("grpo", {"scale": "advantages"}),
    "grpo batch": ("grpo", {"scale": "batch"}),
    "grpo lone": ("grpo", {"singleton": "score"}),
}


class TestAdvantages(AdvantageInvariances):
    @pytest.fixture(params=sorted(CASES))
    def advantage(self, request):
        name, options = CASES[request.param]
        return make_advantage(name, options)

    def prepare(self, batch):
        numbers = torch.linspace(0, 1, batch.rows, dtype=torch.float64)
        parts = {"score/right": (numbers * 7).round() % 2, "score/short": numbers.flip(0)}
        return batch.with_columns(greedy_scores=numbers, **parts)
