"""What must hold for every loss: padding, micro-batches and order do not matter, gradients are right, extremes are
finite, masked values are never read."""

import math
from dataclasses import replace

import pytest
import torch
from rlhf_algos.losses.offline.distillation import OnPolicyDistillationConfig, on_policy_distillation
from rlhf_algos.losses.offline.kto import KTOConfig, kto
from rlhf_algos.losses.offline.pairwise import PAIR_LOSSES, aot_partners
from rlhf_algos.losses.offline.preference import DPOConfig, dpo, with_sft_divisor
from rlhf_algos.losses.offline.reference_free import CPOConfig, ORPOConfig, SimPOConfig, cpo, orpo, simpo
from rlhf_algos.losses.offline.reward_model import (
    BradleyTerryConfig,
    ProcessRewardLossConfig,
    bradley_terry,
    process_reward_loss,
)
from rlhf_algos.losses.offline.sft import SFTConfig, sft
from rlhf_algos.losses.online.clipped import PPOClipConfig, ReinforceConfig, ppo_clip, reinforce
from rlhf_algos.losses.online.covariance import ClipCovConfig, KLCovConfig, clip_cov, kl_cov
from rlhf_algos.losses.online.sequence import GMPOConfig, GSPOConfig, gmpo, gspo
from rlhf_algos.losses.online.soft_clip import CISPOConfig, SAPOConfig, cispo, sapo
from rlhf_algos.losses.online.value import ValueClipConfig, value_clip
from rlhf_core import Batch, Loss, ModelOutputs, accumulate

LENGTHS = [7, 4, 9, 3, 6, 5, 8, 4]
WIDTH = 9
REGULARISED = {"kl_coef": 0.3, "entropy_coef": 0.1}


def make(function, config=None, outputs=None):
    if outputs is None:
        outputs = getattr(config, "outputs", ("log_probs",))
    return Loss(function=function, config=config, outputs=outputs)


POLICY = {
    "ppo": make(ppo_clip, PPOClipConfig(dual_clip=3.0, **REGULARISED)),
    "ppo_seq": make(ppo_clip, PPOClipConfig(aggregation="seq_mean_token_mean", clip_range_high=0.3, **REGULARISED)),
    "ppo_no_empty": make(ppo_clip, PPOClipConfig(aggregation="seq_mean_token_sum", count_empty_rows=False)),
    "dr_grpo": make(
        ppo_clip, PPOClipConfig(aggregation="max_length", max_length=20, kl_gradient="k2", kl_coef=0.1)
    ),
    "kl_weighted": make(ppo_clip, PPOClipConfig(kl_coef=0.2, kl_estimator="k1", kl_ratio_weighted=True)),
    "reinforce": make(reinforce, ReinforceConfig(**REGULARISED)),
    "gspo": make(gspo, GSPOConfig(clip_range=0.1, clip_range_high=0.2, **REGULARISED)),
    "rloo_sequence": make(gspo, GSPOConfig(clip_range=0.2, clip_range_high=0.2, length_normalized=False)),
    "gspo_token": make(gspo, GSPOConfig(clip_range=0.1, clip_range_high=0.2, token_form=True)),
    "gmpo": make(gmpo, GMPOConfig(**REGULARISED)),
    "cispo": make(cispo, CISPOConfig(ratio_high=1.2)),
    "sapo": make(sapo, SAPOConfig(**REGULARISED)),
    "kl_cov": make(kl_cov, KLCovConfig(fraction=0.2)),
    "clip_cov": make(clip_cov, ClipCovConfig(fraction=0.2, covariance_low=0.01)),
}
PAIRS = {
    **{name: make(dpo, DPOConfig(loss=name, label_smoothing=0.1, sft_coef=0.2)) for name in PAIR_LOSSES},
    "aot": make(dpo, DPOConfig(loss="aot")),
    "aot_unpaired": make(dpo, DPOConfig(loss="aot_unpaired")),
    "dpo_mean": make(dpo, DPOConfig(length_normalized=True, sft_coef=0.5, sft_mean="token")),
    "dpo_js": make(dpo, DPOConfig(f_divergence="js_divergence")),
    "dpo_alpha": make(dpo, DPOConfig(f_divergence="alpha_divergence")),
    "dpo_forward": make(dpo, DPOConfig(f_divergence="forward_kl")),
    "simpo": make(simpo, SimPOConfig(sft_coef=0.3)),
    "cpo": make(cpo, CPOConfig(sft_mean="token")),
    "cpo_ipo": make(cpo, CPOConfig(loss="ipo")),
    "orpo": make(orpo, ORPOConfig()),
    "bradley_terry": make(bradley_terry, BradleyTerryConfig(center_coef=0.1)),
    "log_exp": make(bradley_terry, BradleyTerryConfig(loss="log_exp")),
}
ROWS = {
    "value": make(value_clip, ValueClipConfig()),
    "value_rows": make(
        value_clip, ValueClipConfig(clip_range=None, aggregation="seq_mean_token_mean"), ("values",)
    ),
    "kto": make(kto, KTOConfig(desirable_weight=1.5)),
    "kto_zero": make(kto, KTOConfig(loss="apo_zero")),
    "sft": make(sft, SFTConfig()),
    "dft": make(sft, SFTConfig(loss="dft", aggregation="seq_mean_token_mean")),
    "process": make(process_reward_loss, ProcessRewardLossConfig()),
    "outcome": make(process_reward_loss, ProcessRewardLossConfig(supervision="outcome")),
    "on_policy_kd": make(on_policy_distillation, OnPolicyDistillationConfig(clip_range=0.2)),
}
LOSSES = {**POLICY, **PAIRS, **ROWS}
STOP_GRADIENT = {"cispo", "dft", "on_policy_kd", "gspo_token", "dr_grpo", "aot_unpaired"}
"""Losses whose gradient is not, by intention, the derivative of their value."""

everyone = pytest.mark.parametrize("name", sorted(LOSSES))


def world(name):
    """A batch with every column, and the parameters that stand for a model's outputs."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    rows = len(LENGTHS)
    shape = (rows, WIDTH)
    positions = torch.arange(WIDTH)
    attention = positions < torch.tensor(LENGTHS)[:, None]
    response = attention & (positions >= 2) & (torch.rand(*shape, generator=generator) > 0.2)
    response[3] = False  # a row in which nothing counts
    response[5] = positions == 3  # a single counted token
    log_probs = -normal(*shape).abs() - 0.1
    columns = {
        "row_index": torch.arange(rows),
        "old_log_probs": log_probs + 0.3 * normal(*shape),
        "ref_log_probs": log_probs + 0.3 * normal(*shape),
        "teacher_log_probs": log_probs + 0.3 * normal(*shape),
        "importance_weights": normal(*shape).abs(),
        "advantages": normal(*shape),
        "old_values": normal(*shape),
        "returns": normal(*shape),
        "step_labels": torch.rand(*shape, generator=generator, dtype=torch.float64),
        "ref_log_probs_sum": (log_probs * response).sum(1) + normal(rows),
        "desirable": torch.tensor([True, False] * (rows // 2)),
        "kl_baseline": torch.full((rows,), 0.2, dtype=torch.float64),
        "margin": normal(rows),
        "reward_shift": torch.full((rows,), 0.1, dtype=torch.float64),
    }
    sums = (log_probs * response).sum(1)
    columns["aot_partner"] = aot_partners(sums, columns["ref_log_probs_sum"], paired=name == "aot")
    batch = Batch(
        token_ids=torch.randint(1, 50, shape, generator=generator) * attention,
        attention_mask=attention,
        response_mask=response,
        columns=columns,
        rows_per_unit=2 if name in PAIRS else 1,
        sample_ids=tuple(str(row) for row in range(rows)),
    )
    if batch.rows_per_unit == 2:
        batch = with_sft_divisor(batch)
    config = LOSSES[name].config
    if name in POLICY:
        batch = config.add_columns(batch)
    parameters = {
        "log_probs": log_probs,
        "entropy": normal(*shape).abs(),
        "values": normal(*shape),
        "scores": normal(rows),
    }
    return batch, parameters


def outputs_of(parameters, batch, fields):
    rows = batch["row_index"]
    width = batch.token_ids.shape[1]
    found = {}
    for name in fields:
        value = parameters[name][rows]
        if value.dim() == 2:
            value = torch.nn.functional.pad(value, (0, max(0, width - value.shape[1])))[:, :width]
            value = value.masked_fill(~batch.response_mask, 0)
        found[name] = value
    return ModelOutputs(**found)


def gradients(name, batch, parameters, max_tokens):
    leaves = {key: value.clone().requires_grad_() for key, value in parameters.items()}
    result = accumulate(
        batch,
        LOSSES[name],
        forward=lambda piece, fields: outputs_of(leaves, piece, fields),
        backward=lambda loss, last: loss.backward(),
        max_tokens=max_tokens,
    )
    found = {key: leaf.grad for key, leaf in leaves.items() if leaf.grad is not None}
    return result, found


@everyone
def test_micro_batches_do_not_matter(name):
    batch, parameters = world(name)
    whole, expected = gradients(name, batch, parameters, 10_000)
    assert expected
    for max_tokens in (1, 20, 40):
        cut, found = gradients(name, batch, parameters, max_tokens)
        assert cut.loss == pytest.approx(whole.loss, rel=1e-9)
        assert cut.weight == whole.weight
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value)
        for key, mean in whole.metrics.items():
            assert cut.metrics[key].value == pytest.approx(mean.value, rel=1e-4, abs=1e-6), key


@everyone
def test_padding_and_order_do_not_matter(name):
    batch, parameters = world(name)
    whole, expected = gradients(name, batch, parameters, 10_000)
    units = [3, 0, 2, 1, 7, 5, 6, 4][: batch.units] if batch.units == 8 else [3, 0, 2, 1]

    def widen(tensor):
        if tensor.dim() == 1:
            return tensor
        filler = float("nan") if tensor.is_floating_point() else 0
        return torch.nn.functional.pad(tensor, (0, 5), value=filler)

    shuffled = batch.select_units(units)
    padded = replace(
        shuffled,
        token_ids=widen(shuffled.token_ids),
        attention_mask=widen(shuffled.attention_mask),
        response_mask=widen(shuffled.response_mask),
        columns={key: widen(value) for key, value in shuffled.columns.items()},
    )
    other, found = gradients(name, padded, parameters, 10_000)
    assert other.loss == pytest.approx(whole.loss, rel=1e-9)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value)


@everyone
def test_masked_values_are_never_read(name):
    """Whatever a column holds outside the response mask, NaN included, value and gradient stay the same."""
    batch, parameters = world(name)
    whole, expected = gradients(name, batch, parameters, 10_000)
    dirty = {
        key: value.masked_fill(~batch.response_mask, math.nan)
        if value.dim() == 2 and value.is_floating_point()
        else value
        for key, value in batch.columns.items()
    }
    other, found = gradients(name, replace(batch, columns=dirty), parameters, 10_000)
    assert other.loss == pytest.approx(whole.loss, rel=1e-9)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value)


@everyone
def test_gradcheck(name):
    if name in STOP_GRADIENT:
        pytest.skip("has a stop-gradient")
    batch, parameters = world(name)
    loss = LOSSES[name]
    leaves = tuple(parameters[field].clone().requires_grad_() for field in loss.outputs)

    def value(*tensors):
        found = outputs_of(dict(zip(loss.outputs, tensors, strict=True)), batch, loss.outputs)
        return loss(found, batch).total

    assert torch.autograd.gradcheck(value, leaves)


@everyone
def test_nothing_to_learn_from_is_zero_not_nan(name):
    batch, parameters = world(name)
    empty = replace(batch, response_mask=torch.zeros_like(batch.response_mask))
    result, found = gradients(name, empty, parameters, 10_000)
    assert math.isfinite(result.loss)
    assert all(torch.isfinite(value).all() for value in found.values())


@everyone
@pytest.mark.parametrize("gap", [-100.0, 100.0])
def test_extreme_log_ratios_are_finite_in_float32(name, gap):
    batch, parameters = world(name)
    columns = {key: value.float() if value.is_floating_point() else value for key, value in batch.columns.items()}
    batch = replace(batch, columns=columns)
    extreme = {key: value.float() for key, value in parameters.items()}
    extreme["log_probs"] = extreme["log_probs"] + gap
    extreme["scores"] = extreme["scores"] * gap
    extreme["values"] = extreme["values"] * gap
    result, found = gradients(name, batch, extreme, 10_000)
    assert math.isfinite(result.loss)
    assert all(torch.isfinite(value).all() for value in found.values())


@everyone
def test_weight_does_not_depend_on_the_model(name):
    batch, parameters = world(name)
    loss = LOSSES[name]
    terms = loss(outputs_of(parameters, batch, loss.outputs), batch)
    assert float(terms.weight) == loss.weight(batch)
    assert terms.total.dim() == 0
