"""The training engine of one process (or `torchrun`'s data-parallel ones), on CPU or CUDA, in plain torch."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rlhf_core import (
    ADAPTER_FOLDER,
    AdapterWeights,
    Batch,
    ConfigError,
    EngineConfig,
    FittedBudget,
    FittedTokens,
    Loss,
    MemoryMeter,
    ModelOutputs,
    ModuleWeights,
    RandomState,
    RewardScale,
    StepReport,
    TokenBudget,
    TokenPass,
    TrainCapabilities,
    TrainingDivergedError,
    Trial,
    WeightSource,
    accumulate,
    adapter_parameters,
    adapters_off,
    fitted_as_values,
    fitted_from_values,
    model_outputs,
    optimizer_memory_to_come,
    score_in_micro_batches,
    try_model,
    write_adapter,
)
from torch import Tensor

from rlhf_algos.torch_engine.checkpoint import load_state, load_weights, save_state, save_weights
from rlhf_algos.torch_engine.model import LoraWeights, TorchOptions, load_model
from rlhf_algos.torch_engine.optimizer import MasterAdamW
from rlhf_algos.torch_engine.ranks import average_gradients, join_ranks, rank_of

_LOG = logging.getLogger(__name__)


class TorchEngine:
    """`rlhf_core.TrainEngine` for all four roles: the whole model in this process.

    >>> engine = TorchEngine(EngineConfig(model="run/model", optimizer=OptimizerConfig()))   # doctest: +SKIP
    >>> engine.step(batch, loss).loss                                                        # doctest: +SKIP

    16-bit training keeps float32 master weights. Under `torchrun` every rank holds the whole model and
    gradients are averaged.
    """

    options_type = TorchOptions
    """What its `options` hold, for those who show or check them."""

    @staticmethod
    def capabilities(config: EngineConfig) -> TrainCapabilities:
        """See TrainEngine. A 4-bit policy cannot send adapters alone: the receivers hold other weights."""
        TorchOptions.of(config)
        adapted = config.trained and config.lora is not None
        return TrainCapabilities(
            adapter_weights=adapted and not config.quantize,
            scores_without_adapters=adapted,
            measures_micro_batches=True,
        )

    def __init__(self, config: EngineConfig) -> None:
        options = TorchOptions.of(config)
        self.config = config
        self.device = torch.device(config.device)
        if self.device.type == "cuda":
            if not torch.cuda.is_available():
                raise ConfigError(f"device {config.device!r} was asked for, but torch sees no CUDA device")
            if self.device.index is None:
                self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(self.device)
        self.ranks = join_ranks(self.device)
        self.model: Any = load_model(config, options).to(self.device)
        self.trial: Trial = try_model(self.model, config.role, packing=config.packing)
        """How the model's outputs are had, as its trial found it."""
        self.packing = self.trial.packing
        """Whether sequences run unpadded, with shared prompts computed once; False where the model cannot."""
        if self.trial.notice and rank_of(self.ranks) == 0:
            _LOG.warning("%s (%s): %s", config.model, config.role, self.trial.notice)
        self._adapters = config.lora if config.trained else None
        self._lora = config.quantize is not None or self._adapters is not None
        self._optimizer = MasterAdamW(self.model.parameters(), config.optimizer) if config.optimizer else None
        self._random = RandomState(config.seed + rank_of(self.ranks), self.device)
        self._fitted = FittedBudget(
            config, self.ranks, MemoryMeter(self.device), to_come=self._optimizer_memory_to_come
        )
        self._skipped_in_a_row = 0

    def score(self, batch: Batch, outputs: Sequence[str] = ("log_probs",)) -> ModelOutputs:
        """See TrainEngine. Scores are normalised where the model's config has a scale (`RewardScale`)."""
        self.model.eval()
        if self.config.routing_replay and "log_probs" in outputs and "routed_experts" not in batch:
            outputs = (*outputs, "routed_experts")
        found = score_in_micro_batches(
            batch.to(self.device),
            outputs,
            forward=self._forward,
            max_tokens=self.scoring_budget(batch, outputs),
            ranks=self.ranks,
        )
        if found.scores is None or (scale := RewardScale.of(self.model)) is None:
            return found
        return replace(found, scores=scale.apply(found.scores))

    def scoring_budget(self, batch: Batch, outputs: Sequence[str] = ("log_probs",)) -> TokenBudget:
        """The tokens of a micro-batch without gradients; the first call finds them by a trial, if need be."""
        self.model.eval()
        return self._fitted.for_scores(self.model, batch, outputs, self._forward)

    def fitted_tokens(self) -> Mapping[TokenPass, FittedTokens]:
        """See MeasuresMicroBatches."""
        return self._fitted.found

    def take_fitted_tokens(self, found: Mapping[TokenPass, FittedTokens]) -> None:
        """See MeasuresMicroBatches."""
        self._fitted.take(found)

    def score_without_adapters(self, batch: Batch, outputs: Sequence[str] = ("log_probs",)) -> ModelOutputs:
        """See ScoresWithoutAdapters."""
        with adapters_off(self.model):
            return replace(self.score(batch, outputs), routed_experts=None)

    def step(self, batch: Batch, loss: Loss) -> StepReport:
        """See TrainEngine.

        Raises:
            ConfigError: the engine was made without an optimizer.
            TrainingDivergedError: more than `max_skipped_steps` steps in a row were not finite.
        """
        if self._optimizer is None:
            raise ConfigError(f"the {self.config.role} engine is frozen; give it an optimizer to train it")
        learning_rate = self._optimizer.learning_rate
        self.model.train()
        budget = self._fitted.for_steps(
            self.model, batch, loss, forward=self._forward, backward=_backward, undo=self._left_as_before()
        )
        with self._random:
            done = accumulate(
                batch.to(self.device),
                loss,
                forward=self._forward,
                backward=_backward,
                max_tokens=budget,
                ranks=self.ranks,
            )
        (tokens,) = self.ranks.sum([batch.tokens])
        if not done.finite:
            return self._skip(done.bad_sample_ids, math.nan, learning_rate)
        average_gradients(self._optimizer.parameters, self.ranks)
        norm = float(self._optimizer.gradient_norm())
        if not math.isfinite(norm):
            everyone = [name for part in self.ranks.gather(batch.sample_ids) for name in part]  # type: ignore
            return self._skip(tuple(everyone), norm, learning_rate)
        self._optimizer.step(norm)
        self._skipped_in_a_row = 0
        return StepReport(
            loss=done.loss,
            grad_norm=norm,
            learning_rate=learning_rate,
            metrics={name: mean.value for name, mean in done.metrics.items()},
            tokens=int(tokens),
        )

    def weights(self) -> WeightSource:
        """See TrainEngine; adapters are merged, 4-bit weights put back to full precision."""
        return LoraWeights(self.model) if self._lora else ModuleWeights(self.model)

    def adapter_weights(self) -> WeightSource:
        """See SendsAdapters.

        Raises:
            ConfigError: there are none, or the engine's own weights are not those of the checkpoint (4 bits).
        """
        return AdapterWeights(self.model)

    def offload(self) -> None:
        """See TrainEngine."""
        self._move(torch.device("cpu"))
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def reload(self) -> None:
        """See TrainEngine."""
        self._move(self.device)

    def save(self, path: Path) -> None:
        """See TrainEngine."""
        rank = rank_of(self.ranks)
        state: dict[str, Any] = {"random": self._random.state, "skipped": self._skipped_in_a_row}
        state["fitted_tokens"] = fitted_as_values(self._fitted.found)
        if rank == 0:
            save_weights(self.model, path)
            state["optimizer"] = self._optimizer.state_dict() if self._optimizer else None
        save_state(state, path, rank=rank)
        self.ranks.max(0)  # nobody goes on before all files are there

    def load(self, path: Path) -> None:
        """See TrainEngine.

        Raises:
            ConfigError: there is no checkpoint in `path`, or it is one of another model.
        """
        load_weights(self.model, path)
        state = load_state(path, rank=rank_of(self.ranks))
        optimizer = load_state(path)["optimizer"]
        if self._optimizer is not None:
            if optimizer is None:
                raise ConfigError(f"the checkpoint in {str(path)!r} was written without an optimizer")
            self._optimizer.load_state_dict(optimizer)
        self._random.state = list(state["random"])
        self._fitted.take(fitted_from_values(state["fitted_tokens"]))
        self._skipped_in_a_row = int(state["skipped"])

    def export(self, path: Path) -> None:
        """See TrainEngine; adapters are merged, 4-bit weights put back to full precision."""
        if rank_of(self.ranks) == 0:
            merged = LoraWeights(self.model).state_dict() if self._lora else None
            self.model.save_pretrained(path, state_dict=merged)
            if self._adapters is not None:
                folder = Path(path) / ADAPTER_FOLDER
                folder.mkdir(exist_ok=True)
                write_adapter(folder, adapter_parameters(self.model), self._adapters, base=self.config.model)
        self.ranks.max(0)

    def close(self) -> None:
        """See TrainEngine."""
        self.model = self._optimizer = None

    def _forward(self, batch: Batch, fields: Sequence[str]) -> ModelOutputs:
        return model_outputs(self.model, batch, fields, replay=self.config.routing_replay)

    def _optimizer_memory_to_come(self) -> int:
        return 0 if self._optimizer is None else optimizer_memory_to_come(self._optimizer.adam, self.device)

    @contextmanager
    def _left_as_before(self) -> Iterator[None]:
        """A context for passes that leave no gradient and draw no random number from the engine's stream."""
        try:
            with self._random.lent():
                yield
        finally:
            if self._optimizer is not None:
                self._optimizer.zero_grad()

    def _move(self, device: torch.device) -> None:
        self.model.to(device)
        if self._optimizer is not None:
            self._optimizer.move(device)

    def _skip(self, names: tuple[str, ...], norm: float, learning_rate: float) -> StepReport:
        """Throw the gradients away; the weights stay as they are."""
        if self._optimizer is not None:
            self._optimizer.zero_grad()
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row > self.config.max_skipped_steps:
            raise TrainingDivergedError(
                f"{self._skipped_in_a_row} training steps in a row had a non-finite loss or gradient (at most "
                f"{self.config.max_skipped_steps} are skipped); last samples: {', '.join(names[:8]) or 'unnamed'}. "
                "Lower the learning rate, or look at these samples"
            )
        return StepReport(
            loss=math.nan, grad_norm=norm, learning_rate=learning_rate, skipped=True, bad_sample_ids=names
        )


def _backward(total: Tensor, last: bool) -> None:
    if total.requires_grad:
        total.backward()
