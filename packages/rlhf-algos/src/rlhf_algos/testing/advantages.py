"""What must hold for every advantage estimator: `AdvantageInvariances`."""
# ruff: noqa: D102 - the name of each check is its sentence

from __future__ import annotations

import pytest
import torch
from rlhf_core import Batch
from torch import Tensor

from rlhf_algos.advantages.estimator import Advantage
from rlhf_algos.testing.samples import poisoned, sample_batch, widened

GROUPS = torch.tensor([7, 2, 7, 2, 7, 5, 5, 7])
"""Three prompts with four, two and two responses."""


class AdvantageInvariances:
    """Subclass it and give the fixture `advantage`; with `params` for several estimators.

    Override `prepare` for an estimator that needs columns beside those of `sample_batch`.
    """

    @pytest.fixture
    def advantage(self) -> Advantage:
        raise NotImplementedError("give the fixture 'advantage': the Advantage to check")

    def prepare(self, batch: Batch) -> Batch:
        """Add the columns that the estimator needs."""
        return batch

    def sample(self) -> tuple[Tensor, Tensor, Batch]:
        """Scores, group ids and the batch that is checked on."""
        batch, outputs = sample_batch()
        return outputs["scores"].sigmoid(), GROUPS, self.prepare(batch)

    def test_one_number_per_row_or_token(self, advantage: Advantage) -> None:
        scores, groups, batch = self.sample()
        found = advantage(scores, groups, batch)
        assert found.shape in (scores.shape, batch.token_ids.shape)
        assert found.dtype == scores.dtype
        assert torch.isfinite(found[batch.response_mask] if found.dim() == 2 else found).all()

    def test_the_order_of_rows_does_not_matter(self, advantage: Advantage) -> None:
        scores, groups, batch = self.sample()
        order = [3, 0, 7, 5, 1, 6, 2, 4]
        found = advantage(scores[order], groups[order], batch.select(order))
        expected = advantage(scores, groups, batch)[order]
        torch.testing.assert_close(_counted(found, batch.select(order)), _counted(expected, batch.select(order)))

    def test_the_names_of_groups_do_not_matter(self, advantage: Advantage) -> None:
        scores, groups, batch = self.sample()
        renamed = torch.tensor([{7: 0, 2: 9, 5: 4}[int(group)] for group in groups])
        torch.testing.assert_close(
            _counted(advantage(scores, renamed, batch), batch), _counted(advantage(scores, groups, batch), batch)
        )

    def test_padding_and_masked_values_do_not_matter(self, advantage: Advantage) -> None:
        scores, groups, batch = self.sample()
        found = advantage(scores, groups, widened(poisoned(batch), 3))
        found = found[:, : batch.token_ids.shape[1]] if found.dim() == 2 else found
        torch.testing.assert_close(_counted(found, batch), _counted(advantage(scores, groups, batch), batch))

    def test_equal_scores_and_lone_responses_are_finite(self, advantage: Advantage) -> None:
        scores, groups, batch = self.sample()
        for value in (0.0, 0.1, 1.0):
            for ids in (groups, torch.arange(len(groups))):
                assert torch.isfinite(_counted(advantage(torch.full_like(scores, value), ids, batch), batch)).all()


def _counted(advantages: Tensor, batch: Batch) -> Tensor:
    return advantages.masked_fill(~batch.response_mask, 0) if advantages.dim() == 2 else advantages
