"""Divergences, corrections and what is taken of a whole batch, among the frozen vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import rlhf_algos as ours
import torch
import written_out_estimators as estimators
import written_out_offline as offline
from rlhf_algos.testing import sample_batch
from rlhf_core import Batch
from vector_case import Case, Tensors, direct


def divergence_cases() -> Iterator[Case]:
    batch, outputs = sample_batch()
    schulman = "J. Schulman, Approximating KL divergence, 2020"
    x = {"log_probs": outputs["log_probs"], "ref_log_probs": batch["ref_log_probs"]}

    def kl(y: Tensors, o: dict[str, Any]) -> Tensors:
        return {"kl": ours.kl_estimate(y["log_probs"], y["ref_log_probs"], **o)}

    options = {"gradient": "own", "log_ratio_limit": 20.0, "value_limit": float("inf")}
    for name in ("k1", "k2", "k3", "abs"):
        found = {**options, "estimator": name}
        yield direct(f"kl_estimate/{name}", "kl", schulman, x, kl, gradients=("log_probs",), **found)
    found = {"estimator": "k3", "gradient": "k2", "log_ratio_limit": 0.2, "value_limit": 0.02}
    yield direct("kl_estimate/limits", "kl", "verl's k3+", x, kl, gradients=("log_probs",), **found)
    generator = torch.Generator().manual_seed(9)
    student, teacher = torch.randn(2, 6, 11, generator=generator, dtype=torch.float64)

    def full(y: Tensors, o: dict[str, Any]) -> Tensors:
        return {"kl": ours.full_kl(y["logits"], y["ref_logits"])}

    yield direct(
        "full_kl", "kl", "definition", {"logits": student, "ref_logits": teacher}, full, gradients=("logits",)
    )
    gkd, by = "GKD, Agarwal et al. 2024 (2306.13649)", ("student_logits",)
    x = {"student_logits": student, "teacher_logits": teacher}

    def dense(y: Tensors, o: dict[str, Any]) -> Tensors:
        config = ours.DivergenceConfig(**o)
        return {"divergence": ours.divergence_from_logits(y["student_logits"], y["teacher_logits"], config)}

    for name in ("forward_kl", "reverse_kl", "jsd"):
        options = asdict(ours.DivergenceConfig(divergence=name, beta=0.3, temperature=1.5))
        formula = offline.divergence_from_logits
        yield direct(
            f"divergence_from_logits/{name}", "divergence", gkd, x, dense, gradients=by, formula=formula, **options
        )
    best = (teacher / 1.5).log_softmax(-1).topk(4)
    x = {"student_logits": student, "teacher_log_probs": best.values, "teacher_ids": best.indices}

    def sparse(y: Tensors, o: dict[str, Any]) -> Tensors:
        given = (y["student_logits"], y["teacher_log_probs"], y["teacher_ids"])
        return {"divergence": ours.divergence_from_top_k(*given, ours.DivergenceConfig(**o))}

    for rest in ("lump", "renormalize"):
        options = asdict(ours.DivergenceConfig(divergence="jsd", temperature=1.5, other_tokens=rest))
        formula = offline.divergence_from_top_k
        yield direct(
            f"divergence_from_top_k/{rest}", "divergence", gkd, x, sparse, gradients=by, formula=formula, **options
        )


def correction_cases() -> Iterator[Case]:
    batch, _ = sample_batch()
    mask = batch.response_mask
    x = {name: batch[name] for name in ("old_log_probs", "rollout_log_probs")} | {"response_mask": mask}

    def weights(y: Tensors, o: dict[str, Any]) -> Tensors:
        ratio = (y["old_log_probs"] - y["rollout_log_probs"]).masked_fill(~y["response_mask"], 0)
        return {"weights": ours.OffPolicyCorrection(**o).weights(ratio, y["response_mask"])}

    def case(name: str, source: str, **options: Any) -> Case:
        config = asdict(ours.OffPolicyCorrection(**options))
        return direct(
            f"correction/{name}", "correction", source, x, weights, formula=estimators.correction, **config
        )

    yield case("token_truncate", "TIS, Yao et al. 2025", high=1.2)
    yield case("token_truncate_both", "OpenRLHF's tis", low=0.8, high=1.2)
    yield case("token_mask", "IcePop, Ling team 2025", mode="mask", low=0.7, high=1.4)
    yield case("sequence_mask", "MIS, Liu et al. 2025", level="sequence", mode="mask", low=0.5, high=2.0)
    yield case("geometric_reject", "TRM (2512.23075)", level="geometric", mode="reject", low=0.9, high=1.1)
    for level in ("token", "sequence", "geometric", "max"):
        high = {"token": 0.05, "sequence": 0.3, "geometric": 0.08, "max": 0.2}[level]
        for statistic in ("k2", "k3"):
            options = {"level": level, "statistic": statistic, "high": high, "mode": "reject"}
            yield case(f"{statistic}_{level}", "verl's rollout_rs", **options)
    yield case("normalized", "verl's rollout_is_batch_normalize", high=1.2, normalize=True)
    yield case("normalized_rows", "verl's rollout_is_batch_normalize", level="sequence", normalize=True)

    def metrics(y: Tensors, o: dict[str, Any]) -> Tensors:
        found = ours.mismatch_metrics(y["log_ratio"], y["response_mask"])
        return {name: torch.tensor(value.value, dtype=y["log_ratio"].dtype) for name, value in found.items()}

    ratio = (batch["old_log_probs"] - batch["rollout_log_probs"]).masked_fill(~mask, 0)
    given = {"log_ratio": ratio, "response_mask": mask}
    yield direct("mismatch_metrics", "diagnostic", "verl's off-policy metrics", given, metrics)

    def sample_size(y: Tensors, o: dict[str, Any]) -> Tensors:
        found = ours.effective_sample_size(y["weights"], y["response_mask"])
        return {"effective_sample_size": torch.tensor(found, dtype=y["weights"].dtype)}

    given = {"weights": batch["importance_weights"], "response_mask": mask}
    yield direct("effective_sample_size", "diagnostic", "Kish 1965", given, sample_size)


def column_cases() -> Iterator[Case]:
    """What is taken of the whole batch before a step."""
    batch, outputs = sample_batch()
    known = {**batch.columns, "response_mask": batch.response_mask}
    sums = (outputs["log_probs"] * batch.response_mask).sum(1)
    ratio = sums - batch["ref_log_probs_sum"]

    def selected(kind: Any, column: str, names: tuple[str, ...]) -> Callable[..., Tensors]:
        def run(y: Tensors, o: dict[str, Any]) -> Tensors:
            rows = Batch(
                token_ids=torch.ones(y["response_mask"].shape, dtype=torch.long),
                attention_mask=torch.ones_like(y["response_mask"]),
                response_mask=y["response_mask"],
                columns={name: y[name] for name in names},
            )
            return {column: kind(**o).add_columns(rows)[column]}

        return run

    def pick(*names: str) -> Tensors:
        return {name: known[name] for name in (*names, "response_mask")}

    run = selected(ours.PPOClipConfig, "entropy_selected", ("old_entropy",))
    source = "Wang et al. 2025 (2506.01939)"
    yield direct("entropy_selected", "columns", source, pick("old_entropy"), run, top_entropy=0.4)
    names = ("advantages", "old_log_probs")
    run = selected(ours.KLCovConfig, "cov_selected", names)
    yield direct("kl_cov_selected", "columns", "Cui et al. 2025 (2505.22617)", pick(*names), run, fraction=0.2)

    def partners(y: Tensors, o: dict[str, Any]) -> Tensors:
        return {"aot_partner": ours.aot_partners(y["policy"], y["reference"], **o)}

    x = {"policy": sums, "reference": batch["ref_log_probs_sum"]}
    aot = "AOT, Melnyk et al. 2024 (2406.05882)"
    yield direct("aot_partners/paired", "columns", aot, x, partners, paired=True)
    yield direct("aot_partners/unpaired", "columns", aot, x, partners, paired=False)

    def baseline(y: Tensors, o: dict[str, Any]) -> Tensors:
        found = ours.kl_baseline(y["log_probs_sum"], y["ref_log_probs_sum"])
        return {"kl_baseline": torch.tensor(found, dtype=y["log_probs_sum"].dtype)}

    kto = "KTO, Ethayarajh et al. 2024 (2402.01306)"
    x = {"log_probs_sum": sums + 2, "ref_log_probs_sum": batch["ref_log_probs_sum"]}
    yield direct("kl_baseline", "columns", kto, x, baseline)

    def opposite(y: Tensors, o: dict[str, Any]) -> Tensors:
        return {"kl_baseline": ours.opposite_baselines(y["log_ratio"], y["desirable"])}

    x = {"log_ratio": ratio, "desirable": batch["desirable"]}
    yield direct("opposite_baselines", "columns", "OpenRLHF's former VanillaKTOLoss", x, opposite)

    def shift(y: Tensors, o: dict[str, Any]) -> Tensors:
        return {"reward_shift": torch.tensor(ours.bco_shift(y["log_ratio"], **o), dtype=y["log_ratio"].dtype)}

    yield direct("bco_shift", "columns", "BCO, Jung et al. 2024", {"log_ratio": ratio}, shift, beta=0.1)
