"""Run by test_two_ranks.py as two processes. Each check returns plain numbers; rank 0 writes them down.

usage: two_ranks.py WORK_DIR (RANK, WORLD_SIZE, ... in the environment; both ranks see WORK_DIR)
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rlhf_core import (
    Batch,
    EngineConfig,
    LoraConfig,
    Loss,
    LossTerms,
    OptimizerConfig,
    accumulate,
    join_link,
    model_outputs,
    open_sender,
    receive_weights,
    send_weights,
)
from rlhf_core.testing.engine_ground import SMOOTH, faulty_loss, forward, gap, rows, supervised_loss
from rlhf_train import DeepSpeedEngine
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from two_rank_features import FeatureChecks
from two_rank_models import ModelChecks
from two_rank_tiles import TileChecks

STEPS = 3
LONG = (900, 850, 40)
"""Rows of the first rank: 1194 response tokens, two chunks of the head where the other rank has one."""
SHARED = {"param_persistence_threshold": 0, "timeout_s": 120.0}


def value_loss(outputs: Any, batch: Batch, config: Any) -> LossTerms:
    """Squared distance of the values to a target that depends on the token."""
    wanted = (batch.token_ids % 7).float() / 7
    error = (outputs.values - wanted).square().masked_fill(~batch.response_mask, 0)
    return LossTerms(total=error.sum(), weight=batch.response_mask.sum().float())


NLL = Loss(function=supervised_loss)
VALUE = Loss(function=value_loss, outputs=("values",))


def whole_batch(step: int) -> Batch:
    """Five rows. The last one has no response at all, and is a micro-batch of its own where these are small."""
    batch = rows(step, lengths=(*LONG, 9, 12))
    mask = batch.response_mask.clone()
    mask[-1] = False
    return replace(batch, response_mask=mask)


def share(batch: Batch, rank: int) -> Batch:
    """Three rows for rank 0, two for rank 1."""
    return batch.select([0, 1, 2] if rank == 0 else [3, 4])


def plain_torch(path: str, role: str, loss: Loss, optimizer: OptimizerConfig) -> tuple[dict, list[float]]:
    """The same steps by one process on an ordinary model: weights afterwards, gradient norms."""
    kind = AutoModelForCausalLM if role == "policy" else AutoModelForSequenceClassification
    model: Any = kind.from_pretrained(path, dtype=torch.float32, **({} if role == "policy" else {"num_labels": 1}))
    if role == "critic":
        torch.nn.init.zeros_(model.score.weight)
    adam = torch.optim.AdamW(model.parameters(), lr=optimizer.learning_rate, eps=optimizer.eps, weight_decay=0.0)
    adam.param_groups[0]["betas"] = optimizer.betas
    norms = []
    for step in range(STEPS):
        accumulate(
            whole_batch(step),
            loss,
            forward=lambda piece, fields: model_outputs(model, piece, fields),
            backward=lambda total, last: total.backward(),
            max_tokens=900,
        )
        limit = optimizer.max_grad_norm or math.inf
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), limit)))
        adam.step()
        adam.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}, norms


def plain_names(path: str, role: str) -> list[str]:
    """Parameter names of the model without adapters."""
    kind = AutoModelForCausalLM if role == "policy" else AutoModelForSequenceClassification
    return [name for name, _ in kind.from_pretrained(path).named_parameters()]


def full_weights(engine: DeepSpeedEngine) -> dict[str, torch.Tensor]:
    """All weights by their checkpoint names."""
    source = engine.weights()
    manifest = source.manifest(0, bucket_bytes=50_000)
    return {name: t.clone() for bucket in manifest.buckets() for name, t in source.gather(bucket)}


class Checks(FeatureChecks, ModelChecks, TileChecks):
    """One method per check, run in the order of their definition."""

    def __init__(self, work: Path, rank: int) -> None:
        self.work, self.rank = work, rank

    def start(self, model: str = "tied", model_path: Path | None = None, **fields: Any) -> DeepSpeedEngine:
        options = {**SHARED, **fields.pop("options", {})}
        fields = {"optimizer": SMOOTH, "max_tokens_per_micro_batch": 900, **fields}
        return DeepSpeedEngine(EngineConfig(model=str(model_path or self.work / model), options=options, **fields))

    def equality(self) -> dict[str, Any]:
        """Difference to plain torch after three steps, for every stage and model."""
        found = {}
        clipped = replace(SMOOTH, max_grad_norm=0.05)
        cases = [("tied", "policy", NLL), ("untied", "policy", NLL), ("untied", "critic", VALUE)]
        for model, role, loss in cases:
            expected, norms = plain_torch(str(self.work / model), role, loss, clipped)
            # With 12 tokens every row is a micro-batch, with 4096 each rank has one.
            for stage, max_tokens in ((0, 12), (1, 12), (2, 12), (3, 12), (3, 4096)):
                engine = self.start(
                    model,
                    role=role,
                    optimizer=clipped,
                    max_tokens_per_micro_batch=max_tokens,
                    options={"stage": stage},
                )
                before = full_weights(engine)
                reports = [engine.step(share(whole_batch(s), self.rank), loss) for s in range(STEPS)]
                after = full_weights(engine)
                found[f"{role}-{model}-{stage}-{max_tokens}"] = {
                    "gap": gap(after, expected),
                    "moved": gap(before, after),
                    "names": sorted(after) == sorted(expected),
                    "norm_gap": max(abs(r.grad_norm / n - 1) for r, n in zip(reports, norms, strict=True)),
                    "tokens": reports[0].tokens,
                    "packing": engine.packing,
                }
                engine.close()
        return found

    def gradient_checkpointing(self) -> dict[str, Any]:
        expected, _ = plain_torch(str(self.work / "untied"), "policy", NLL, SMOOTH)
        engine = self.start("untied", gradient_checkpointing=True)
        for step in range(STEPS):
            engine.step(share(whole_batch(step), self.rank), NLL)
        found = gap(full_weights(engine), expected)
        engine.close()
        return {"gap": found}

    def offloaded_to_the_host(self) -> dict[str, Any]:
        expected, _ = plain_torch(str(self.work / "tied"), "policy", NLL, SMOOTH)
        found = {}
        for name, options in {
            "2": {"stage": 2, "offload_optimizer": True},
            "3": {"stage": 3, "offload_optimizer": True, "offload_parameters": True},
        }.items():
            engine = self.start(options=options)
            for step in range(STEPS):
                engine.step(share(whole_batch(step), self.rank), NLL)
            found[name] = gap(full_weights(engine), expected)
            engine.close()
        return found

    def scores(self) -> dict[str, Any]:
        """Frozen roles side by side with a policy, scores before and after its step."""
        policy = self.start()
        reference = self.start(role="reference", optimizer=None)
        plain = self.start(role="reference", optimizer=None, options={"stage": 0})
        batch = share(whole_batch(0), self.rank)
        expected, _ = forward(str(self.work / "tied"), batch)
        gaps = []
        for _ in range(2):
            for engine in (reference, plain):
                scored = engine.score(batch, ("log_probs", "entropy")).log_probs
                assert scored is not None
                gaps.append(float((scored - expected).abs().max()))
            policy.step(batch, NLL)
        moved = policy.score(batch).log_probs
        assert moved is not None
        for engine in (policy, reference, plain):
            engine.close()
        return {"gaps": gaps, "moved": float((moved - expected).abs().max())}

    def one_rank_is_not_finite(self) -> dict[str, Any]:
        found = {}
        for stage in (0, 1, 2, 3):
            for fault in ("loss", "gradient"):
                engine = self.start(options={"stage": stage}, max_tokens_per_micro_batch=16)
                batch = rows(0).with_columns(poison=torch.zeros(6, dtype=torch.bool))
                if self.rank == 1:
                    batch = batch.with_columns(poison=torch.arange(6) == 2)
                before = full_weights(engine)
                report = engine.step(batch, Loss(function=faulty_loss, config=fault))
                unchanged = gap(before, full_weights(engine))
                good = engine.step(batch, NLL)
                fresh = self.start(options={"stage": stage}, max_tokens_per_micro_batch=16)
                fresh.step(batch, NLL)
                found[f"{fault}-{stage}"] = {
                    "skipped": report.skipped,
                    "unchanged": unchanged,
                    "ids": list(report.bad_sample_ids),
                    "good": not good.skipped,
                    "trace": gap(full_weights(fresh), full_weights(engine)),
                }
                engine.close()
                fresh.close()
        return found

    def weights_over_gloo(self) -> dict[str, Any]:
        """Rank 0 sends, a thread of rank 1 receives into an ordinary model."""
        found = {}
        cases: dict[str, dict[str, Any]] = {
            "1": {"options": {"stage": 1}},
            "3": {"options": {"stage": 3}},
            "3 kept whole": {"options": {"stage": 3, "param_persistence_threshold": 100_000}},
            "3 with adapters": {
                "options": {"stage": 3},
                "lora": LoraConfig(rank=4, target_modules=("q_proj", "up_proj")),
            },
            "3 with experts": {"options": {"stage": 3}},
        }
        for case, fields in cases.items():
            engine = self.start("experts" if "experts" in case else "untied", **fields)
            engine.step(share(whole_batch(0), self.rank), NLL)
            expected = full_weights(engine)
            source: Any = engine.weights()
            source.end_sync()
            manifest = source.manifest(1, bucket_bytes=20_000)
            sender = open_sender("gloo", receivers=1, timeout_s=60) if self.rank == 0 else None
            link = engine.ranks.gather(sender.link if sender else None)[0]
            received: dict[str, torch.Tensor] = {}

            def receive(link: Any = link, into: dict = received, manifest: Any = manifest) -> None:
                def load(weights: Any) -> None:
                    into.update({name: tensor.clone() for name, tensor in weights})

                receive_weights(manifest, join_link(link, 0), load)

            thread = threading.Thread(target=receive)
            if self.rank == 1:
                thread.start()
            elif sender is not None:
                sender.accept()
            report = send_weights(source, manifest, sender)
            if self.rank == 1:
                thread.join(60)
            everyone = engine.ranks.gather(gap(received, expected) if self.rank == 1 else None)
            packed = [source.packs(bucket) for bucket in manifest.buckets()]
            ratio = report.gathered_per_sent
            found[case] = {"gap": everyone[1], "buckets": len(packed), "packed": sum(packed), "ratio": ratio}
            if sender is not None:
                sender.close()
            engine.close()
        return found

    def resume(self) -> dict[str, Any]:
        found = {}
        optimizer = OptimizerConfig(learning_rate=1e-3, schedule="cosine", warmup_steps=1, total_steps=8)
        for stage in (0, 1, 2, 3):
            path = self.work / f"checkpoint-{stage}"
            path.mkdir(exist_ok=True)
            first = self.start("untied", optimizer=optimizer, options={"stage": stage})
            for step in range(2):
                first.step(share(whole_batch(step), self.rank), NLL)
            first.save(path)
            expected = [first.step(share(whole_batch(s), self.rank), NLL) for s in (2, 3)]
            second = self.start("untied", optimizer=optimizer, options={"stage": stage})
            second.load(path)
            reports = [second.step(share(whole_batch(s), self.rank), NLL) for s in (2, 3)]
            found[str(stage)] = {
                "reports": reports == expected,
                "gap": gap(full_weights(first), full_weights(second)),
            }
            first.close()
            second.close()
        return found

    def export(self) -> dict[str, Any]:
        found = {}
        batch = share(whole_batch(0), 1)
        for stage in (2, 3):
            path = self.work / f"export-{stage}"
            path.mkdir(exist_ok=True)
            engine = self.start("tied", options={"stage": stage, "export_shard_bytes": 60_000})
            engine.step(share(whole_batch(0), self.rank), NLL)
            engine.export(path)
            scored = engine.score(batch).log_probs
            assert scored is not None
            found[str(stage)] = {
                "gap": float((forward(str(path), batch)[0] - scored).abs().max()),
                "files": len(list(path.glob("*.safetensors"))),
            }
            engine.close()
        return found

    def adapters(self) -> dict[str, Any]:
        """Adapters train alike in all stages, leave merged, and continue bit for bit."""
        found, merged = {}, {}
        batch = share(whole_batch(0), 1)
        for role, loss in (("policy", NLL), ("critic", VALUE)):
            for stage in (0, 2, 3):
                path = self.work / f"adapters-{role}-{stage}"
                path.mkdir(exist_ok=True)
                fields = {"role": role, "options": {"stage": stage}, "lora": LoraConfig(rank=4)}
                first, second = self.start("untied", **fields), self.start("untied", **fields)
                before = full_weights(first)
                for step in range(STEPS):
                    first.step(share(whole_batch(step), self.rank), loss)
                merged[stage] = full_weights(first)
                first.save(path)
                second.load(path)
                first.export(path)
                scored = first.score(batch).log_probs if role == "policy" else None
                found[f"{role}-{stage}"] = {
                    "names": sorted(before) == sorted(plain_names(str(self.work / "untied"), role)),
                    "moved": gap(before, merged[stage]),
                    "frozen": float((before["model.norm.weight"] - merged[stage]["model.norm.weight"]).abs().max()),
                    "gap": gap(merged[stage], merged[0]),
                    "resumed": gap(merged[stage], full_weights(second)),
                    "exported": 0.0
                    if scored is None
                    else float((forward(str(path), batch)[0] - scored).abs().max()),
                }
                first.close()
                second.close()
        return found

    def bfloat16(self) -> dict[str, Any]:
        """16-bit training stays near float32 training, and exports 16 bits."""
        found = {}
        for options in (
            {"stage": 1, "accumulate_dtype": "bfloat16"},
            {"stage": 2},
            {"stage": 3},
        ):
            engine = self.start(
                "untied", dtype="bfloat16", optimizer=replace(SMOOTH, learning_rate=0.1), options=options
            )
            losses = [engine.step(share(whole_batch(0), self.rank), NLL).loss for _ in range(4)]
            dtypes = {spec.dtype for spec in engine.weights().manifest(0).tensors}
            batch = rows(0).with_columns(poison=torch.arange(6) == (2 if self.rank == 1 else 7))
            before = full_weights(engine)
            report = engine.step(batch, Loss(function=faulty_loss, config="gradient"))
            found[str(options["stage"])] = {
                "losses": losses,
                "dtypes": sorted(dtypes),
                "skipped": report.skipped,
                "unchanged": gap(before, full_weights(engine)),
            }
            engine.close()
        return found


def main() -> None:
    """Run all checks, or those named on the command line."""
    work = Path(sys.argv[1])
    rank = int(os.environ["RANK"])
    checks = Checks(work, rank)
    # ModelChecks end with tensor parallelism, whose groups DeepSpeed keeps for the rest of the process.
    kinds = (Checks, FeatureChecks, TileChecks, ModelChecks)
    every = [name for kind in kinds for name, value in vars(kind).items() if callable(value)]
    names = sys.argv[2:] or [name for name in every if not name.startswith("_") and name != "start"]
    results: dict[str, Any] = {}
    for name in names:
        check: Callable[[], Any] = getattr(checks, name)
        begin = time.monotonic()
        try:
            results[name] = check()
            print(f"{name}: {time.monotonic() - begin:.1f} s", flush=True)
        except Exception:
            # The other rank may now wait for this one; leave, so that it is told.
            (work / f"failed-{rank}.txt").write_text(f"{name}:\n{traceback.format_exc()}")
            raise
        if rank == 0:
            (work / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
