"""Our own estimators under the suite that we publish for everybody's."""

import pytest
import torch
from rlhf_algos.advantages.registry import ADVANTAGES, make_advantage
from rlhf_algos.testing import AdvantageInvariances

CASES = {
    **{name: (name, {}) for name in ADVANTAGES},
    "grpo batch": ("grpo", {"scale": "batch"}),
    "grpo lone": ("grpo", {"singleton": "score"}),
}


class TestAdvantages(AdvantageInvariances):
    @pytest.fixture(params=sorted(CASES))
    def advantage(self, request):
        name, options = CASES[request.param]
        return make_advantage(name, options)

    def prepare(self, batch):
        return batch.with_columns(greedy_scores=torch.linspace(0, 1, batch.rows, dtype=torch.float64))
