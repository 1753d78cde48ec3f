"""The training engine of one rank: DeepSpeed ZeRO underneath, the step and its failure handling here."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rlhf_core import (
    AdapterWeights,
    Batch,
    ConfigError,
    EngineConfig,
    FittedBudget,
    FittedTokens,
    Loss,
    MemoryMeter,
    MemoryReport,
    ModelOutputs,
    PendingSave,
    RandomState,
    RewardScale,
    StepReport,
    TokenPass,
    TrainCapabilities,
    Trial,
    WeightSource,
    accumulate,
    adapters_off,
    learning_rate,
    measured_scale,
    optimizer_memory_to_come,
    score_in_micro_batches,
    try_model,
)
from torch import Tensor

from rlhf_train.checkpoint.checkpoint import (
    EngineState,
    Progress,
    load_checkpoint,
    save_checkpoint,
    save_in_background,
)
from rlhf_train.config.checks import check_compatible
from rlhf_train.config.env_vars import env_vars
from rlhf_train.config.options import ZeroConfig, deepspeed_config
from rlhf_train.memory import PhaseMemory
from rlhf_train.model.build import build_module, group_with_common_rows, wrap_module
from rlhf_train.model.load import gathered
from rlhf_train.model.optimizers import set_learning_rate
from rlhf_train.model.role_model import release_engine
from rlhf_train.offload import move_engine
from rlhf_train.parallel.ranks import TrainingRanks, join_training_ranks
from rlhf_train.step import StepReports, drop_gradients, update_weights
from rlhf_train.weights.average import AverageWeights
from rlhf_train.weights.export import export_adapters, export_model
from rlhf_train.weights.source import ZeroWeights

_LOG = logging.getLogger(__name__)


class DeepSpeedEngine:
    """`rlhf_core.TrainEngine` for all four roles, one rank of it per process.

    Rank and world size come from the environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT); with
    none of them set the engine is a single rank. Every rank makes the same calls in the same order. A process may
    hold several engines of the same group, and stays in that group until it exits.

    >>> engine = DeepSpeedEngine(EngineConfig(model="run/model", optimizer=OptimizerConfig()))   # doctest: +SKIP
    >>> engine.step(batch, loss).loss                                                            # doctest: +SKIP

    Raises:
        ConfigError: an unknown option (see ZeroConfig), settings that exclude each other, or no such model.
    """

    options_type = ZeroConfig
    """What its `options` hold, for those who show or check them."""

    env_vars = staticmethod(env_vars)

    @staticmethod
    def capabilities(config: EngineConfig) -> TrainCapabilities:
        """See TrainEngine. A 4-bit policy cannot send adapters alone: the receivers hold other weights."""
        zero = ZeroConfig.of(config)
        check_compatible(config, zero)
        adapted = config.trained and config.lora is not None
        return TrainCapabilities(
            adapter_weights=adapted and config.quantize is None,
            scores_without_adapters=adapted,
            background_save=True,
            average=config.average_decay is not None,
            memory_report=True,
            measures_micro_batches=True,
            several_ranks=True,
            ranks_together=math.lcm(config.sequence_parallel_size, zero.autotp_size, zero.zero_hpz_partition_size),
        )

    def __init__(self, config: EngineConfig) -> None:
        zero = ZeroConfig.of(config)
        check_compatible(config, zero)
        self.config = config
        self.zero = zero
        self.ranks: TrainingRanks = join_training_ranks(config, timeout_s=zero.timeout_s)
        on_cuda = config.device.startswith("cuda")
        self.device = torch.device("cuda", self.ranks.info.local_rank) if on_cuda else torch.device("cpu")
        settings = deepspeed_config(config, zero, world_size=self.ranks.size)
        self._replays = config.routing_replay
        self._module: Any = build_module(config, zero, settings, ranks=self.ranks, replay=self._replays)
        self._deepspeed: Any = wrap_module(self._module, config, zero, settings, device=self.device)
        self.trial: Trial = self._try_model()
        """How the model's outputs are had, as its trial found it."""
        self.packing: bool = self.trial.packing
        """Whether rows run unpadded, with shared prompts run once."""
        self._sequence = group_with_common_rows(self.model, config, zero, ranks=self.ranks)
        self._average = self._start_average()
        self._weights: ZeroWeights | None = None
        self._last_outputs: dict[str, Tensor] = {}
        self._progress = Progress()
        self._reports = StepReports(config, self.ranks)
        self.memory = PhaseMemory(self.device)
        self._random = RandomState(config.seed + self.ranks.info.rank // zero.autotp_size, self.device)
        self._fitted = FittedBudget(
            config, self.ranks, MemoryMeter(self.device), to_come=self._optimizer_memory_to_come
        )
        self._offloaded = False

    def _start_average(self) -> AverageWeights | None:
        if self.config.average_decay is None:
            return None
        return AverageWeights(self.model, self._deepspeed, decay=self.config.average_decay, ranks=self.ranks)

    def _try_model(self) -> Trial:
        """Try the model on a few rows: all ranks together, after sharding, through the root module."""

        def trial(model: torch.nn.Module) -> Trial:
            return try_model(
                model,
                self.config.role,
                packing=self.config.packing,
                agree=lambda fine: self.ranks.max(int(not fine)) == 0,
            )

        run = self._module if self._deepspeed is None else self._deepspeed
        self._module.next_trial = trial
        self._module.eval()
        with torch.no_grad():
            run()
        found: Trial = self._module.trial
        if found.notice and self.ranks.info.rank == 0:
            _LOG.warning("%s (%s): %s", self.config.model, self.config.role, found.notice)
        return found

    @property
    def model(self) -> Any:
        """The Transformers model; under ZeRO-3 its parameters are shards."""
        return self._module.model

    # ------------------------------------------------------------ scoring and stepping

    def score(self, batch: Batch, outputs: Sequence[str] = ("log_probs",)) -> ModelOutputs:
        """See TrainEngine. Ranks may have different numbers of rows, but each at least one."""
        scored = self._raw_scores(batch, outputs)
        if scored.scores is None or (scale := RewardScale.of(self.model)) is None:
            return scored
        return replace(scored, scores=scale.apply(scored.scores))

    def _raw_scores(self, batch: Batch, outputs: Sequence[str]) -> ModelOutputs:
        self._module.eval()
        if self._replays and "log_probs" in outputs and "routed_experts" not in batch:
            outputs = (*outputs, "routed_experts")
        mine, own = self._shared(batch)
        budget = self._fitted.for_scores(self.model, mine, outputs, self._forward)
        with self.memory.phase("score"):
            scored = score_in_micro_batches(
                mine.to(self.device),
                outputs,
                forward=self._forward,
                max_tokens=budget,
                ranks=self.ranks,
            )
        if self._sequence is None:
            return scored
        return scored.of_rows(own, width=batch.token_ids.shape[1])

    def score_without_adapters(self, batch: Batch, outputs: Sequence[str] = ("log_probs",)) -> ModelOutputs:
        """See ScoresWithoutAdapters. All ranks together, as `score`."""
        with adapters_off(self.model):
            return replace(self.score(batch, outputs), routed_experts=None)

    def measure_reward_scale(self, batch: Batch) -> RewardScale:
        """Normalise all later scores by the mean and deviation of the scores of these rows, over all ranks.

        The scale is kept in the model's config, and so in what `export` writes. Losses see raw scores.

        Raises:
            ConfigError: the scores do not differ.
        """
        scores = self._raw_scores(batch, ("scores",)).scores
        if scores is None:
            raise ConfigError(f"the {self.config.role} engine gives no scores; use the role reward")
        scale = measured_scale(scores, self.ranks)
        scale.store(self.model)
        return scale

    def step(self, batch: Batch, loss: Loss) -> StepReport:
        """See TrainEngine. Ranks may have different numbers of rows, but each at least one.

        Raises:
            ConfigError: the engine was made without an optimizer.
            TrainingDivergedError: more than `max_skipped_steps` steps in a row had a non-finite loss or gradient.
        """
        if self.config.optimizer is None:
            raise ConfigError(f"the {self.config.role} engine is frozen; give it an optimizer to train it")
        mine, _ = self._shared(batch)
        if self._progress.steps_frozen < self.zero.freeze_steps:
            return self._frozen_step(batch, mine, loss)
        rate = learning_rate(self.config.optimizer, self._progress.steps_taken)
        set_learning_rate(self._deepspeed, rate)
        self._module.train()
        budget = self._fitted.for_steps(
            self.model, mine, loss, forward=self._forward, backward=self._backward, undo=self._left_as_before()
        )
        with self._random, self.memory.phase("step"):
            done = accumulate(
                mine.to(self.device),
                loss,
                forward=self._forward,
                backward=self._backward,
                max_tokens=budget,
                ranks=self.ranks,
            )
            self._last_outputs = {}
            scale = self._loss_scale()
            if done.finite:
                norm, applied = update_weights(self._deepspeed, self._module, dtype=self.config.dtype)
            else:
                drop_gradients(self._deepspeed)
                norm, applied = math.nan, False
        if not applied:
            # float16 looks for its loss scale by overflowing; that is no sign of divergence until the scale is 1.
            counts = not done.finite or scale <= 1.0
            return self._reports.skipped(batch, done, self._progress, norm=norm, rate=rate, counts=counts)
        self._progress.steps_taken += 1
        self._progress.skipped_in_a_row = 0
        if self._average is not None:
            self._average.update()
        return self._reports.done(batch, done, norm=norm, rate=rate)

    def _frozen_step(self, batch: Batch, mine: Batch, loss: Loss) -> StepReport:
        """A step that changes nothing: losses and metrics, no gradient, no step of the schedule."""
        self._module.eval()
        with torch.no_grad():
            done = accumulate(
                mine.to(self.device),
                loss,
                forward=self._forward,
                backward=lambda total, last: None,
                max_tokens=self._fitted.for_scores(self.model, mine, loss.outputs, self._forward),
                ranks=self.ranks,
            )
        self._last_outputs = {}
        if not done.finite:
            return self._reports.skipped(batch, done, self._progress, norm=math.nan, rate=0.0, counts=True)
        self._progress.steps_frozen += 1
        return self._reports.done(batch, done, norm=0.0, rate=0.0)

    def _shared(self, batch: Batch) -> tuple[Batch, slice]:
        """The rows that this rank runs for its `batch`, and where its own rows are among them."""
        if self._sequence is None:
            return batch, slice(0, batch.rows)
        return self._sequence.share(batch)

    def _forward(self, batch: Batch, fields: Sequence[str]) -> ModelOutputs:
        run = self._module if self._deepspeed is None else self._deepspeed
        self._last_outputs = run(batch=batch, fields=tuple(fields))
        return ModelOutputs(**self._last_outputs)

    def _backward(self, total: Tensor, last: bool) -> None:
        if not total.requires_grad:
            # The loss found nothing to count. The backward pass must run all the same: other ranks wait in it.
            total = total + sum(
                value.masked_fill(torch.ones_like(value, dtype=torch.bool), 0).sum()
                for value in self._last_outputs.values()
            )
        self._deepspeed.set_gradient_accumulation_boundary(last)
        self._deepspeed.backward(total)

    @contextlib.contextmanager
    def _left_as_before(self) -> Iterator[None]:
        """A context for passes that leave no gradient and draw no random number from the engine's stream."""
        try:
            with self._random.lent():
                yield
        finally:
            self._last_outputs = {}
            drop_gradients(self._deepspeed)

    def _optimizer_memory_to_come(self) -> int:
        return optimizer_memory_to_come(getattr(self._deepspeed, "basic_optimizer", None), self.device)

    def fitted_tokens(self) -> Mapping[TokenPass, FittedTokens]:
        """See MeasuresMicroBatches."""
        return self._fitted.found

    def take_fitted_tokens(self, found: Mapping[TokenPass, FittedTokens]) -> None:
        """See MeasuresMicroBatches."""
        self._fitted.take(found)

    def _loss_scale(self) -> float:
        return float(self._deepspeed.optimizer.loss_scale) if self.config.dtype == "float16" else 1.0

    # ------------------------------------------------------------ weights and state

    def weights(self) -> WeightSource:
        """See TrainEngine. All ranks take part in `send_weights`; only one has a sender."""
        if self._weights is None:
            self._weights = ZeroWeights(self.model)
        return self._weights

    def adapter_weights(self) -> WeightSource:
        """See SendsAdapters.

        Raises:
            ConfigError: there are none, or the engine's own weights are not those of the checkpoint (4 bits).
        """
        return AdapterWeights(self.model, gathered=gathered)

    def offload(self) -> None:
        """See TrainEngine."""
        if self.device.type == "cuda" and not self._offloaded:
            with self.memory.phase("offload"):
                move_engine(self._deepspeed, self._module, torch.device("cpu"))
            self._offloaded = True
            self.memory.note_offloaded()

    def reload(self) -> None:
        """See TrainEngine."""
        if self._offloaded:
            move_engine(self._deepspeed, self._module, self.device)
            self._offloaded = False

    def save(self, path: Path) -> None:
        """See TrainEngine. All ranks write into the same directory, so it must be on a file system they share."""
        save_checkpoint(self._trained(), path, self._state(), ranks=self.ranks, stage=self.zero.stage)

    def save_in_background(self, path: Path) -> PendingSave:
        """Like `save`, but training may go on: files are written by a thread, from a copy in host memory.

        The directory is a checkpoint once `wait` of the result has returned; all ranks call it together.
        """
        return save_in_background(self._trained(), path, self._state(), ranks=self.ranks, stage=self.zero.stage)

    def load(self, path: Path) -> None:
        """See TrainEngine. The number of ranks may differ from that of the run that saved it.

        Raises:
            CheckpointError: nothing is there, a file is damaged, or it was written at another stage.
        """
        state = self._state()
        load_checkpoint(self._trained(), path, state, ranks=self.ranks, stage=self.zero.stage)
        self._progress, self._random.state = state.progress, list(state.random)
        self._fitted.take(state.fitted_tokens)

    def _state(self) -> EngineState:
        return EngineState(
            progress=self._progress,
            random=self._random.state,
            average=self._average,
            fitted_tokens=self._fitted.found,
        )

    def export(self, path: Path) -> None:
        """See TrainEngine. Rank 0 writes."""
        export_model(self.model, path, ranks=self.ranks, shard_bytes=self.zero.export_shard_bytes)
        if self.config.lora is not None and self.config.trained:
            export_adapters(self.model, path, self.config.lora, ranks=self.ranks, base=self.config.model)

    def export_average(self, path: Path) -> None:
        """See KeepsAverage. Rank 0 writes.

        Raises:
            ConfigError: the engine keeps no average.
        """
        with self.averaged_weights():
            self.export(path)

    def averaged_weights(self) -> contextlib.AbstractContextManager[None]:
        """A context in which the engine's weights are their moving average: score, export or sync there.

        Raises:
            ConfigError: the engine keeps none.
        """
        if self._average is None:
            raise ConfigError("the engine keeps no average of its weights; set average_decay")
        return self._average.in_place()

    def memory_report(self) -> MemoryReport:
        """Bytes this rank holds now, by what they are for, and the peak of each phase so far."""
        return self.memory.report(self._deepspeed, self._module, self._average)

    def _trained(self) -> Any:
        return self._deepspeed if self.config.optimizer is not None else None

    def close(self) -> None:
        """See TrainEngine. The process stays in its group, which other engines may share."""
        if self._deepspeed is not None:
            release_engine(self._deepspeed, self._module)
        self._deepspeed = None
        self._module = None
        self._average = None
        self._weights = None
        self._last_outputs = {}
