"""Estimators and returns among the frozen vectors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import rlhf_algos as ours
import torch
import written_out_estimators as estimators
from rlhf_algos.testing import sample_batch
from rlhf_core import Batch
from torch import Tensor
from vector_case import Case, Tensors, direct, named


def advantage_cases() -> Iterator[Case]:
    batch, outputs = sample_batch()
    numbers = torch.linspace(0, 1, batch.rows, dtype=torch.float64)
    known: Tensors = {
        **batch.columns,
        "token_ids": batch.token_ids,
        "response_mask": batch.response_mask,
        "scores": outputs["scores"].sigmoid(),
        "group_ids": torch.tensor([7, 2, 7, 2, 7, 5, 3, 7]),
        "rewards": (batch["advantages"] / 10).masked_fill(~batch.response_mask, 0),
        "greedy_scores": numbers,
        "score/right": (numbers * 7).round() % 2,
        "score/short": numbers.flip(0),
    }
    usual = ("scores", "group_ids", "response_mask")

    def case(name: str, source: str, *more: str, **options: Any) -> Case:
        function = name.partition("/")[0]
        config = asdict(ours.make_advantage(function, options).config)

        def run(x: Tensors, o: dict[str, Any]) -> Tensors:
            rows = Batch(
                token_ids=x.get("token_ids", torch.ones(x["response_mask"].shape, dtype=torch.long)),
                attention_mask=torch.ones_like(x["response_mask"]),
                response_mask=x["response_mask"],
                columns={key: value for key, value in x.items() if key not in (*usual, "token_ids")},
            )
            return {"advantages": ours.make_advantage(function, o)(x["scores"], x["group_ids"], rows)}

        formula = getattr(estimators, function)
        return Case(
            name=f"advantages/{named(name)}",
            kind="advantages",
            function=function,
            source=source,
            inputs={key: known[key] for key in (*usual, *more)},
            options=config,
            ours=run,
            written_out=lambda x, o: formula(x, SimpleNamespace(**o)),
        )

    grpo = "GRPO, Shao et al. 2024 (2402.03300), section 4.1.2"
    yield case("grpo", grpo)
    yield case("grpo/lone_score", grpo, singleton="score", unbiased=False, eps=1e-4)
    yield case("grpo/none", "Dr. GRPO, Liu et al. 2025 (2503.20783)", scale="none")
    yield case("grpo/batch", "TRL's scale_rewards=batch", scale="batch")
    yield case("grpo/advantages", "ScaleRL (2510.13786)", scale="advantages")
    yield case("rloo", "RLOO, Ahmadian et al. 2024 (2402.14740)")
    yield case("opo", "OPO, Hao et al. 2025 (2505.23585)")
    yield case("remax", "ReMax, Li et al. 2023 (2310.10505)", "greedy_scores")
    yield case("reinforce", "Williams 1992", baseline=0.5)
    yield case("gpg", "GPG, Chu et al. 2025 (2504.02546), eq. 7")
    yield case("max_rl", "MaxRL (2602.02710)")
    yield case("pass_at_k", "Chen et al. 2025 (2508.10751)", k=2)
    yield case("best_of_group", "Tang et al. 2025 (2503.19595)")
    gdpo = ("score/right", "score/short")
    yield case("gdpo", "GDPO (2601.05242)", *gdpo, parts={"right": 1.0, "short": 0.5})
    otb = ("old_log_probs", "old_log_collision")
    yield case("optimal_token", "verl's optimal_token_baseline", *otb)
    yield case("optimal_token/rewards", "verl's optimal_token_baseline", *otb, "rewards", tail="score")
    gigpo = "GiGPO, Feng et al. 2025 (2505.10978), eq. 3-8"
    yield case("gigpo", gigpo, "token_ids", "rewards")
    yield case("gigpo/scaled", gigpo, "token_ids", "rewards", scale="group", turn_weight=0.5)


def returns_cases() -> Iterator[Case]:
    batch, _ = sample_batch()
    mask, values = batch.response_mask, batch["old_values"]
    x = {"rewards": batch["returns"], "values": values, "response_mask": mask}

    def both(found: tuple[Tensor, Tensor]) -> Tensors:
        return {"advantages": found[0], "returns": found[1]}

    def gae(y: Tensors, o: dict[str, Any]) -> Tensors:
        gamma, lam = (y.get(name, o.get(name)) for name in ("gamma", "lam"))
        return both(ours.gae(y["rewards"], y["values"], y["response_mask"], gamma=gamma, lam=lam))

    source = "GAE, Schulman et al. 2016 (1506.02438), eq. 16"
    yield direct("gae", "returns", source, x, gae, gamma=0.9, lam=0.8)
    lam = torch.linspace(0.5, 1, len(mask), dtype=torch.float64)
    adaptive = "VAPO, Yue et al. 2025 (2504.05118)"
    yield direct("gae/lam_of_each_row", "returns", adaptive, {**x, "lam": lam}, gae, gamma=1.0)
    between = ours.between_turns(mask, torch.tensor(1.0, dtype=torch.float64), 0.5)
    yield direct(
        "gae/between_turns", "returns", "dual discounting, Verlog 2025", {**x, "gamma": between}, gae, lam=0.9
    )

    def turns(y: Tensors, o: dict[str, Any]) -> Tensors:
        return both(ours.turn_gae(y["rewards"], y["values"], y["response_mask"], **o))

    yield direct("turn_gae", "returns", "Turn-PPO (2512.17008)", x, turns, gamma=0.9, lam=0.8)

    def discounted(y: Tensors, o: dict[str, Any]) -> Tensors:
        return {"returns": ours.discounted_returns(y["rewards"], y["response_mask"], **o)}

    given = {"rewards": batch["returns"], "response_mask": mask}
    yield direct("discounted_returns", "returns", "REINFORCE++, Hu 2025 (2501.03262)", given, discounted, gamma=0.9)

    def lams(y: Tensors, o: dict[str, Any]) -> Tensors:
        return {"lam": ours.length_adaptive_lam(y["response_mask"], o["alpha"]).to(y["like"].dtype)}

    lengths = {"response_mask": mask, "like": values[:1, 0].clone()}
    yield direct("length_adaptive_lam", "returns", adaptive, lengths, lams, alpha=0.5)

    def whitened(y: Tensors, o: dict[str, Any]) -> Tensors:
        return {"whitened": ours.whiten(y["values"], y["response_mask"], ours.WhitenConfig(**o))}

    for kind in ("standardize", "keep_mean", "scale", "center"):
        options = asdict(ours.WhitenConfig(kind=kind, unbiased=kind == "keep_mean"))
        given = {"values": values, "response_mask": mask}
        yield direct(f"whiten/{kind}", "returns", "see Whitening in rlhf_algos", given, whitened, **options)

    def overlong(y: Tensors, o: dict[str, Any]) -> Tensors:
        return {"penalty": ours.overlong_penalty(y["lengths"], **o).to(y["like"].dtype)}

    for grows in (False, True):
        given = {"lengths": torch.tensor([5, 8, 9, 10, 12]), "like": values[:1, 0].clone()}
        options = {"max_length": 10, "buffer": 4, "penalty": 0.5, "grows": grows}
        name = "overlong_penalty/grows" if grows else "overlong_penalty"
        yield direct(name, "returns", "DAPO, Yu et al. 2025 (2503.14476), eq. 13", given, overlong, **options)
