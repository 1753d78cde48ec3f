"""More checks for two_ranks.py: 4-bit base weights, replayed routing, candidates of every rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rlhf_core import (
    Batch,
    EngineConfig,
    LoraConfig,
    Loss,
    LossTerms,
    ModelOutputs,
    accumulate,
    concatenate,
    image_row,
    load_processor,
    load_role,
    model_outputs,
)
from rlhf_core.testing.engine_ground import SMOOTH, forward, gap, supervised_loss
from rlhf_train import MergeConfig, ZeroWeights, merge_adapter
from torch.nn.functional import pad
from two_rank_features import NLL, half, plain_steps, samples, smooth_adam, weights_of

DRAWN = 3
"""Candidates per place."""


def teacher_loss(outputs: ModelOutputs, batch: Batch, config: Any) -> LossTerms:
    """Cross-entropy against a teacher that likes all candidates alike, as distillation has it."""
    assert outputs.candidate_log_probs is not None
    total = -outputs.candidate_log_probs.masked_fill(~batch.response_mask[..., None], 0).sum() / DRAWN
    return LossTerms(total=total, weight=batch.response_mask.sum().float())


def with_candidates(batch: Batch) -> Batch:
    """The last four rows, a rank's whole share, have no response."""
    ids = (batch.token_ids[..., None] * torch.arange(2, 2 + DRAWN)) % 500
    mask = batch.response_mask.clone()
    mask[4:] = False
    return replace(batch.with_columns(candidate_ids=ids), response_mask=mask)


def perturb_routers(engine: Any) -> None:
    """Every router gets the next expert's weights for each expert."""
    import deepspeed

    gates = [p for n, p in engine.model.named_parameters() if n.endswith(("gate.weight", "router.weight"))]
    with torch.no_grad(), deepspeed.zero.GatheredParameters(gates, modifier_rank=0):
        for gate in gates:
            gate.copy_(gate.roll(1, dims=0))


def picture_rows(path: str) -> Batch:
    """A row with one image, one with two, and three of text."""
    processor = load_processor(path)
    mark = processor.image_token
    pixels = np.random.default_rng(0).integers(0, 255, (3, 56, 84, 3), dtype=np.uint8)
    texts = ((f"{mark} what?", [0]), (f"{mark} or {mark}", [1, 2]), ("a text", []), ("another one", []), ("b", []))
    parts = []
    for text, shown in texts:
        ids, images = list(processor.tokenizer(text)["input_ids"]), None
        if shown:
            ids, images = image_row(processor, text, [pixels[index] for index in shown])
        tokens = torch.tensor([ids + processor.tokenizer("answer")["input_ids"]])
        mask = torch.ones_like(tokens).bool()
        counted = torch.arange(tokens.shape[1])[None] >= len(ids)
        shown_rows = () if images is None else (images,)
        parts.append(Batch(token_ids=tokens, attention_mask=mask, response_mask=counted, images=shown_rows))
    return concatenate(parts)


def plain_picture_steps(path: str, batch: Batch) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The weights after two steps by one process on an ordinary model, and log-probs before them."""
    model, _ = load_role(EngineConfig(model=path, images=True), extra="")
    with torch.no_grad():
        log_probs = torch.cat(
            [
                pad(found, (0, batch.token_ids.shape[1] - found.shape[1]))
                for row in range(batch.rows)
                for found in [model_outputs(model, batch.select([row]), ("log_probs",)).log_probs]
            ]
        )
    steps = smooth_adam(dict(model.named_parameters()))
    for _ in range(2):
        accumulate(
            batch,
            NLL,
            forward=lambda piece, fields: model_outputs(model, piece, fields),
            backward=lambda total, last: total.backward(),
            max_tokens=1 << 20,
        )
        steps.step()
        model.zero_grad(set_to_none=True)
    source = ZeroWeights(model)
    return {n: t.clone() for b in source.manifest(0).buckets() for n, t in source.gather(b)}, log_probs


class ModelChecks:
    """One method per check; see `two_ranks.Checks`, which has `start`, `work` and `rank`."""

    work: Path
    rank: int
    start: Any

    def quantized(self) -> dict[str, Any]:
        """4-bit base weights under adapters: alike in all stages, leave in full precision, continue bit for bit."""
        found, merged = {}, {}
        batch = half(samples(), self.rank)
        for stage in (0, 2, 3):
            path = self.work / f"quantized-{stage}"
            path.mkdir(exist_ok=True)
            fields = {
                "optimizer": replace(SMOOTH, learning_rate=0.05),
                "lora": LoraConfig(rank=4, quantize="nf4"),
                "options": {"stage": stage},
            }
            first, second = self.start("untied", **fields), self.start("untied", **fields)
            frozen = self.start("untied", **{**fields, "optimizer": None}, role="reference")
            same = (first.score(batch).log_probs - frozen.score(batch).log_probs).abs().max()
            frozen.close()
            before = weights_of(first)
            for step in range(2):
                first.step(half(samples(step), self.rank), NLL)
            merged[stage] = weights_of(first)
            first.save(path)
            second.load(path)
            for engine in (first, second):
                engine.step(batch, NLL)
            first.export(path)
            scored = first.score(batch).log_probs
            if self.rank == 0:
                merge_adapter(MergeConfig(adapter=path, output=path / "merged"))
            first.ranks.barrier()
            memory = first.memory_report()
            found[str(stage)] = {
                "dtypes": sorted({str(tensor.dtype) for tensor in before.values()}),
                "reference": float(same),
                "moved": gap(before, merged[stage]),
                "gap": gap(merged[stage], merged[0]),
                "resumed": gap(weights_of(first), weights_of(second)),
                "exported": float((forward(str(path), batch)[0] - scored).abs().max()),
                "merged_again": float((forward(str(path / "merged"), batch)[0] - scored).abs().max()),
                "parameters": memory.parameters,
                "whole": sum(4 * tensor.numel() for tensor in before.values()),
            }
            first.close()
            second.close()
        engine = self.start("untied", dtype="bfloat16", lora=LoraConfig(quantize="nf4"), options={"stage": 3})
        reports = [engine.step(batch, NLL) for _ in range(3)]
        dtypes = sorted({spec.dtype for spec in engine.weights().manifest(0).tensors})
        found["bfloat16"] = {"losses": [report.loss for report in reports], "dtypes": dtypes}
        engine.close()
        return found

    def candidates(self) -> dict[str, Any]:
        """Candidates' log-probs, where one rank has no place for any, against one plain process."""
        loss = Loss(function=teacher_loss, outputs=("candidate_log_probs",))
        batches = [with_candidates(samples(step)) for step in range(2)]
        expected = plain_steps(self.work / "untied", batches, loss, smooth_adam)
        found = {}
        for stage, max_tokens in ((2, 900), (3, 900), (3, 20)):
            engine = self.start("untied", options={"stage": stage}, max_tokens_per_micro_batch=max_tokens)
            before = weights_of(engine)
            for batch in batches:
                engine.step(half(batch, self.rank), loss)
            found[f"{stage}-{max_tokens}"] = {
                "gap": gap(weights_of(engine), expected),
                "moved": gap(before, weights_of(engine)),
            }
            engine.close()
        return found

    def routing_replay(self) -> dict[str, Any]:
        """Experts recorded by `score` are chosen again in `score` and `step`, whatever the routers say by then."""
        found = {}
        loss = Loss(function=supervised_loss)
        batch = half(samples(), self.rank)
        for kind in ("mixtral", "qwen-moe", "jamba"):
            weights = {}
            for stage in (2, 3):
                options = {"stage": stage}
                engine = self.start(kind, options=options, routing_replay=True, max_tokens_per_micro_batch=30)
                first = engine.score(batch)
                column = batch.with_columns(routed_experts=first.routed_experts)
                again = engine.score(column, ("log_probs", "routed_experts"))
                perturb_routers(engine)
                free = engine.score(batch)
                replayed = engine.score(column, ("log_probs", "routed_experts"))
                before = weights_of(engine)
                engine.step(column, loss)
                weights[stage] = after = weights_of(engine)
                engine.close()
                other = self.start(kind, options={"stage": stage}, max_tokens_per_micro_batch=30)
                perturb_routers(other)
                other.step(column, loss)
                found[f"{kind}-{stage}"] = {
                    "unchanged": float((first.log_probs - again.log_probs).abs().max()),
                    "used": torch.equal(replayed.routed_experts, first.routed_experts),
                    "differ": not torch.equal(free.routed_experts, first.routed_experts),
                    "routers": min(
                        float((before[name] - after[name]).abs().max())
                        for name in before
                        if name.endswith(("gate.weight", "router.weight"))
                    ),
                    "stages": gap(weights[2], after),
                    "without": gap(after, weights_of(other)),
                }
                other.close()
        return found

    def images(self) -> dict[str, Any]:
        """Rows with images on one rank and rows of text on the other, against one plain process."""
        path = self.work / "seeing"
        batch = picture_rows(str(path))
        expected, log_probs = plain_picture_steps(str(path), batch)
        own = batch.select([0, 1] if self.rank == 0 else [2, 3, 4])
        found = {}
        # Every row is a micro-batch, and there are none with images on the second rank.
        for stage, frozen in ((2, ()), (3, ()), (3, ("model.visual.*",))):
            options = {"stage": stage, "freeze": list(frozen)}
            engine = self.start("seeing", images=True, options=options, max_tokens_per_micro_batch=1)
            scored = engine.score(own).log_probs
            before = weights_of(engine)
            for _ in range(2):
                engine.step(own, NLL)
            after = weights_of(engine)
            encoder = [name for name in before if "visual" in name]
            width = scored.shape[1]
            mine = log_probs[:2] if self.rank == 0 else log_probs[2:]
            found[f"{stage}{'-frozen' if frozen else ''}"] = {
                "scores": float((scored - mine[:, :width]).abs().max()),
                "gap": gap(after, expected),
                "moved": gap(before, after),
                "encoder_moved": gap({n: before[n] for n in encoder}, {n: after[n] for n in encoder}),
                "packing": engine.packing,
            }
            engine.close()
        return found

    def secondary_shards(self) -> dict[str, Any]:
        """ZeRO++'s second copy of the shards, for a policy and a critic in one process, against plain torch."""
        batches = [samples(step) for step in range(2)]
        expected = plain_steps(self.work / "untied", batches, NLL, smooth_adam)
        options = {"stage": 3, "zero_hpz_partition_size": 2}
        policy, critic = self.start("untied", options=options), self.start("untied", role="critic", options=options)
        values = [critic.score(half(batches[0], self.rank), ("values",)).values]
        for batch in batches:
            report = policy.step(half(batch, self.rank), NLL)
        found = {"gap": gap(weights_of(policy), expected), "norm": report.grad_norm}
        found["values"] = float(values[0].abs().max())
        policy.close()
        critic.close()
        return found

    def tensor_parallel(self) -> dict[str, Any]:
        """Two ranks with a slice of every layer against one plain process; resume and export."""
        batches = [samples(step) for step in range(3)]
        found = {}
        for model in ("untied", "tied"):
            expected = plain_steps(self.work / model, batches, NLL, smooth_adam)
            for stage in (1, 2):
                path = self.work / f"sliced-{model}-{stage}"
                path.mkdir(exist_ok=True)
                engine = self.start(model, options={"stage": stage, "autotp_size": 2})
                own = half(batches[0], self.rank)
                scored = engine.score(own).log_probs
                before = weights_of(engine)
                reports = [engine.step(half(batch, self.rank), NLL) for batch in batches]
                after = weights_of(engine)
                engine.save(path)
                engine.export(path)
                final = engine.score(own).log_probs
                again = self.start(model, options={"stage": stage, "autotp_size": 2})
                again.load(path)
                for one in (engine, again):
                    one.step(own, NLL)
                found[f"{model}-{stage}"] = {
                    "packing": engine.packing,
                    "scores": float((forward(str(self.work / model), own)[0] - scored).abs().max()),
                    "moved": gap(before, after),
                    "gap": gap(after, expected),
                    "tokens": reports[0].tokens,
                    "exported": float((forward(str(path), own)[0] - final).abs().max()),
                    "resumed": gap(weights_of(engine), weights_of(again)),
                    "held": engine.memory_report().parameters / sum(4 * t.numel() for t in after.values()),
                }
                engine.close()
                again.close()
        return found
