"""More checks for two_ranks.py: mixture models, optimizers, averages, checkpoints, sequence parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rlhf_core import (
    Batch,
    EngineConfig,
    Loss,
    LossTerms,
    MemoryMeter,
    ModelOutputs,
    OptimizerConfig,
    accumulate,
    model_outputs,
)
from rlhf_core.testing.engine_ground import SMOOTH, faulty_loss, forward, gap, rows, supervised_loss
from rlhf_train import DeepSpeedEngine
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

NLL = Loss(function=supervised_loss)
SCHEDULED = OptimizerConfig(learning_rate=1e-3, weight_decay=0.1, schedule="cosine", warmup_steps=1, total_steps=8)


def pair_loss(outputs: ModelOutputs, batch: Batch, config: float) -> LossTerms:
    """DPO with a reference that is 0, on rows that alternate between chosen and rejected; plus the router loss."""
    assert outputs.log_probs is not None
    chosen, rejected = outputs.log_probs.sum(dim=1).view(-1, 2).unbind(dim=1)
    weight = torch.tensor(float(batch.rows // 2))
    total = -logsigmoid(0.1 * (chosen - rejected)).sum()
    if outputs.aux_loss is not None:
        total = total + config * outputs.aux_loss * weight
    return LossTerms(total=total, weight=weight)


def clipped_loss(outputs: ModelOutputs, batch: Batch, config: float) -> LossTerms:
    """PPO's clipped objective (Schulman et al. 2017, eq. 7) with fixed advantages."""
    assert outputs.log_probs is not None
    ratio = (outputs.log_probs - batch["old_log_probs"]).exp()
    gain = torch.minimum(ratio * batch["advantages"], ratio.clamp(0.8, 1.2) * batch["advantages"])
    counted = batch.response_mask.sum().float()
    total = -gain.masked_fill(~batch.response_mask, 0).sum()
    if outputs.aux_loss is not None:
        total = total + config * outputs.aux_loss * counted
    return LossTerms(total=total, weight=counted)


def score_loss(outputs: ModelOutputs, batch: Batch, config: Any) -> LossTerms:
    """Squared distance of the scores to the first token's parity."""
    assert outputs.scores is not None
    return LossTerms(
        total=(outputs.scores - (batch.token_ids[:, 0] % 2).float()).square().sum(),
        weight=torch.tensor(float(batch.rows)),
    )


def value_loss(outputs: ModelOutputs, batch: Batch, config: Any) -> LossTerms:
    """Square of the values."""
    assert outputs.values is not None
    counted = batch.response_mask
    return LossTerms(total=((outputs.values - 1).square() * counted).sum(), weight=counted.sum().float())


VALUE = Loss(function=value_loss, outputs=("values",))
OFFLOADED = {"offload_optimizer": True, "offload_parameters": True}


@contextmanager
def _free_memory(mib: int) -> Iterator[None]:
    """A context in which this rank finds so much memory free."""
    before, MemoryMeter.free = MemoryMeter.free, lambda self: mib << 20
    try:
        yield
    finally:
        MemoryMeter.free = before


def pairs(seed: int = 0) -> Batch:
    """Four pairs of rows."""
    return replace(rows(seed, lengths=(9, 14, 5, 12, 7, 10, 8, 11)), rows_per_unit=2)


def samples(seed: int = 0) -> Batch:
    """Eight rows with advantages."""
    batch = rows(seed, lengths=(9, 14, 5, 12, 7, 10, 8, 11))
    advantages = torch.linspace(-1, 1, 8)[:, None].expand(batch.token_ids.shape).clone()
    return batch.with_columns(advantages=advantages)


def half(batch: Batch, rank: int) -> Batch:
    """The first or the last four rows."""
    return batch.select(range(4) if rank == 0 else range(4, 8))


def weights_of(engine: DeepSpeedEngine) -> dict[str, torch.Tensor]:
    """All weights by their checkpoint names."""
    source = engine.weights()
    manifest = source.manifest(0, bucket_bytes=50_000)
    return {name: t.clone() for bucket in manifest.buckets() for name, t in source.gather(bucket)}


def plain_steps(path: Path, batches: list[Batch], loss: Loss, optimizer: Any) -> dict[str, torch.Tensor]:
    """The weights after the same steps by one process on an ordinary model; one micro-batch of everything.

    `optimizer` makes a torch optimizer from named parameters.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    steps = optimizer(dict(model.named_parameters()))
    for batch in batches:
        accumulate(
            batch,
            loss,
            forward=lambda piece, fields: model_outputs(model, piece, fields),
            backward=lambda total, last: total.backward(),
            max_tokens=1 << 20,
        )
        steps.step()
        model.zero_grad(set_to_none=True)
    from rlhf_train import ZeroWeights

    source = ZeroWeights(model)
    return {n: t.clone() for b in source.manifest(0).buckets() for n, t in source.gather(b)}


def smooth_adam(parameters: dict[str, torch.Tensor]) -> torch.optim.Optimizer:
    """AdamW as SMOOTH has it."""
    return torch.optim.AdamW(parameters.values(), lr=0.3, eps=1.0, betas=(0.9, 0.95), weight_decay=0.0)


def resizing_engine(work: Path, stage: int) -> DeepSpeedEngine:
    """The engine whose checkpoints change their number of ranks."""
    options = {"stage": stage, "param_persistence_threshold": 1000, "timeout_s": 120.0}
    model = str(work / "untied")
    return DeepSpeedEngine(EngineConfig(model=model, optimizer=SCHEDULED, average_decay=0.5, options=options))


def whole_and_average(engine: DeepSpeedEngine) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """All weights, and their moving average."""
    weights = weights_of(engine)
    with engine.averaged_weights():
        return weights, weights_of(engine)


def save_on_one_rank(work: Path, stage: int) -> None:
    """Two steps on all rows, a checkpoint, two more; and the weights before and after these."""
    engine = resizing_engine(work, stage)
    for step in range(2):
        engine.step(samples(step), NLL)
    path = work / f"one-rank-{stage}"
    path.mkdir(exist_ok=True)
    engine.save(path)
    saved = whole_and_average(engine)
    for step in (2, 3):
        engine.step(samples(step), NLL)
    torch.save([saved, whole_and_average(engine)], work / f"one-rank-{stage}.pt")
    engine.close()


def resumed_gaps(work: Path, stage: int, engine: DeepSpeedEngine, batches: list[Batch]) -> dict[str, Any]:
    """How far an engine that has just loaded is from what the other number of ranks had, before and after steps."""
    (saved, saved_average), (after, after_average) = torch.load(work / f"one-rank-{stage}.pt")
    weights, average = whole_and_average(engine)
    found = {"loaded": gap(weights, saved), "loaded_average": gap(average, saved_average)}
    reports = [engine.step(batch, NLL) for batch in batches]
    weights, average = whole_and_average(engine)
    return {
        **found,
        "rates": [report.learning_rate for report in reports],
        "moved": gap(saved, weights),
        "after": gap(weights, after),
        "after_average": gap(average, after_average),
        "decays": sorted({group["weight_decay"] for group in engine._deepspeed.optimizer.param_groups}),
    }


def resized_on_one_rank(work: Path, stage: int) -> dict[str, Any]:
    """What one rank finds in the checkpoint of two."""
    engine = resizing_engine(work, stage)
    engine.load(work / f"two-ranks-{stage}")
    found = resumed_gaps(work, stage, engine, [samples(2), samples(3)])
    engine.close()
    return found


class FeatureChecks:
    """One method per check; see `two_ranks.Checks`, which has `start`, `work` and `rank`."""

    work: Path
    rank: int
    start: Any

    def mixtures(self) -> dict[str, Any]:
        """A preference step and a policy-gradient step for three kinds of model, sharded and not."""
        found = {}
        for kind in ("mixtral", "qwen-moe", "jamba"):
            after = {}
            for stage in (2, 3):
                engine = self.start(kind, options={"stage": stage}, max_tokens_per_micro_batch=1 << 20)
                before = weights_of(engine)
                dpo = Loss(function=pair_loss, config=0.01, outputs=("log_probs", "aux_loss"))
                ppo = Loss(function=clipped_loss, config=0.01, outputs=("log_probs", "aux_loss"))
                reports = [engine.step(half(pairs(), self.rank), dpo)]
                batch = half(samples(), self.rank)
                old = engine.score(batch).log_probs
                reports.append(engine.step(batch.with_columns(old_log_probs=old), ppo))
                after[stage] = weights_of(engine)
                found[f"{kind}-{stage}"] = {
                    "packing": engine.packing,
                    "moved": gap(before, after[stage]),
                    "router": max(
                        float((before[name] - after[stage][name]).abs().max())
                        for name in before
                        if name.endswith(("gate.weight", "router.weight"))
                    ),
                    "skipped": [report.skipped for report in reports],
                    "gap": gap(after[2], after[stage]),
                }
                engine.close()
            dense = Loss(function=pair_loss, config=0.0)
            engine = self.start(kind, options={"stage": 3})
            engine.step(half(pairs(), self.rank), dense)
            expected = plain_steps(self.work / kind, [pairs()], dense, smooth_adam)
            found[f"{kind}-3"]["plain"] = gap(weights_of(engine), expected)
            engine.close()
        return found

    def muon(self) -> dict[str, Any]:
        """Muon in all stages against DeepSpeed's own update on whole matrices."""
        from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

        settings = OptimizerConfig(
            kind="muon", learning_rate=0.1, muon_learning_rate=0.02, eps=1.0, max_grad_norm=0.0, weight_decay=0.1
        )

        def plain(parameters: dict[str, torch.Tensor]) -> torch.optim.Optimizer:
            own = [p for n, p in parameters.items() if p.dim() == 2 and "embed" not in n and "lm_head" not in n]
            ids = {id(p) for p in own}
            rest = [p for p in parameters.values() if id(p) not in ids]
            adam = {"lr": 0.1, "betas": settings.betas, "eps": 1.0, "use_muon": False}
            return MuonWithAuxAdam(
                [
                    {"params": [p for p in rest if p.dim() > 1], "weight_decay": 0.1, **adam},
                    {"params": [p for p in rest if p.dim() == 1], "weight_decay": 0.0, **adam},
                    {"params": own, "lr": 0.02, "momentum": 0.95, "weight_decay": 0.1, "use_muon": True},
                ]
            )

        expected = plain_steps(self.work / "untied", [samples(0), samples(1)], NLL, plain)
        found = {}
        for stage in (0, 1, 2, 3):
            engine = self.start("untied", optimizer=settings, options={"stage": stage})
            before = weights_of(engine)
            for seed in (0, 1):
                engine.step(half(samples(seed), self.rank), NLL)
            after = weights_of(engine)
            poisoned = half(samples(2), self.rank).with_columns(poison=torch.arange(4) == (2 if self.rank else 9))
            report = engine.step(poisoned, Loss(function=faulty_loss, config="gradient"))
            found[str(stage)] = {
                "gap": gap(after, expected),
                "moved": gap(before, after),
                "skipped": report.skipped,
                "unchanged": gap(after, weights_of(engine)),
            }
            engine.close()
        return found

    def averages(self) -> dict[str, Any]:
        """The moving average by hand, its resume and its export."""
        found = {}
        for stage, threshold in ((0, 0), (2, 0), (3, 0), (3, 100_000)):
            options = {"stage": stage, "param_persistence_threshold": threshold}
            fields = {"optimizer": SCHEDULED, "average_decay": 0.5, "options": options}
            first, second = (self.start("untied", **fields) for _ in range(2))
            expected = weights_of(first)
            for step in range(3):
                first.step(half(samples(step), self.rank), NLL)
                expected = {n: 0.5 * expected[n] + 0.5 * t for n, t in weights_of(first).items()}
            path = self.work / f"average-{stage}-{threshold}"
            for name in ("saved", "exported"):
                (path / name).mkdir(parents=True, exist_ok=True)
            first.save(path / "saved")
            first.export_average(path / "exported")
            before = weights_of(first)
            with first.averaged_weights():
                inside = weights_of(first)
                scored = first.score(half(samples(), self.rank)).log_probs
            assert scored is not None
            exported, _ = forward(str(path / "exported"), half(samples(), self.rank))
            second.load(path / "saved")
            for engine in (first, second):
                engine.step(half(samples(3), self.rank), NLL)
            with first.averaged_weights(), second.averaged_weights():
                resumed = gap(weights_of(first), weights_of(second))
            found[f"{stage}-{threshold}"] = {
                "gap": gap(inside, expected),
                "distance": gap(before, inside),
                "exported": float((scored - exported).abs().max()),
                "resumed": resumed,
                "continued": gap(weights_of(first), weights_of(second)),
            }
            first.close()
            second.close()
        return found

    def frozen(self) -> dict[str, Any]:
        """Layers by name; and the whole policy for exactly two steps, over a resume."""
        found = {}
        for stage in (0, 2, 3):
            patterns = ["model.embed_tokens.*", "model.layers.0.*"]
            engine = self.start("untied", options={"stage": stage, "freeze": patterns})
            before = weights_of(engine)
            engine.step(half(samples(), self.rank), NLL)
            after = weights_of(engine)
            still = {n for n in before if torch.equal(before[n], after[n])}
            engine.close()

            options = {"stage": stage, "freeze_steps": 2}
            path = self.work / f"frozen-{stage}"
            path.mkdir(exist_ok=True)
            engine = self.start("untied", options=options, optimizer=replace(SMOOTH, warmup_steps=3))
            first = engine.step(half(samples(), self.rank), NLL)
            engine.save(path)
            engine.close()
            engine = self.start("untied", options=options, optimizer=replace(SMOOTH, warmup_steps=3))
            engine.load(path)
            moved, reports = [], [first]
            for step in range(3):
                old = weights_of(engine)
                reports.append(engine.step(half(samples(step), self.rank), NLL))
                moved.append(gap(old, weights_of(engine)) > 0)
            engine.close()
            found[str(stage)] = {
                "still": sorted(still),
                "moved": moved,
                "rates": [report.learning_rate for report in reports],
                "losses": [report.loss for report in reports],
                "tokens": [report.tokens for report in reports],
            }
        return found

    def resized(self) -> dict[str, Any]:
        """One rank's checkpoint on two; and one for the test process to load on one."""
        found = {}
        for stage in (1, 2, 3):
            engine = resizing_engine(self.work, stage)
            engine.load(self.work / f"one-rank-{stage}")
            batches = [half(samples(step), self.rank) for step in (2, 3)]
            found[str(stage)] = resumed_gaps(self.work, stage, engine, batches)
            engine.close()
            engine = resizing_engine(self.work, stage)
            for step in range(2):
                engine.step(half(samples(step), self.rank), NLL)
            path = self.work / f"two-ranks-{stage}"
            path.mkdir(exist_ok=True)
            pending = engine.save_in_background(path)
            # Training goes on while the files are written; the checkpoint must not see it.
            for step in (2, 3):
                engine.step(half(samples(step), self.rank), NLL)
            pending.wait()
            engine.close()
        return found

    def heads(self) -> dict[str, Any]:
        """Scalar heads: a reward model's way to a critic, to Transformers, and its scale."""
        found = {}
        batch = half(samples(), self.rank)
        for stage in (2, 3):
            path = self.work / f"reward-{stage}"
            path.mkdir(exist_ok=True)
            trained = self.start("scalar", role="reward", options={"stage": stage})
            trained.step(batch, Loss(function=score_loss, outputs=("scores",)))
            raw = trained.score(batch, ("scores",)).scores
            scale = trained.measure_reward_scale(batch)
            trained.export(path)
            scaled = trained.score(batch, ("scores",)).scores
            trained.close()
            reward = self.start("", role="reward", optimizer=None, model_path=path, options={"stage": stage})
            again = reward.score(batch, ("scores",)).scores
            reward.close()
            critic = self.start("", role="critic", model_path=path, options={"stage": stage})
            values = critic.score(batch, ("values",)).values
            critic.close()
            plain: Any = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
            with torch.no_grad():
                outside = model_outputs(plain.eval(), batch, ("scores", "values"))
            assert not any(one is None for one in (raw, scaled, again, values, outside.scores, outside.values))
            found[str(stage)] = {
                "scores": float((outside.scores - raw).abs().max()),
                "values": float((outside.values - values).abs().max()),
                "values_differ": float(values.std()),
                "scaled": float((scale.apply(raw) - scaled).abs().max()),
                "reloaded": float((again - scaled).abs().max()),
                "config": [plain.config.reward_mean, plain.config.reward_std],
                "scale": [scale.mean, scale.std],
                "kind": plain.config.architectures[0],
            }
        return found

    def sequence_parallel(self) -> dict[str, Any]:
        """Two ranks that share rows against one plain process, gradients included."""
        found = {}
        batches = [samples(step) for step in range(3)]
        expected = plain_steps(self.work / "untied", batches, NLL, smooth_adam)
        for name, fields in {
            "3": {"options": {"stage": 3}},
            "2": {"options": {"stage": 2}},
            "3-cut": {"options": {"stage": 3}, "max_tokens_per_micro_batch": 30},
            "3-checkpointing": {"options": {"stage": 3}, "gradient_checkpointing": True},
        }.items():
            engine = self.start("untied", sequence_parallel_size=2, **fields)
            scored = engine.score(half(batches[0], self.rank), ("log_probs", "entropy")).log_probs
            outside, _ = forward(str(self.work / "untied"), half(batches[0], self.rank))
            before = weights_of(engine)
            reports = [engine.step(half(batch, self.rank), NLL) for batch in batches]
            assert scored is not None
            found[name] = {
                "gap": gap(weights_of(engine), expected),
                "moved": gap(before, weights_of(engine)),
                "scores": float((scored - outside).abs().max()),
                "tokens": reports[0].tokens,
                "ids": list(
                    engine.step(
                        half(samples(), self.rank).with_columns(poison=torch.arange(4) == (2 if self.rank else 9)),
                        Loss(function=faulty_loss, config="loss"),
                    ).bad_sample_ids
                ),
            }
            engine.close()
        return found

    def micro_batches_by_trial(self) -> dict[str, Any]:
        """An engine that finds the size of its micro-batches beside one with that size written."""
        found = {}
        for name, model, fields in (
            ("0", "untied", {"options": {"stage": 0}}),
            ("1", "untied", {"options": {"stage": 1}}),
            ("2", "untied", {"options": {"stage": 2}}),
            ("3", "untied", {"options": {"stage": 3}}),
            (
                "3-offloaded",
                "untied",
                {"options": {"stage": 3, "offload_optimizer": True, "offload_parameters": True}},
            ),
            ("3-critic", "untied", {"options": {"stage": 3}, "role": "critic"}),
            ("3-mixture", "mixtral", {"options": {"stage": 3}}),
            ("3-sequence", "untied", {"options": {"stage": 3}, "sequence_parallel_size": 2}),
            ("2-bfloat16", "untied", {"options": {"stage": 2}, "dtype": "bfloat16"}),
        ):
            loss = VALUE if fields.get("role") == "critic" else NLL
            outputs = ("values",) if fields.get("role") == "critic" else ("log_probs",)
            sizes: list[int | str] = ["auto"]
            runs = []
            for size in sizes:
                engine = self.start(model, max_tokens_per_micro_batch=size, longest_row=20, **fields)
                with _free_memory(80 if self.rank else 40):
                    scores = engine.score(half(samples(), self.rank), outputs)
                    reports = [engine.step(half(samples(step), self.rank), loss) for step in range(2)]
                held = engine.memory_report()
                gathered = sum(parameter.data.numel() for parameter in engine.model.parameters())
                runs.append((reports, getattr(scores, outputs[0]), weights_of(engine), held.gradients, gathered))
                if size == "auto":
                    fitted = engine.ranks.gather({kind: one.tokens for kind, one in engine.fitted_tokens().items()})
                    sizes.append(fitted[0]["step"])  # type: ignore[index]
                engine.close()
            auto, written = runs
            found[name] = {
                "tokens": fitted,
                "reports": auto[0] == written[0],
                "scores": torch.equal(auto[1], written[1]),
                "gap": gap(auto[2], written[2]),
                "left": (auto[3] - written[3], auto[4] - written[4]),
            }
        return found

    def memory(self) -> dict[str, Any]:
        """What the report says for a model of known size."""
        found = {}
        for stage in (0, 2, 3):
            engine = self.start("untied", average_decay=0.9, options={"stage": stage})
            engine.step(half(samples(), self.rank), NLL)
            engine.score(half(samples(), self.rank))
            report = engine.memory_report()
            found[str(stage)] = {
                "elements": sum(t.numel() for t in weights_of(engine).values()),
                "parameters": report.parameters,
                "optimizer": report.optimizer,
                "average": report.average,
                "peaks": sorted(report.peaks),
                "sane": all(peak >= 50 << 20 for peak in report.peaks.values()) and report.resident > 50 << 20,
            }
            engine.close()
        return found
