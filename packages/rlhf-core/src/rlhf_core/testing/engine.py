"""Conformance kit for training engines: subclass, give a factory, run pytest.

    from rlhf_core.testing.engine import TrainEngineConformance

    class TestMyEngine(TrainEngineConformance):
        @pytest.fixture(scope="class")
        @classmethod
        def engine_factory(cls):
            return MyEngine

The checks run one rank on a tiny float32 model. What an engine can do beyond `TrainEngine` is checked where its
capabilities say so. Engines of several ranks add their own check that the result does not depend on the number of
ranks; the rows and losses of `rlhf_core.testing.engine_ground` serve there too.
"""
# ruff: noqa: D102 - the name of each check is its sentence

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from rlhf_core.errors import TrainingDivergedError, UserError
from rlhf_core.interfaces.engine_config import OptimizerConfig, Role
from rlhf_core.interfaces.loss import Loss
from rlhf_core.interfaces.training import StepReport, TrainEngine
from rlhf_core.testing.engine_ground import (
    SMOOTH,
    faulty_loss,
    forward,
    gap,
    poisoned,
    received_weights,
    rows,
    supervised_loss,
)
from rlhf_core.testing.engine_optional import OptionalChecks


class TrainEngineConformance(OptionalChecks):
    """What every training engine must do."""

    # ------------------------------------------------------------ scoring

    def test_it_is_a_train_engine(self, make: Callable[..., TrainEngine]) -> None:
        assert isinstance(make(optimizer=SMOOTH), TrainEngine)

    @pytest.mark.parametrize("max_tokens", [1, 24, 4096])
    def test_scores_are_those_of_a_forward_pass(
        self, make: Callable[..., TrainEngine], model_path: str, max_tokens: int
    ) -> None:
        batch = replace(rows(), temperature=0.7)
        outputs = make(role="reference", max_tokens_per_micro_batch=max_tokens).score(
            batch, ("log_probs", "entropy")
        )
        log_probs, entropy = forward(model_path, batch)
        assert outputs.log_probs is not None
        assert outputs.entropy is not None
        assert outputs.log_probs.shape == outputs.entropy.shape == batch.token_ids.shape
        assert outputs.log_probs.device.type == "cpu"
        assert not outputs.log_probs.requires_grad
        assert (outputs.log_probs - log_probs).abs().max() < self.tolerance
        assert (outputs.entropy - entropy).abs().max() < self.tolerance

    @pytest.mark.parametrize(("role", "field"), [("critic", "values"), ("reward", "scores")])
    def test_scalar_roles_give_values_and_scores(
        self, make: Callable[..., TrainEngine], role: Role, field: str
    ) -> None:
        batch = rows()
        optimizer = SMOOTH if role == "critic" else None
        (whole, cut) = (
            getattr(
                make(role=role, optimizer=optimizer, max_tokens_per_micro_batch=size).score(batch, (field,)), field
            )
            for size in (4096, 1)
        )
        expected = batch.token_ids.shape if field == "values" else batch.token_ids.shape[:1]
        assert whole.shape == expected
        assert (whole - cut).abs().max() < self.tolerance
        counted = whole[batch.response_mask] if field == "values" else whole
        assert counted.std() > 0
        if field == "values":
            assert (whole[~batch.response_mask] == 0).all()

    # ------------------------------------------------------------ stepping

    def test_steps_reduce_a_supervised_loss(self, make: Callable[..., TrainEngine]) -> None:
        engine = make(optimizer=OptimizerConfig(learning_rate=5e-3))
        reports = [engine.step(rows(), Loss(function=supervised_loss)) for _ in range(6)]
        assert reports[-1].loss < reports[0].loss - 0.5
        assert not any(report.skipped for report in reports)
        assert all(math.isfinite(report.grad_norm) and report.grad_norm > 0 for report in reports)
        assert reports[0].learning_rate == pytest.approx(5e-3)
        assert reports[0].tokens == rows().tokens
        assert reports[0].metrics["nll"] == pytest.approx(reports[0].loss, rel=1e-5)

    def test_the_reported_loss_is_the_global_mean(self, make: Callable[..., TrainEngine], model_path: str) -> None:
        batch = rows()
        report = make(optimizer=SMOOTH, max_tokens_per_micro_batch=1).step(batch, Loss(function=supervised_loss))
        log_probs, _ = forward(model_path, batch)
        assert report.loss == pytest.approx(float(-log_probs.sum() / batch.response_mask.sum()), abs=1e-4)

    @pytest.mark.parametrize("rows_per_unit", [1, 2])
    def test_the_step_does_not_depend_on_the_micro_batch_size(
        self, make: Callable[..., TrainEngine], rows_per_unit: int
    ) -> None:
        batch = replace(rows(), rows_per_unit=rows_per_unit)
        results: list[tuple[StepReport, dict[str, Tensor]]] = []
        for max_tokens in (4096, 24, 1):
            engine = make(optimizer=SMOOTH, max_tokens_per_micro_batch=max_tokens)
            report = engine.step(batch, Loss(function=supervised_loss))
            results.append((report, received_weights(engine)))
        (whole, weights), *others = results
        for report, others_weights in others:
            assert report.loss == pytest.approx(whole.loss, rel=1e-5)
            assert report.grad_norm == pytest.approx(whole.grad_norm, rel=1e-4)
            assert gap(weights, others_weights) < 1e-5

    def test_gradients_are_clipped_to_their_global_norm(self, make: Callable[..., TrainEngine]) -> None:
        free, tight = (make(optimizer=replace(SMOOTH, max_grad_norm=norm)) for norm in (0.0, 1e-3))
        start = received_weights(free)
        reports = [engine.step(rows(), Loss(function=supervised_loss)) for engine in (free, tight)]
        assert reports[0].grad_norm == pytest.approx(reports[1].grad_norm, rel=1e-4), "the norm before clipping"
        assert reports[0].grad_norm > 1e-3
        assert gap(start, received_weights(tight)) < 0.1 * gap(start, received_weights(free))

    def test_the_learning_rate_warms_up(self, make: Callable[..., TrainEngine]) -> None:
        engine = make(optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=3))
        rates = [engine.step(rows(), Loss(function=supervised_loss)).learning_rate for _ in range(5)]
        assert rates == sorted(rates)
        assert rates[0] < 1e-3
        assert rates[-1] == pytest.approx(1e-3)

    def test_a_frozen_engine_refuses_to_step(self, make: Callable[..., TrainEngine]) -> None:
        with pytest.raises(UserError):
            make(role="reference").step(rows(), Loss(function=supervised_loss))

    # ------------------------------------------------------------ non-finite steps

    @pytest.mark.parametrize("fault", ["loss", "gradient"])
    def test_a_non_finite_step_is_skipped_and_reported(self, make: Callable[..., TrainEngine], fault: str) -> None:
        engine = make(optimizer=SMOOTH, max_tokens_per_micro_batch=1)
        before = received_weights(engine)
        report = engine.step(poisoned(), Loss(function=faulty_loss, config=fault))
        assert report.skipped
        assert gap(before, received_weights(engine)) == 0
        if fault == "loss":
            assert "row-1" in report.bad_sample_ids
        good = engine.step(rows(), Loss(function=supervised_loss))
        assert not good.skipped
        assert math.isfinite(good.loss)
        fresh = make(optimizer=SMOOTH, max_tokens_per_micro_batch=1)
        fresh.step(rows(), Loss(function=supervised_loss))
        assert gap(received_weights(fresh), received_weights(engine)) < 1e-5, "the skipped step left a trace"

    def test_too_many_skipped_steps_in_a_row_stop_the_run(self, make: Callable[..., TrainEngine]) -> None:
        engine = make(optimizer=SMOOTH, max_skipped_steps=2)
        bad = Loss(function=faulty_loss, config="loss")
        for _ in range(2):  # a good step starts the count afresh
            assert engine.step(poisoned(), bad).skipped
            assert not engine.step(rows(), Loss(function=supervised_loss)).skipped
        assert engine.step(poisoned(), bad).skipped
        with pytest.raises(TrainingDivergedError, match="row-1"):
            list(map(engine.step, [poisoned()] * 2, [bad] * 2))

    # ------------------------------------------------------------ weights, checkpoints, export

    def test_weights_travel_under_their_checkpoint_names(
        self, make: Callable[..., TrainEngine], model_path: str
    ) -> None:
        from safetensors.torch import load_file

        received = received_weights(make(optimizer=SMOOTH))
        stored = load_file(Path(model_path) / "model.safetensors")
        assert set(received) == set(stored)
        assert gap(received, stored) == 0

    def test_save_and_load_continue_bit_for_bit(self, make: Callable[..., TrainEngine], tmp_path: Path) -> None:
        optimizer = OptimizerConfig(learning_rate=1e-3, schedule="cosine", warmup_steps=1, total_steps=8)
        loss = Loss(function=supervised_loss)
        first = make(optimizer=optimizer)
        for seed in range(2):
            first.step(rows(seed), loss)
        first.save(tmp_path)
        expected = [first.step(rows(seed), loss) for seed in (2, 3)]
        second = make(optimizer=optimizer)
        second.load(tmp_path)
        found = [second.step(rows(seed), loss) for seed in (2, 3)]
        assert [(r.loss, r.grad_norm, r.learning_rate) for r in found] == [
            (r.loss, r.grad_norm, r.learning_rate) for r in expected
        ]
        assert gap(received_weights(first), received_weights(second)) == 0

    def test_export_loads_with_transformers(self, make: Callable[..., TrainEngine], tmp_path: Path) -> None:
        engine = make(optimizer=OptimizerConfig(learning_rate=1e-2))
        engine.step(rows(), Loss(function=supervised_loss))
        engine.export(tmp_path)
        scored = engine.score(rows()).log_probs
        log_probs, _ = forward(str(tmp_path), rows())
        assert scored is not None
        assert (scored - log_probs).abs().max() < self.tolerance

    def test_offload_and_reload_change_nothing(self, make: Callable[..., TrainEngine]) -> None:
        engine, other = make(optimizer=SMOOTH), make(optimizer=SMOOTH)
        loss = Loss(function=supervised_loss)
        for one in (engine, other):
            one.step(rows(), loss)
        engine.offload()
        engine.reload()
        assert engine.step(rows(1), loss).loss == pytest.approx(other.step(rows(1), loss).loss, rel=1e-6)
