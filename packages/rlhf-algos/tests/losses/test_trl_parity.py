"""The same numbers as TRL: its own loss methods, run on tensors in place of a trainer's state.

Each test compares the value and the gradient with respect to the log-probs. Skipped where TRL is not installed.
"""

import importlib
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from rlhf_algos.advantages.registry import make_advantage
from rlhf_algos.losses.offline.distillation import DivergenceConfig, divergence_from_logits
from rlhf_algos.losses.offline.kto import KTOConfig, kl_baseline, kto, with_kl_baseline
from rlhf_algos.losses.offline.pairwise import aot_partners
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
from rlhf_algos.losses.offline.responses import shared_log_probs
from rlhf_algos.losses.offline.reward_model import BradleyTerryConfig, bradley_terry
from rlhf_algos.losses.online.clipped import PPOClipConfig, ppo_clip
from rlhf_algos.losses.online.sequence import GMPOConfig, GSPOConfig, VESPOConfig, gmpo, gspo, vespo
from rlhf_algos.losses.online.soft_clip import CISPOConfig, SAPOConfig, cispo, sapo
from rlhf_algos.off_policy import OffPolicyCorrection
from rlhf_core import Batch, ModelOutputs

pytest.importorskip("trl")

ROWS, PROMPT, LENGTH = 6, 2, 5
TOLERANCE = {"rtol": 1e-6, "atol": 1e-8}


def trl_class(path):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"trl.{module}"), name)


def nested_metrics():
    return defaultdict(lambda: defaultdict(list))


class Accelerator:
    """One process: everything is already gathered."""

    device = torch.device("cpu")
    num_processes = 1
    sync_gradients = False
    gather = gather_for_metrics = staticmethod(lambda value: value)
    reduce = staticmethod(lambda value, reduction: value)
    pad_across_processes = staticmethod(lambda value, dim, pad_index: value)


def sample(seed=0, dtype=torch.float64):
    """TRL's tensors: completions alone, [rows, tokens]."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype)

    mask = torch.arange(LENGTH) < torch.tensor([5, 3, 1, 4, 5, 2])[:, None]
    log_probs = -normal(ROWS, LENGTH).abs() * mask
    return SimpleNamespace(
        mask=mask,
        log_probs=log_probs,
        old=(log_probs + 0.3 * normal(ROWS, LENGTH)) * mask,
        ref=(log_probs + 0.3 * normal(ROWS, LENGTH)) * mask,
        advantages=normal(ROWS),
        entropy=normal(ROWS, LENGTH).abs(),
        weights=normal(ROWS, LENGTH).abs(),
        normal=normal,
    )


def with_prompt(values):
    return torch.nn.functional.pad(values, (PROMPT, 0))


def rows_of(mask, *, rows_per_unit=1, **columns):
    mask = with_prompt(mask)
    return Batch(
        token_ids=torch.ones(mask.shape, dtype=torch.long),
        attention_mask=torch.ones_like(mask),
        response_mask=mask,
        columns=columns,
        rows_per_unit=rows_per_unit,
    )


def agree(ours, theirs, leaf):
    """Compare our mean and its gradient with their loss and its gradient."""
    mean = ours.total / ours.weight
    torch.testing.assert_close(mean, theirs, **TOLERANCE)
    expected = torch.autograd.grad(theirs, leaf)[0]
    torch.testing.assert_close(torch.autograd.grad(mean, leaf)[0], expected, **TOLERANCE)


# ---------------------------------------------------------------- policy losses

WIDE = {"clip_range": 0.1, "clip_range_high": 0.2}
SEQUENCE = {"aggregation": "seq_mean_token_mean"}
POLICY = {
    "grpo": ({}, ppo_clip, PPOClipConfig(**WIDE, **SEQUENCE)),
    "bnpo": ({}, ppo_clip, PPOClipConfig(**WIDE)),
    "dapo": ({}, ppo_clip, PPOClipConfig(**WIDE)),
    "dr_grpo": ({}, ppo_clip, PPOClipConfig(**WIDE, aggregation="max_length", max_length=LENGTH)),
    "luspo": ({}, ppo_clip, PPOClipConfig(**WIDE, aggregation="seq_mean_token_sum")),
    "grpo two-sided": ({"delta": 1.3}, ppo_clip, PPOClipConfig(**WIDE, **SEQUENCE, dual_clip=1.3)),
    "grpo kl": ({"beta": 0.4}, ppo_clip, PPOClipConfig(**WIDE, **SEQUENCE, kl_coef=0.4)),
    "dapo kl": (
        {"beta": 0.4, "use_bias_correction_kl": True},
        ppo_clip,
        PPOClipConfig(**WIDE, kl_coef=0.4, kl_ratio_weighted=True),
    ),
    "dapo entropy": ({"entropy_coef": 0.1}, ppo_clip, PPOClipConfig(**WIDE, entropy_coef=0.1)),
    "dapo weights": ({"use_vllm": True}, ppo_clip, PPOClipConfig(**WIDE)),
    "grpo sequence": ({"importance_sampling_level": "sequence"}, gspo, GSPOConfig(**WIDE)),
    "cispo": ({}, cispo, CISPOConfig(ratio_high=0.2)),
    "luspo sequence": (
        {"importance_sampling_level": "sequence"},
        gspo,
        GSPOConfig(**WIDE, aggregation="seq_mean_token_sum"),
    ),
    "vespo": ({}, vespo, VESPOConfig()),
    "grpo opsm": (
        {"off_policy_mask_threshold": 0.02},
        ppo_clip,
        PPOClipConfig(**WIDE, **SEQUENCE, sequence_kl_limit=0.02),
    ),
    "dapo entropy tokens": ({"top_entropy_quantile": 0.3}, ppo_clip, PPOClipConfig(**WIDE, top_entropy=0.3)),
    "sapo": ({}, sapo, SAPOConfig(temperature_positive=1.0, temperature_negative=1.05)),
}


def grpo_state(loss_type, data, leaf, options):
    """What GRPOTrainer._compute_loss reads of its trainer."""
    trainer = trl_class("trainer.grpo_trainer.GRPOTrainer")
    return SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (leaf, data.entropy, None),
        aux_loss_enabled=False,
        top_entropy_quantile=options.get("top_entropy_quantile", 1.0),
        off_policy_mask_threshold=options.get("off_policy_mask_threshold"),
        **{name: getattr(trainer, name) for name in ("get_off_policy_mask", "get_gamma_weights")},
        importance_sampling_level=options.get("importance_sampling_level", "token"),
        beta=options.get("beta", 0.0),
        args=SimpleNamespace(
            use_bias_correction_kl=options.get("use_bias_correction_kl", False),
            delta=options.get("delta"),
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            vespo_k_pos=2.0,
            vespo_lambda_pos=3.0,
            vespo_k_neg=3.0,
            vespo_lambda_neg=2.0,
            steps_per_generation=1,
        ),
        loss_type=loss_type,
        epsilon_low=0.1,
        epsilon_high=0.2,
        use_vllm=options.get("use_vllm", False),
        vllm_importance_sampling_correction=True,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=LENGTH,
        accelerator=Accelerator(),
        _entropy_bonus_enabled="entropy_coef" in options,
        use_adaptive_entropy=False,
        entropy_coef=options.get("entropy_coef", 0.0),
        _metrics=nested_metrics(),
    )


def completion_inputs(data):
    ids = torch.ones(data.mask.shape, dtype=torch.long)
    return {
        "prompt_ids": ids[:, :PROMPT],
        "prompt_mask": ids[:, :PROMPT],
        "completion_ids": ids,
        "completion_mask": data.mask.long(),
        "advantages": data.advantages,
        "old_per_token_logps": data.old,
        "ref_per_token_logps": data.ref,
        "importance_sampling_ratio": data.weights,
        "num_items_in_batch": data.mask.sum(),
    }


@pytest.mark.parametrize("name", sorted(POLICY))
def test_grpo_trainer(name):
    options, function, config = POLICY[name]
    data = sample()
    leaf = data.log_probs.clone().requires_grad_()
    state = grpo_state(name.split()[0], data, leaf, options)
    high = trl_class("trainer.grpo_trainer.GRPOTrainer").get_high_entropy_mask
    state.get_high_entropy_mask = lambda entropies, mask, threshold: high(state, entropies, mask, threshold)
    inputs = completion_inputs(data)
    if not options.get("use_vllm"):
        del inputs["importance_sampling_ratio"]
    theirs = trl_class("trainer.grpo_trainer.GRPOTrainer")._compute_loss(state, None, inputs)
    columns = {"advantages": data.advantages, "old_log_probs": with_prompt(data.old)}
    columns["ref_log_probs"] = with_prompt(data.ref)
    if options.get("use_vllm"):
        columns["importance_weights"] = with_prompt(data.weights)
    outputs = ModelOutputs(log_probs=with_prompt(leaf), entropy=with_prompt(data.entropy))
    batch = config.add_columns(rows_of(data.mask, old_entropy=with_prompt(data.entropy), **columns))
    agree(function(outputs, batch, config), theirs, leaf)


def test_gmpo_trainer():
    data = sample()
    leaf = data.log_probs.clone().requires_grad_()
    state = grpo_state("grpo", data, leaf, {})
    theirs = trl_class("experimental.gmpo.gmpo_trainer.GMPOTrainer")._compute_loss(
        state, None, completion_inputs(data)
    )
    batch = rows_of(data.mask, advantages=data.advantages, old_log_probs=with_prompt(data.old))
    agree(
        gmpo(ModelOutputs(log_probs=with_prompt(leaf)), batch, GMPOConfig(clip_range=0.1, clip_range_high=0.2)),
        theirs,
        leaf,
    )


def test_rloo_trainer():
    data = sample()
    leaf = data.log_probs.clone().requires_grad_()
    state = grpo_state("rloo", data, leaf, {})
    inputs = completion_inputs(data) | {"old_logps": data.old.sum(1)}
    theirs = trl_class("trainer.rloo_trainer.RLOOTrainer")._compute_loss(state, None, inputs)
    batch = rows_of(data.mask, advantages=data.advantages, old_log_probs=with_prompt(data.old))
    config = GSPOConfig(length_normalized=False, **WIDE)
    agree(gspo(ModelOutputs(log_probs=with_prompt(leaf)), batch, config), theirs, leaf)


def test_group_advantages_as_in_trl():
    """TRL's formulas around its own nanstd."""
    nanstd = trl_class("trainer.utils.nanstd")
    scores = torch.tensor([1.0, 2.0, 5.0, 3.0, 3.0, 3.0], dtype=torch.float64)
    grouped = scores.view(2, 3)
    centred = grouped - grouped.mean(1, keepdim=True)
    ids = torch.tensor([0, 0, 0, 1, 1, 1])
    expected = (centred / (nanstd(grouped, dim=1).view(2, 1) + 1e-4)).flatten()
    batch = rows_of(torch.ones(6, 1, dtype=torch.bool))

    def ours(name, **options):
        return make_advantage(name, options)(scores, ids, batch)

    torch.testing.assert_close(ours("grpo", eps=1e-4), expected)
    expected = (centred / (nanstd(scores) + 1e-4)).flatten()
    torch.testing.assert_close(ours("grpo", scale="batch", eps=1e-4), expected)
    baseline = (grouped.sum(1, keepdim=True) - grouped) / 2
    torch.testing.assert_close(ours("rloo"), (grouped - baseline).flatten())


@pytest.mark.parametrize(
    ("mode", "correction"),
    [
        ("token_truncate", OffPolicyCorrection(low=0.9, high=1.1)),
        ("token_mask", OffPolicyCorrection(mode="mask", low=0.9, high=1.1)),
        ("sequence_truncate", OffPolicyCorrection(level="sequence", low=0.9, high=1.1)),
        ("sequence_mask", OffPolicyCorrection(level="sequence", mode="mask", low=0.9, high=1.1)),
    ],
)
def test_importance_weights_as_in_trl(mode, correction):
    """The formula of GRPOTrainer's importance sampling correction; it is not a function of its own there."""
    data = sample()
    difference = (data.old - data.ref) * data.mask
    ratio = (difference.sum(1, keepdim=True) if "sequence" in mode else difference).exp()
    outside = (ratio < 0.9) | (ratio > 1.1)
    ratio = ratio.clamp(0.9, 1.1) if "truncate" in mode else ratio.masked_fill(outside, 0.0)
    expected = (ratio * data.mask).expand(ROWS, LENGTH)
    torch.testing.assert_close(correction.weights(difference, data.mask), expected)


# ---------------------------------------------------------------- preferences

DPO = {
    "sigmoid": DPOConfig(beta=0.3),
    "hinge": DPOConfig(loss="hinge", beta=0.3),
    "ipo": DPOConfig(loss="ipo", beta=0.3, length_normalized=True),
    "exo_pair": DPOConfig(loss="exo", beta=0.3, label_smoothing=0.1),
    "nca_pair": DPOConfig(loss="nca", beta=0.3),
    "robust": DPOConfig(loss="robust", beta=0.3, label_smoothing=0.1),
    "bco_pair": DPOConfig(loss="bco", beta=0.3),
    "sppo_hard": DPOConfig(loss="sppo", beta=0.3),
    "aot": DPOConfig(loss="aot", beta=0.3, label_smoothing=0.1),
    "aot_unpaired": DPOConfig(loss="aot_unpaired", beta=0.3, label_smoothing=0.1),
    "apo_zero": DPOConfig(loss="apo_zero", beta=0.3),
    "apo_down": DPOConfig(loss="apo_down", beta=0.3),
    "discopop": DPOConfig(loss="discopop", beta=0.3),
    "sigmoid_norm": DPOConfig(beta=0.3, length_normalized=True),
    "sigmoid+sft": DPOConfig(beta=0.3, sft_coef=0.7, sft_mean="token"),
    "sigmoid/forward_kl": DPOConfig(beta=0.3, f_divergence="forward_kl"),
    "sigmoid/js_divergence": DPOConfig(beta=0.3, f_divergence="js_divergence"),
    "ipo/forward_kl": DPOConfig(loss="ipo", beta=0.3, f_divergence="forward_kl", length_normalized=True),
    "sigmoid_norm/js_divergence": DPOConfig(beta=0.3, f_divergence="js_divergence", length_normalized=True),
    "sigmoid ld": DPOConfig(beta=0.3, ld_alpha=0.4),
    "hinge ld": DPOConfig(loss="hinge", beta=0.3, ld_alpha=0.0),
    "sigmoid weighted": DPOConfig(beta=0.3, weighted=True),
    "hinge/alpha_divergence": DPOConfig(loss="hinge", beta=0.3, f_divergence="alpha_divergence", alpha=0.5),
}


def dpo_state(name, config):
    types = name.split()[0].split("/")[0].split("+")
    return SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=Accelerator(),
        aux_loss_enabled=False,
        ld_alpha=None if config.ld_alpha == 1 else config.ld_alpha,
        precompute_ref_logps=True,
        f_divergence_type=config.f_divergence,
        f_alpha_divergence_coef=config.alpha,
        loss_types=types,
        loss_weights=[1.0, config.sft_coef][: len(types)],
        beta=config.beta,
        label_smoothing=config.label_smoothing,
        use_weighting=config.weighted,
        args=SimpleNamespace(discopop_tau=config.discopop_tau),
        _metrics=nested_metrics(),
        _total_train_tokens=0,
        _tp_size=1,
    )


def fused(log_probs, log_collision=None):
    """The model's outputs that TRL's loss methods read."""
    return SimpleNamespace(
        log_sum_sq_probs=log_collision,
        log_probs=log_probs,
        entropy=torch.zeros_like(log_probs),
        mean_logits=torch.zeros_like(log_probs),
        is_top1=torch.zeros_like(log_probs, dtype=torch.bool),
    )


def chosen_first(values):
    return torch.cat([values[0::2], values[1::2]])


@pytest.mark.parametrize("name", sorted(DPO))
def test_dpo_trainer(name):
    config = DPO[name]
    # TRL's clamp for alpha divergences knows no float64.
    dtype = torch.float32 if "alpha" in name else torch.float64
    data = sample(dtype=dtype)
    leaf = data.log_probs.clone().requires_grad_()
    reference = data.ref.sum(1)
    batch = with_sft_divisor(rows_of(data.mask, rows_per_unit=2, ref_log_probs_sum=reference))
    if "aot" in name:
        partner = aot_partners(data.log_probs.sum(1), reference, paired=name == "aot")
        batch = batch.with_columns(aot_partner=partner)
    mask = chosen_first(with_prompt(data.mask)).long()
    shared = shared_log_probs(ModelOutputs(log_probs=with_prompt(data.ref)), batch)
    batch = batch.with_columns(ref_log_probs_shared=shared)
    weighted = shared + config.ld_alpha * (reference - shared)
    inputs = {
        "input_ids": torch.ones_like(mask),
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
        "ref_chosen_logps": weighted[0::2],
        "ref_rejected_logps": weighted[1::2],
    }
    collision = -data.normal(ROWS, LENGTH).abs()
    theirs = trl_class("trainer.dpo_trainer.DPOTrainer")._compute_loss(
        dpo_state(name, config),
        lambda **kwargs: fused(
            chosen_first(with_prompt(leaf * data.mask))[:, 1:], chosen_first(with_prompt(collision))[:, 1:]
        ),
        inputs,
        False,
    )
    ours = dpo(ModelOutputs(log_probs=with_prompt(leaf), log_collision=with_prompt(collision)), batch, config)
    if dtype == torch.float64:
        agree(ours, theirs, leaf)
    else:
        torch.testing.assert_close(ours.total / ours.weight, theirs)


@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
def test_kto_trainer(loss):
    data = sample()
    leaf = data.log_probs.clone().requires_grad_()
    kl_log_probs, kl_ref = data.normal(ROWS) + 0.5, data.normal(ROWS)
    desirable = torch.tensor([True, True, False, True, False, True])
    mask = with_prompt(data.mask).long()
    inputs = {
        "input_ids": torch.ones_like(mask),
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
        "label": desirable,
        "ref_logps": data.ref.sum(1),
        "ref_KL_logps": kl_ref,
    }
    state = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=Accelerator(),
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        calculate_KL=loss == "kto",
        _compute_kl_logps=lambda model, batch: kl_log_probs,
        loss_type=loss,
        beta=0.3,
        desirable_weight=1.2,
        undesirable_weight=0.8,
        _metrics=nested_metrics(),
        _total_train_tokens=0,
        _tp_size=1,
    )
    theirs = trl_class("trainer.kto_trainer.KTOTrainer")._compute_loss(
        state, lambda **kwargs: fused(with_prompt(leaf * data.mask)[:, 1:]), inputs, False
    )
    kind = {"kto": "kto", "apo_zero_unpaired": "apo_zero"}[loss]
    config = KTOConfig(beta=0.3, desirable_weight=1.2, undesirable_weight=0.8, loss=kind)
    batch = rows_of(data.mask, ref_log_probs_sum=data.ref.sum(1), desirable=desirable)
    # The column is float64 here, as everything else: the comparison is to 1e-6.
    z0 = torch.full((ROWS,), kl_baseline(kl_log_probs, kl_ref), dtype=torch.float64)
    assert float(with_kl_baseline(batch, float(z0[0]))["kl_baseline"][0]) == pytest.approx(float(z0[0]))
    batch = batch.with_columns(kl_baseline=z0)
    agree(kto(ModelOutputs(log_probs=with_prompt(leaf)), batch, config), theirs, leaf)


@pytest.mark.parametrize(
    ("loss", "mean", "function", "config"),
    [
        ("sigmoid", False, cpo, CPOConfig(beta=0.3, label_smoothing=0.1, sft_coef=0.0)),
        ("hinge", False, cpo, CPOConfig(loss="hinge", beta=0.3, sft_coef=0.0)),
        ("ipo", True, cpo, CPOConfig(loss="ipo", beta=0.3, sft_coef=0.0)),
        ("simpo", True, simpo, SimPOConfig(beta=0.3, gamma=0.5, label_smoothing=0.1)),
        ("simpo", True, simpo, SimPOConfig(beta=0.3, gamma=0.5, label_smoothing=0.1, alpha=0.25)),
        ("sigmoid", False, cpo, CPOConfig(beta=0.3, label_smoothing=0.1, sft_coef=0.0, alpha=-0.1)),
    ],
)
def test_cpo_trainer(loss, mean, function, config):
    data = sample()
    leaf = data.log_probs.clone().requires_grad_()
    values = (leaf * data.mask).sum(1) / (data.mask.sum(1) if mean else 1)
    state = SimpleNamespace(
        alpha=config.alpha,
        loss_type=loss,
        simpo_gamma=0.5,
        beta=0.3,
        label_smoothing=0.1,
        accelerator=Accelerator(),
    )
    trainer = trl_class("experimental.cpo.cpo_trainer.CPOTrainer")
    losses, _, _ = trainer.cpo_loss(state, values[0::2], values[1::2])
    batch = rows_of(data.mask, rows_per_unit=2)
    agree(function(ModelOutputs(log_probs=with_prompt(leaf)), batch, config), losses.mean(), leaf)


@pytest.mark.parametrize(
    ("loss", "config"),
    [
        ("sigmoid", TPOConfig(beta=0.3, label_smoothing=0.1)),
        ("hinge", TPOConfig(loss="hinge", beta=0.3, sft_coef=0.7)),
        ("ipo", TPOConfig(loss="ipo", beta=0.3, sft_coef=0.7)),
        ("tpo-l", TPOConfig(beta=0.3, gamma=0.5, length_normalized=True, label_smoothing=0.1)),
    ],
)
def test_tpo_trainer(loss, config, monkeypatch):
    data = sample()
    leaf = data.log_probs.clone().requires_grad_()
    mask = with_prompt(data.mask)
    batch = with_sft_divisor(rows_of(data.mask, rows_per_unit=3), place=2)

    def by_place(values):
        return torch.cat([values[0::3], values[1::3], values[2::3]])

    per_token = by_place(with_prompt(leaf * data.mask))[:, 1:]
    module = importlib.import_module("trl.experimental.tpo.tpo_trainer")
    monkeypatch.setattr(
        module, "selective_log_softmax_and_entropy", lambda *args, **kwargs: (per_token, per_token.detach())
    )
    monkeypatch.setattr(module.F, "cross_entropy", lambda logits, labels: -logits.mean())
    # Where TRL takes the logits of the gold response to a cross-entropy, their log-probs stand here.
    logits = torch.nn.functional.pad(per_token, (0, 1)).unsqueeze(-1)
    state = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=Accelerator(),
        aux_loss_enabled=False,
        tpo_alpha=config.sft_coef,
        tpo_l_gamma=config.gamma,
        loss_type=loss,
        beta=config.beta,
        label_smoothing=config.label_smoothing,
        _metrics=nested_metrics(),
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {name: by_place(mask).long() for name in ("input_ids", "attention_mask", "completion_mask")}
    theirs = module.TPOTrainer._compute_loss(state, lambda **kwargs: SimpleNamespace(logits=logits), inputs, False)
    agree(tpo(ModelOutputs(log_probs=with_prompt(leaf)), batch, config), theirs, leaf)


def test_orpo_trainer():
    """TRL computes the odds ratio in float32; the likelihood term is added as its trainer does."""
    data = sample()
    leaf = data.log_probs.clone().requires_grad_()
    means = leaf.sum(1) / data.mask.sum(1)
    state = SimpleNamespace(beta=0.3, accelerator=Accelerator())
    trainer = trl_class("experimental.orpo.orpo_trainer.ORPOTrainer")
    losses = trainer.odds_ratio_loss(state, means[0::2], means[1::2])[0]
    likelihood = -leaf[0::2].sum() / data.mask[0::2].sum()
    batch = with_sft_divisor(rows_of(data.mask, rows_per_unit=2))
    ours = orpo(ModelOutputs(log_probs=with_prompt(leaf)), batch, ORPOConfig(beta=0.3))
    expected = likelihood - losses.mean().double()
    torch.testing.assert_close(ours.total / ours.weight, expected, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- reward models and distillation


def test_reward_trainer():
    scores = torch.tensor([1.0, 0.5, -1.0, 2.0], dtype=torch.float64, requires_grad=True)
    margin = torch.tensor([0.5, 0.0], dtype=torch.float64)
    state = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=Accelerator(),
        args=SimpleNamespace(center_rewards_coefficient=0.1),
        _metrics=nested_metrics(),
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {"margin": margin, "attention_mask": torch.ones(4, 1)}
    theirs = trl_class("trainer.reward_trainer.RewardTrainer").compute_loss(
        state, lambda **kwargs: SimpleNamespace(logits=chosen_first(scores).unsqueeze(1)), inputs
    )
    ones = torch.ones(4, 1, dtype=torch.bool)
    batch = Batch(
        token_ids=torch.ones(4, 1, dtype=torch.long),
        attention_mask=ones,
        response_mask=ones,
        columns={"margin": margin.repeat_interleave(2)},
        rows_per_unit=2,
    )
    agree(bradley_terry(ModelOutputs(scores=scores), batch, BradleyTerryConfig(center_coef=0.1)), theirs, scores)


@pytest.mark.parametrize(
    ("beta", "config"),
    [
        (0.0, DivergenceConfig(divergence="forward_kl", temperature=2.0)),
        (1.0, DivergenceConfig(divergence="reverse_kl", temperature=2.0)),
        (0.3, DivergenceConfig(divergence="jsd", beta=0.3, temperature=2.0)),
    ],
)
def test_generalised_jsd(beta, config):
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 3, 4, 9, generator=generator, dtype=torch.float64)
    student.requires_grad_()
    labels = torch.tensor([[1, 1, -100, 1], [1, -100, -100, -100], [1, 1, 1, 1]])
    trainer = trl_class("experimental.gkd.gkd_trainer.GKDTrainer")
    theirs = trainer.generalized_jsd_loss(student, teacher, labels=labels, beta=beta, temperature=2.0)
    mask = labels != -100
    ours = divergence_from_logits(student, teacher, config)[mask].mean()
    torch.testing.assert_close(ours, theirs, **TOLERANCE)
    expected = torch.autograd.grad(theirs, student)[0]
    torch.testing.assert_close(torch.autograd.grad(ours, student)[0], expected, **TOLERANCE)
