"""Where numbers part: hand-made batches, reports and models."""

import math

import pytest
import torch
from rlhf_core import Batch, StepReport
from rlhf_launch.replay.parting import first_parted, part_batches, part_models, part_reports
from safetensors.torch import save_file

TOKENS = torch.tensor([[5, 6, 7], [5, 8, 0]])
ANSWERS = torch.tensor([[False, True, True], [False, True, False]])


def a_batch(**columns):
    return Batch(
        token_ids=TOKENS,
        attention_mask=TOKENS > 0,
        response_mask=ANSWERS,
        columns=columns,
        sample_ids=("a/0", "a/1"),
    )


def by_name(partings):
    return {parting.name: parting for parting in partings}


def test_the_largest_difference_has_its_sample_and_token():
    then = a_batch(old_log_probs=torch.tensor([[0.0, -1.0, -2.0], [0.0, -3.0, 0.0]]))
    now = a_batch(old_log_probs=torch.tensor([[9.0, -1.0, -2.5], [9.0, -3.25, 9.0]]))
    (found,) = part_batches(then, now, 0.1)
    assert (found.stage, found.largest, found.mean) == ("model outputs", 0.5, 0.25)
    assert found.where == "sample a/0, token 2 (id 7)"
    assert found.parted


def test_the_tolerance_is_relative_to_large_values_and_absolute_to_small_ones():
    then, now = torch.tensor([0.01, 100.0]), torch.tensor([0.02, 101.0])
    (found,) = part_batches(a_batch(returns=then), a_batch(returns=now), 0.02)
    assert not found.parted
    (found,) = part_batches(a_batch(returns=then), a_batch(returns=now), 0.009)
    assert found.parted
    assert found.where == "sample a/1"


def test_model_outputs_come_before_what_is_made_of_them():
    columns = {
        name: torch.zeros(2, 3)
        for name in (
            "advantages",
            "values",
            "returns",
            "old_entropy",
            "ref_log_probs",
            "old_log_probs",
            "old_values",
        )
    }
    given = {"rollout_log_probs": torch.zeros(2, 3), "scores": torch.zeros(2), "score/right": torch.zeros(2)}
    found = list(part_batches(a_batch(**columns, **given), a_batch(**columns, **given), 0.0))
    assert [parting.name for parting in found] == [
        *("old_log_probs", "ref_log_probs", "values", "old_entropy"),
        *("advantages", "old_values", "returns"),
    ]
    assert all(parting.equal and not parting.parted for parting in found)


def test_columns_that_only_one_side_has_are_left_out():
    assert not list(part_batches(a_batch(values=torch.zeros(2, 3)), a_batch(returns=torch.zeros(2, 3)), 0.0))


def test_what_is_not_finite_on_one_side_alone_parts():
    then = torch.tensor([math.nan, math.inf])
    (same,) = part_batches(a_batch(returns=then), a_batch(returns=then.clone()), 0.0)
    assert same.equal
    (other,) = part_batches(a_batch(returns=then), a_batch(returns=torch.tensor([1.0, math.inf])), 1e9)
    assert other.parted
    assert math.isinf(other.largest)


def report(loss, norm, **metrics):
    return StepReport(loss=loss, grad_norm=norm, learning_rate=1.0, metrics=metrics)


def test_losses_come_before_gradients_and_name_the_optimizer_step():
    then = {"policy": [report(1.0, 2.0, entropy=0.5), report(3.0, 4.0, entropy=0.5)]}
    now = {"policy": [report(1.0, 2.0, entropy=0.5), report(3.5, 4.0, entropy=0.5)]}
    found = list(part_reports(then, now, 0.1))
    assert [(one.stage, one.name) for one in found] == [
        *(("loss", "policy/loss"), ("loss", "policy/entropy")),
        ("gradient", "policy/grad_norm"),
    ]
    assert found[0].where == "optimizer step 2: 3 then, 3.5 now"
    assert (found[0].largest, found[0].mean, found[0].parted) == (0.5, 0.25, True)
    assert first_parted(found) is found[0]


def test_only_the_optimizer_steps_that_both_took_are_compared():
    then = {"policy": [report(1.0, 2.0), report(9.0, 9.0)], "critic": [report(1.0, 2.0)]}
    found = by_name(part_reports(then, {"policy": [report(1.0, 2.0)]}, 0.0))
    assert set(found) == {"policy/loss", "policy/grad_norm"}
    assert all(one.equal for one in found.values())


def test_a_skipped_step_is_like_a_skipped_step():
    then = {"policy": [report(math.nan, math.nan)]}
    assert all(one.equal for one in part_reports(then, then, 0.0))
    assert all(one.parted for one in part_reports(then, {"policy": [report(1.0, 1.0)]}, 1e9))


@pytest.fixture
def write(tmp_path):
    def write(name, **tensors):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
        return tmp_path / name

    return write


def test_the_weight_that_parts_most_is_named(write):
    then = write("then", a=torch.tensor([1.0, 2.0]), b=torch.tensor([3.0, 4.0]))
    now = write("now", a=torch.tensor([1.0, 2.0]), b=torch.tensor([3.0, 4.5]))
    found = part_models("policy", then, now, 0.2)
    assert (found.stage, found.name, found.where) == ("weights", "policy", "b")
    assert (found.largest, found.mean, found.parted) == (0.5, 0.125, False)
    assert part_models("policy", then, then, 0.0).equal


def test_a_missing_weight_parts(write):
    found = part_models(
        "policy", write("then", a=torch.ones(1), b=torch.ones(1)), write("now", a=torch.ones(1)), 9.0
    )
    assert found.parted
    assert found.where == "b is missing"
