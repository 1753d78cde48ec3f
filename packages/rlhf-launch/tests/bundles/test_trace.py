"""What a step says of its own faults."""

import math

import torch
from rlhf_core import Batch, RaggedBatch, StepReport
from rlhf_launch.bundles.trace import StepTrace

MASK = torch.tensor([[False, True, True], [False, True, False]])


def trace(reports=(), **columns):
    batch = Batch(
        token_ids=torch.ones(2, 3).long(), attention_mask=MASK | True, response_mask=MASK, columns=columns
    )
    return StepTrace(
        step=1, groups=(), batch=RaggedBatch.of(batch), reports={"policy": list(reports)} if reports else {}
    )


def report(*, skipped=False):
    return StepReport(loss=math.nan if skipped else 1.0, grad_norm=1.0, learning_rate=1.0, skipped=skipped)


def test_a_healthy_step_has_no_faults():
    assert StepTrace(step=1, groups=()).faults == []
    assert trace([report()], advantages=torch.zeros(2, 3), group_ids=torch.arange(2)).faults == []


def test_skipped_steps_and_numbers_that_are_not_finite_are_faults():
    advantages = torch.tensor([[0.0, math.inf, math.nan], [0.0, 1.0, 0.0]])
    found = trace(
        [report(skipped=True), report()], advantages=advantages, scores=torch.tensor([math.nan, math.nan])
    )
    assert found.faults == [
        "1 optimizer step(s) of the policy were skipped",
        "advantages of 1 row(s) are not finite",
        "scores of 2 row(s) are not finite",
    ]


def test_positions_without_a_loss_may_hold_anything():
    assert trace(advantages=torch.tensor([[math.nan, 0.0, 0.0], [0.0, 0.0, math.inf]])).faults == []
