"""The losses among the frozen vectors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import rlhf_algos as ours
import torch
import written_out_estimators as estimators
import written_out_offline as offline
import written_out_policy as policy
from rlhf_algos.testing import sample_batch
from vector_case import Case, Tensors, named, run_loss, write_out_loss


class Losses:
    """Cases of losses on the sample batch."""

    def __init__(self, rows_per_unit: int, module: Any, columns: tuple[str, ...]) -> None:
        batch, outputs = sample_batch(rows_per_unit=rows_per_unit)
        self.units, self.module, self.columns = rows_per_unit, module, columns
        hidden = {
            name: value.masked_fill(~batch.response_mask, 0) if value.dim() == 2 else value
            for name, value in outputs.items()
        }
        self.known: Tensors = {"response_mask": batch.response_mask, **batch.columns, **hidden}

    def case(
        self, name: str, kind: type, source: str, *more: str, over: Tensors | None = None, **options: Any
    ) -> Case:
        """`function` or `function/variant`; `more` are columns beside the usual ones, `over` replaces some."""
        function = name.partition("/")[0]
        config = asdict(kind(**options))
        names = ("response_mask", *kind(**options).outputs, *self.columns, *more)
        inputs = {key: (over or {}).get(key, self.known.get(key)) for key in dict.fromkeys((*names, *(over or {})))}
        inputs = {key: value for key, value in inputs.items() if value is not None}
        formula = getattr(self.module, function)
        return Case(
            name=named(name),
            kind="loss",
            function=function,
            source=source,
            inputs=inputs,
            options={**config, "rows_per_unit": self.units},
            ours=lambda x, o: run_loss(getattr(ours, function), kind, self.units, x, without_units(o)),
            written_out=lambda x, o: write_out_loss(formula, x, o),
        )


def without_units(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "rows_per_unit"}


def policy_losses() -> Iterator[Case]:
    make = Losses(1, policy, ("old_log_probs", "advantages"))
    case, batch = make.case, make.known
    ppo, source = ours.PPOClipConfig, "Schulman et al. 2017 (1707.06347), eq. 7"
    yield case("ppo_clip", ppo, source)
    yield case("ppo_clip/dual_clip", ppo, "Ye et al. 2020 (1912.09729)", dual_clip=1.1, clip_range_high=0.28)
    for how in ("seq_mean_token_mean", "seq_mean_token_sum", "max_length", "prompt_mean"):
        length = 20 if how == "max_length" else 0
        more = ("prompt_tokens",) if how == "prompt_mean" else ()
        yield case(f"ppo_clip/{how}", ppo, source, *more, aggregation=how, max_length=length)
    yield case("ppo_clip/no_empty_rows", ppo, source, aggregation="seq_mean_token_mean", count_empty_rows=False)
    for kl in ("k1", "k2", "k3", "abs"):
        yield case(f"ppo_clip/kl_{kl}", ppo, source, "ref_log_probs", kl_coef=0.3, kl_estimator=kl)
    yield case("ppo_clip/kl_k3_plus", ppo, "verl's k3+", "ref_log_probs", kl_coef=0.3, kl_gradient="k2")
    kl = {"kl_coef": 0.3, "kl_value_limit": 0.02, "kl_log_ratio_limit": 0.2}
    yield case("ppo_clip/kl_limits", ppo, source, "ref_log_probs", **kl)
    weighted = {"kl_coef": 0.2, "kl_estimator": "k1", "kl_ratio_weighted": True}
    yield case("ppo_clip/kl_ratio_weighted", ppo, "DeepSeek-V3.2 (2512.02556)", "ref_log_probs", **weighted)
    yield case("ppo_clip/entropy", ppo, source, entropy_coef=0.1)
    yield case("ppo_clip/importance_weights", ppo, "Yao et al. 2025", "importance_weights")
    yield case("ppo_clip/log_ratio_limit", ppo, source, log_ratio_limit=0.15)
    rows = {"advantages": batch["advantages"][:, 3].clone()}
    yield case("ppo_clip/one_advantage_a_row", ppo, source, over=rows)
    chosen = estimators.entropy_selected(batch, SimpleNamespace(top_entropy=0.4))
    yield case("ppo_clip/top_entropy", ppo, "Wang et al. 2025 (2506.01939)", over=chosen, top_entropy=0.4)
    opsm = "DeepSeek-V3.2 (2512.02556), eq. 9"
    yield case("ppo_clip/sequence_kl_limit", ppo, opsm, "rollout_log_probs", sequence_kl_limit=0.01)
    weight = {"likelihood_weight": 0.05 * (torch.arange(8) % 2 == 0).double()}
    yield case("ppo_clip/likelihood", ppo, "VAPO, Yue et al. 2025 (2504.05118)", over=weight)
    yield case("reinforce", ours.ReinforceConfig, "Williams 1992", aggregation="seq_mean_token_sum")
    gspo = "GSPO, Zheng et al. 2025 (2507.18071), eq. 5"
    yield case("gspo", ours.GSPOConfig, gspo, clip_range=0.1, clip_range_high=0.2)
    yield case("gspo/token_form", ours.GSPOConfig, gspo, clip_range=0.1, clip_range_high=0.2, token_form=True)
    product = {"clip_range": 0.2, "clip_range_high": None, "length_normalized": False}
    yield case("gspo/product", ours.GSPOConfig, "RLOO in TRL", **product)
    yield case("gmpo", ours.GMPOConfig, "GMPO, Zhao et al. 2025 (2507.20673), eq. 4", clip_range=0.2)
    vespo = "VESPO (2602.10693)"
    yield case("vespo", ours.VESPOConfig, vespo)
    yield case("vespo/importance_weights", ours.VESPOConfig, vespo, "importance_weights")
    yield case("cispo", ours.CISPOConfig, "MiniMax-M1 2025 (2506.13585), eq. 4", ratio_low=0.8, ratio_high=1.2)
    yield case("sapo", ours.SAPOConfig, "SAPO, Gao et al. 2025 (2511.20347), eq. 5")
    yield case("dro", ours.DROConfig, "Richemond et al. 2024 (2405.19107)", beta=0.5)
    dppo = "DPPO (2602.04879)"
    yield case("dppo", ours.DPPOConfig, dppo, limit_low=0.05, limit_high=0.02, log_ratio_coef=0.1)
    yield case("dppo/kl", ours.DPPOConfig, dppo, divergence="kl", limit_low=0.01, symmetric=True, ratio_high=1.1)
    covariance = "Cui et al. 2025 (2505.22617)"
    chosen = estimators.kl_cov_selected(batch, SimpleNamespace(fraction=0.2))
    yield case("kl_cov", ours.KLCovConfig, covariance, over=chosen, fraction=0.2)
    yield case("clip_cov", ours.ClipCovConfig, covariance, over=chosen, fraction=0.2)
    on_policy = Losses(1, policy, ("advantages",))
    yield on_policy.case("ppo_clip/on_policy", ppo, source)
    critic = Losses(1, policy, ("returns", "old_values"))
    yield critic.case("value_clip", ours.ValueClipConfig, "PPO, Schulman et al. 2017")
    yield critic.case("value_clip/no_clip", ours.ValueClipConfig, "PPO", clip_range=None)


def preference_losses() -> Iterator[Case]:
    make = Losses(2, offline, ("ref_log_probs_sum",))
    case, batch = make.case, make.known
    sums = (batch["log_probs"] * batch["response_mask"]).sum(1)
    tokens = float(batch["response_mask"][0::2].sum()) / (len(sums) // 2)
    divisor = {"sft_divisor": torch.full((len(sums),), tokens, dtype=torch.float64)}
    source = "see PairLoss in rlhf_algos"
    for name in ours.PAIR_LOSSES:
        eps = 0.1 if name in ("sigmoid", "robust", "exo") else 0.0
        yield case(f"dpo/{name}", ours.DPOConfig, source, loss=name, label_smoothing=eps)
    bco = "BCO, Jung et al. 2024 (2404.04656)"
    yield case("dpo/bco_shift", ours.DPOConfig, bco, "reward_shift", loss="bco")
    for paired, name in ((True, "aot"), (False, "aot_unpaired")):
        x = {"policy": sums, "reference": batch["ref_log_probs_sum"]}
        partners = estimators.aot_partners(x, SimpleNamespace(paired=paired))
        yield case(f"dpo/{name}", ours.DPOConfig, "AOT, Melnyk et al. 2024 (2406.05882)", over=partners, loss=name)
    f_dpo = "f-DPO, Wang et al. 2023 (2309.16240), table 1"
    for name in ("forward_kl", "js_divergence", "alpha_divergence"):
        yield case(f"dpo/{name}", ours.DPOConfig, f_dpo, f_divergence=name)
    yield case("dpo/length_normalized", ours.DPOConfig, "LN-DPO; TRL's sigmoid_norm", length_normalized=True)
    mean = {"loss": "ipo", "length_normalized": True, "f_divergence": "js_divergence"}
    yield case("dpo/ipo_mean_js", ours.DPOConfig, "TRL's IPO with an f-divergence", **mean)
    yield case("dpo/reference_free", ours.DPOConfig, "Rafailov et al. 2023", reference_free=True)
    ld = "LD-DPO, Liu et al. 2024 (2409.06411)"
    yield case("dpo/ld_alpha", ours.DPOConfig, ld, "ref_log_probs_shared", ld_alpha=0.3)
    yield case("dpo/weighted", ours.DPOConfig, "WPO, Zhou et al. 2024 (2406.11827)", weighted=True)
    xpo = "XPO, Xie et al. 2024 (2405.21046)"
    yield case("dpo/exploration", ours.DPOConfig, xpo, "from_reference", exploration_coef=0.1)
    yield case("dpo/likelihood", ours.DPOConfig, "RPO, Pang et al. 2024", sft_coef=0.5)
    yield case("dpo/likelihood_token", ours.DPOConfig, "TRL's sft", over=divisor, sft_coef=0.5, sft_mean="token")
    free = Losses(2, offline, ())
    yield free.case("simpo", ours.SimPOConfig, "SimPO, Meng et al. 2024 (2405.14734), eq. 6", sft_coef=0.3)
    alpha = "AlphaPO, Gupta et al. 2025 (2501.03884)"
    yield free.case("simpo/alpha", ours.SimPOConfig, alpha, alpha=0.25)
    for name in ("sigmoid", "hinge", "ipo"):
        yield free.case(f"cpo/{name}", ours.CPOConfig, "CPO, Xu et al. 2024 (2401.08417), eq. 3", loss=name)
    # The odds of a response without a token are those of the dtype's epsilon; here, every response has one.
    mask, log_probs = batch["response_mask"].clone(), batch["log_probs"].clone()
    mask[3, 2], log_probs[3, 2] = True, -0.7
    whole = {"response_mask": mask, "log_probs": log_probs, **divisor}
    yield free.case("orpo", ours.ORPOConfig, "ORPO, Hong et al. 2024 (2403.07691), eq. 6", over=whole)
    scored = Losses(2, offline, ("margin",))
    yield scored.case("bradley_terry", ours.BradleyTerryConfig, "Touvron et al. 2023, eq. 2", center_coef=0.1)
    gold = Losses(3, offline, ())
    mask = gold.known["response_mask"]
    tokens = float(mask[2::3].sum()) / (len(mask) // 3)
    divisor = {"sft_divisor": torch.full((len(mask),), tokens, dtype=torch.float64)}
    tpo = "TPO, Saeidi et al. 2024 (2405.16681)"
    yield gold.case("tpo", ours.TPOConfig, tpo, over=divisor, beta=0.5)
    length = {"length_normalized": True, "gamma": 0.5, "sft_mean": "sequence"}
    yield gold.case("tpo/length_normalized", ours.TPOConfig, tpo, **length)


def row_losses() -> Iterator[Case]:
    make = Losses(1, offline, ("desirable", "ref_log_probs_sum"))
    paper = "KTO, Ethayarajh et al. 2024 (2402.01306), eq. 7"
    yield make.case("kto", ours.KTOConfig, paper, "kl_baseline", desirable_weight=1.5)
    yield make.case("kto/apo_zero", ours.KTOConfig, "APO, D'Oosterlinck et al. 2024 (2408.06266)", loss="apo_zero")
    bco = "BCO, Jung et al. 2024 (2404.04656)"
    yield make.case("kto/bco", ours.KTOConfig, bco, "reward_shift", loss="bco", undesirable_weight=0.5)
    plain = Losses(1, offline, ())
    yield plain.case("sft", ours.SFTConfig, "maximum likelihood")
    weights = {"token_weights": make.known["importance_weights"]}
    yield plain.case("sft/token_weights", ours.SFTConfig, "maximum likelihood", over=weights)
    dft = "DFT, Wu et al. 2025 (2508.05629), eq. 9"
    yield plain.case("sft/dft", ours.SFTConfig, dft, loss="dft", aggregation="seq_mean_token_mean")
    steps = Losses(1, offline, ("step_labels",))
    process, source = ours.ProcessRewardLossConfig, "Lightman et al. 2023 (2305.20050)"
    yield steps.case("process_reward_loss", process, source)
    yield steps.case("process_reward_loss/outcome", process, source, supervision="outcome")
    generator = torch.Generator().manual_seed(5)
    shape = (*make.known["response_mask"].shape, 2)
    candidates = {"candidate_log_probs": -torch.rand(shape, generator=generator, dtype=torch.float64) - 0.1}
    for softmax in ("labels", "vocabulary"):
        options = {"label_tokens": ("+", "-"), "label_softmax": softmax}
        yield steps.case(f"process_reward_loss/{softmax}", process, "OpenRLHF", over=candidates, **options)
    teacher = Losses(1, offline, ("teacher_log_probs", "old_log_probs"))
    distilled, source = ours.OnPolicyDistillationConfig, "MiniLLM, Gu et al. 2024 (2306.08543)"
    yield teacher.case("on_policy_distillation", distilled, source, clip_range=0.2)
    yield teacher.case("on_policy_distillation/sequence", distilled, source, gamma=0.9)
    yield teacher.case("on_policy_distillation/mean", distilled, source, gamma=0.9, length_normalized=True)
