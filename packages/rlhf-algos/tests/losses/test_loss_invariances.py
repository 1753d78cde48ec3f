"""Our own losses under the suite that we publish for everybody's."""

from functools import partial
from typing import get_args

import pytest
from rlhf_algos.losses.offline.distillation import OnPolicyDistillationConfig, on_policy_distillation
from rlhf_algos.losses.offline.kto import KTOConfig, kto
from rlhf_algos.losses.offline.pairwise import PAIR_LOSSES, PairLoss, aot_partners
from rlhf_algos.losses.offline.preference import DPOConfig, dpo, with_sft_divisor
from rlhf_algos.losses.offline.reference_free import (
    CPOConfig,
    ORPOConfig,
    SimPOConfig,
    TPOConfig,
    cpo,
    orpo,
    simpo,
    tpo,
)
from rlhf_algos.losses.offline.reward_model import (
    BradleyTerryConfig,
    ProcessRewardLossConfig,
    bradley_terry,
    process_reward_loss,
)
from rlhf_algos.losses.offline.sft import SFTConfig, sft
from rlhf_algos.losses.online.clipped import PPOClipConfig, ReinforceConfig, ppo_clip, reinforce
from rlhf_algos.losses.online.covariance import ClipCovConfig, KLCovConfig, clip_cov, kl_cov
from rlhf_algos.losses.online.pretraining import with_likelihood
from rlhf_algos.losses.online.registry import POLICY_LOSSES
from rlhf_algos.losses.online.sequence import GMPOConfig, GSPOConfig, VESPOConfig, gmpo, gspo, vespo
from rlhf_algos.losses.online.soft_clip import CISPOConfig, DROConfig, SAPOConfig, cispo, dro, sapo
from rlhf_algos.losses.online.trust_region import DPPOConfig, dppo
from rlhf_algos.losses.online.value import ValueClipConfig, value_clip
from rlhf_algos.testing import LossCase, LossInvariances, sample_batch
from rlhf_core import Loss

LIKELIHOOD = "ppo_likelihood"
REGULARISED = {"kl_coef": 0.3, "entropy_coef": 0.1}


def make(function, config=None, outputs=None):
    if outputs is None:
        outputs = getattr(config, "outputs", ("log_probs",))
    return Loss(function=function, config=config, outputs=outputs)


POLICY = {
    "ppo": make(ppo_clip, PPOClipConfig(dual_clip=3.0, **REGULARISED)),
    "ppo_seq": make(ppo_clip, PPOClipConfig(aggregation="seq_mean_token_mean", clip_range_high=0.3, **REGULARISED)),
    LIKELIHOOD: make(ppo_clip, PPOClipConfig(aggregation="seq_mean_token_mean")),
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
    "dro": make(dro, DROConfig(beta=0.5, **REGULARISED)),
    "prompt_mean": make(ppo_clip, PPOClipConfig(aggregation="prompt_mean", **REGULARISED)),
    "top_entropy": make(ppo_clip, PPOClipConfig(top_entropy=0.4)),
    "opsm": make(ppo_clip, PPOClipConfig(sequence_kl_limit=0.01)),
    "dppo": make(dppo, DPPOConfig(limit_low=0.05, log_ratio_coef=0.1, **REGULARISED)),
    "dppo_kl": make(dppo, DPPOConfig(divergence="kl", limit_low=0.01, symmetric=True)),
    "vespo": make(vespo, VESPOConfig(kl_coef=0.1)),
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
    "dpo_ld": make(dpo, DPOConfig(ld_alpha=0.3)),
    "dpo_ld_js": make(dpo, DPOConfig(ld_alpha=0.0, f_divergence="js_divergence", reference_free=True)),
    "dpo_weighted": make(dpo, DPOConfig(weighted=True)),
    "xpo": make(dpo, DPOConfig(exploration_coef=0.1)),
    "alpha_po": make(simpo, SimPOConfig(alpha=0.25)),
    "alpha_po_down": make(cpo, CPOConfig(alpha=-0.5)),
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
    "bco": make(kto, KTOConfig(loss="bco", undesirable_weight=0.5)),
    "sft": make(sft, SFTConfig()),
    "sft_no_empty": make(sft, SFTConfig(aggregation="seq_mean_token_mean", count_empty_rows=False)),
    "dft": make(sft, SFTConfig(loss="dft", aggregation="seq_mean_token_mean")),
    "process": make(process_reward_loss, ProcessRewardLossConfig()),
    "outcome": make(process_reward_loss, ProcessRewardLossConfig(supervision="outcome")),
    "minillm": make(on_policy_distillation, OnPolicyDistillationConfig(gamma=0.9, length_normalized=True)),
    "on_policy_kd": make(on_policy_distillation, OnPolicyDistillationConfig(clip_range=0.2)),
}
TRIPLES = {
    "tpo": make(tpo, TPOConfig(beta=0.5)),
    "tpo_l": make(tpo, TPOConfig(length_normalized=True, gamma=0.5, sft_mean="sequence")),
    "tpo_hinge": make(tpo, TPOConfig(loss="hinge", sft_coef=0.0)),
}
STOP_GRADIENT = {
    "cispo",
    "dft",
    "on_policy_kd",
    "gspo_token",
    "dr_grpo",
    "aot_unpaired",
    "dppo",
    "dppo_kl",
    "vespo",
    "dpo_weighted",
    "minillm",
}
"""Losses whose gradient is not, by intention, the derivative of their value."""


def with_pair_columns(name, batch):
    log_probs = sample_batch()[1]["log_probs"]
    sums = (log_probs * batch.response_mask).sum(1)
    partners = aot_partners(sums, batch["ref_log_probs_sum"], paired=name == "aot")
    return with_sft_divisor(batch).with_columns(aot_partner=partners)


def with_right_answers(batch):
    """The likelihood of every other response, beside the policy loss."""
    return with_likelihood(batch, batch["desirable"], 0.1, POLICY[LIKELIHOOD].config)


def case_of(name):
    if name == LIKELIHOOD:
        return LossCase(POLICY[name], prepare=with_right_answers)
    if name in PAIRS:
        prepare = partial(with_pair_columns, name)
        return LossCase(PAIRS[name], rows_per_unit=2, stop_gradient=name in STOP_GRADIENT, prepare=prepare)
    if name in TRIPLES:
        return LossCase(TRIPLES[name], rows_per_unit=3, prepare=partial(with_sft_divisor, place=2))
    return LossCase({**POLICY, **ROWS}[name], stop_gradient=name in STOP_GRADIENT)


class TestLosses(LossInvariances):
    @pytest.fixture(params=sorted({**POLICY, **PAIRS, **TRIPLES, **ROWS}))
    def case(self, request):
        return case_of(request.param)


def test_every_policy_loss_and_pair_loss_is_here():
    functions = {loss.function for loss in POLICY.values()}
    assert functions == {function for function, _ in POLICY_LOSSES.values()}
    assert {loss.config.loss for loss in PAIRS.values() if loss.function is dpo} == set(get_args(PairLoss))
