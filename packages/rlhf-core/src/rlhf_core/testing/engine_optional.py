"""Checks of what a training engine states in its capabilities, and of the settings that it may refuse."""
# ruff: noqa: D102 - the name of each check is its sentence

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.adapters.lora import LoraConfig
from rlhf_core.errors import ConfigError
from rlhf_core.interfaces.engine_config import EngineConfig, OptimizerConfig
from rlhf_core.interfaces.loss import Loss
from rlhf_core.interfaces.training import (
    KeepsAverage,
    MeasuresMicroBatches,
    ReportsMemory,
    SavesInBackground,
    ScoresWithoutAdapters,
    SendsAdapters,
    TrainCapabilities,
    TrainEngine,
)
from rlhf_core.testing.engine_ground import (
    SMOOTH,
    EngineGround,
    gap,
    received,
    received_weights,
    rows,
    supervised_loss,
)

Make = Callable[..., TrainEngine]
LOSS = Loss(function=supervised_loss)
FAST = OptimizerConfig(learning_rate=1e-2)
PROTOCOLS = {
    "adapter_weights": SendsAdapters,
    "scores_without_adapters": ScoresWithoutAdapters,
    "background_save": SavesInBackground,
    "average": KeepsAverage,
    "memory_report": ReportsMemory,
    "measures_micro_batches": MeasuresMicroBatches,
}


class OptionalChecks(EngineGround):
    """Each check is skipped for an engine that does not state the capability."""

    @pytest.fixture
    def statement(self, make: Make, model_path: str, scalar_path: str) -> Callable[..., TrainCapabilities]:
        """`statement(**fields_of_EngineConfig)` gives the capabilities of such a policy; ConfigError if refused."""
        engine = make(role="reference")

        def state(**given: Any) -> TrainCapabilities:
            return engine.capabilities(self.engine_config(model_path, scalar_path, **given))

        return state

    def test_every_capability_has_its_protocol(self) -> None:
        without_a_method = {"several_ranks", "ranks_together"}
        assert {item.name for item in fields(TrainCapabilities)} == set(PROTOCOLS) | without_a_method

    def test_what_it_states_it_has(self, make: Make) -> None:
        engine = make(optimizer=SMOOTH)
        stated = engine.capabilities(EngineConfig(model="m", **{**self.settings, "optimizer": SMOOTH}))
        assert stated.ranks_together == 1, "a lone rank shares nothing"
        for name, protocol in PROTOCOLS.items():
            assert isinstance(engine, protocol) or not getattr(stated, name), name

    def test_an_option_that_it_does_not_know_is_refused(self, statement: Callable[..., TrainCapabilities]) -> None:
        with pytest.raises(ConfigError, match="no_such_option"):
            statement(optimizer=SMOOTH, options={"no_such_option": 1})

    def test_an_average_is_kept_or_refused(
        self, make: Make, statement: Callable[..., TrainCapabilities], tmp_path: Path
    ) -> None:
        given = {"optimizer": FAST, "average_decay": 0.75}
        if not _honours(statement, given).average:
            pytest.fail("the engine takes average_decay, but does not state that it keeps an average")
        engine = make(**given)
        assert isinstance(engine, KeepsAverage)
        average = received_weights(engine)
        for seed in range(2):
            engine.step(rows(seed), LOSS)
            now = received_weights(engine)
            average = {name: 0.75 * average[name] + 0.25 * now[name] for name in average}
        engine.export_average(tmp_path)
        assert gap(average, _exported(tmp_path)) < 1e-6
        assert gap(now, received_weights(engine)) == 0, "the weights must come back"
        assert gap(now, average) > 1e-4

    def test_adapters_can_travel_alone(self, make: Make, statement: Callable[..., TrainCapabilities]) -> None:
        given = {"optimizer": FAST, "lora": LoraConfig(rank=4, alpha=8.0)}
        if not _honours(statement, given).adapter_weights:
            pytest.skip("the engine does not state that it sends adapters alone")
        pytest.importorskip("peft")
        assert not statement(optimizer=FAST).adapter_weights, "there are none without lora"
        engine = make(**given)
        assert isinstance(engine, SendsAdapters)
        start = received_weights(engine)
        engine.step(rows(), LOSS)
        whole, source = received_weights(engine), engine.adapter_weights()
        manifest = source.manifest(3)
        assert (manifest.version, manifest.base_version) == (3, 0)
        assert manifest.adapter is not None
        assert (manifest.adapter.rank, manifest.adapter.alpha) == (4, 8.0)
        found = received(source)
        layers = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in found}
        for layer in layers:
            a, b = (found[f"base_model.model.{layer}.lora_{half}.weight"] for half in "AB")
            merged = start[f"{layer}.weight"] + 2.0 * b @ a
            torch.testing.assert_close(merged, whole[f"{layer}.weight"], atol=1e-6, rtol=1e-5)
        changed = {name for name in start if not torch.equal(start[name], whole[name])}
        assert changed == {f"{layer}.weight" for layer in layers}

    def test_with_its_adapters_off_it_is_the_reference(
        self, make: Make, statement: Callable[..., TrainCapabilities]
    ) -> None:
        given = {"optimizer": FAST, "lora": LoraConfig(rank=4, alpha=8.0)}
        if not _honours(statement, given).scores_without_adapters:
            pytest.skip("the engine does not state that it scores without its adapters")
        pytest.importorskip("peft")
        assert not statement(optimizer=FAST).scores_without_adapters, "there are none without lora"
        engine, alike, reference = make(**given), make(**given), make(role="reference")
        assert isinstance(engine, ScoresWithoutAdapters)
        for one in (engine, alike):
            one.step(rows(), LOSS)
        with_adapters = engine.score(rows(1)).log_probs
        found = engine.score_without_adapters(rows(1)).log_probs
        expected = reference.score(rows(1)).log_probs
        assert found is not None
        assert expected is not None
        assert with_adapters is not None
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
        assert float((with_adapters - found).abs().max()) > 1e-4, "the adapters have learnt something"
        again = engine.score(rows(1)).log_probs
        assert again is not None
        assert torch.equal(again, with_adapters), "the adapters are on again"
        first, second = engine.step(rows(1), LOSS), alike.step(rows(1), LOSS)
        assert (first.loss, first.grad_norm) == (second.loss, second.grad_norm)
        assert gap(received_weights(engine), received_weights(alike)) == 0, "and are trained as before"

    def test_a_background_save_is_of_the_moment_it_was_asked_for(
        self, make: Make, statement: Callable[..., TrainCapabilities], tmp_path: Path
    ) -> None:
        if not statement(optimizer=FAST).background_save:
            pytest.skip("the engine does not state that it saves in the background")
        first = make(optimizer=FAST)
        assert isinstance(first, SavesInBackground)
        first.step(rows(), LOSS)
        saved = received_weights(first)
        pending = first.save_in_background(tmp_path)
        expected = first.step(rows(1), LOSS)
        pending.wait()
        pending.wait()
        assert pending.written
        second = make(optimizer=FAST)
        second.load(tmp_path)
        assert gap(saved, received_weights(second)) == 0
        found = second.step(rows(1), LOSS)
        assert (found.loss, found.grad_norm) == (expected.loss, expected.grad_norm)
        assert gap(received_weights(first), received_weights(second)) == 0

    def test_memory_is_counted_by_what_it_is_for(
        self, make: Make, statement: Callable[..., TrainCapabilities]
    ) -> None:
        if not statement(optimizer=FAST).memory_report:
            pytest.skip("the engine does not state that it reports its memory")
        engine = make(optimizer=FAST)
        assert isinstance(engine, ReportsMemory)
        engine.step(rows(), LOSS)
        report = engine.memory_report()
        weights = sum(tensor.numel() * tensor.element_size() for tensor in received_weights(engine).values())
        assert report.parameters >= weights
        assert report.optimizer >= 2 * weights, "two moments for each weight"
        assert report.average == 0
        assert report.peaks["step"] >= weights
        assert all(size >= 0 for size in report.sizes.values())

    def test_a_micro_batch_size_that_it_finds_is_as_good_as_a_written_one(
        self, make: Make, statement: Callable[..., TrainCapabilities], tmp_path: Path
    ) -> None:
        given: dict[str, Any] = {"optimizer": FAST, "max_tokens_per_micro_batch": "auto", "longest_row": 40}
        if not _honours(statement, given).measures_micro_batches:
            pytest.fail("the engine takes max_tokens_per_micro_batch auto, but does not state that it measures")
        found = make(**given)
        assert isinstance(found, MeasuresMicroBatches)
        assert not found.fitted_tokens()
        scores, reports = found.score(rows()).log_probs, [found.step(rows(), LOSS)]
        fitted = found.fitted_tokens()
        assert set(fitted) == {"score", "step"}
        assert fitted["step"].tokens >= 40
        assert fitted["step"].per_token > fitted["score"].per_token > 0, "gradients take more"
        found.save(tmp_path)
        reports.append(found.step(rows(1), LOSS))
        assert found.fitted_tokens() == fitted, "once and for all"

        written = make(optimizer=FAST, max_tokens_per_micro_batch=fitted["step"].tokens)
        assert isinstance(written, MeasuresMicroBatches)
        other_scores, others = written.score(rows()).log_probs, [written.step(rows(s), LOSS) for s in range(2)]
        assert scores is not None
        assert other_scores is not None
        assert torch.equal(scores, other_scores)
        assert reports == others
        assert gap(received_weights(found), received_weights(written)) == 0
        assert not written.fitted_tokens()

        resumed = make(**given)
        assert isinstance(resumed, MeasuresMicroBatches)
        resumed.load(tmp_path)
        assert resumed.fitted_tokens() == fitted
        assert resumed.step(rows(1), LOSS) == reports[1]


def _honours(statement: Callable[..., TrainCapabilities], given: dict[str, Any]) -> TrainCapabilities:
    try:
        return statement(**given)
    except ConfigError as refusal:
        if not any(name in str(refusal) for name in given):
            pytest.fail(f"the refusal names none of the settings {', '.join(given)}: {refusal}")
        pytest.skip(f"the engine refuses: {refusal}")


def _exported(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}
