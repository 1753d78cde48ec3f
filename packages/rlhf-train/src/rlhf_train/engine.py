"""The training engine of one rank: DeepSpeed ZeRO underneath, the step and its failure handling here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rlhf_core import (
    Batch,
    ConfigError,
    EngineConfig,
    Loss,
    ModelOutputs,
    StepReport,
    TrainingDivergedError,
    WeightSource,
    accumulate,
    score_in_micro_batches,
)
from rlhf_core.accumulation import Accumulated
from rlhf_core.random_state import RandomState
from rlhf_core.schedule import learning_rate
from torch import Tensor

from rlhf_train.adapters import add_adapters
from rlhf_train.checkpoint import Progress, export_model, load_checkpoint, save_checkpoint
from rlhf_train.environment import process_environment
from rlhf_train.gradients import (
    build_optimizer,
    drop_gradients,
    set_learning_rate,
    trained_elements,
    unsharded_gradient_norm,
)
from rlhf_train.models import load_model
from rlhf_train.offload import move_engine
from rlhf_train.process_group import TrainingRanks, join_training_ranks
from rlhf_train.role_model import RoleModel, release_engine
from rlhf_train.zero_config import ZeroConfig, check_compatible, deepspeed_config
from rlhf_train.zero_weights import ZeroWeights


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

    process_environment = staticmethod(process_environment)

    def __init__(self, config: EngineConfig) -> None:
        zero = ZeroConfig.from_options(config.options)
        check_compatible(config, zero)
        self.config = config
        self.zero = zero
        self.ranks: TrainingRanks = join_training_ranks(config, timeout_s=zero.timeout_s)
        on_cuda = config.device.startswith("cuda")
        self.device = torch.device("cuda", self.ranks.info.local_rank) if on_cuda else torch.device("cpu")
        settings = deepspeed_config(config, zero, world_size=self.ranks.size)
        sharded = zero.stage == 3
        model = load_model(config, settings if sharded else None)
        if zero.lora is not None and config.optimizer is not None:
            add_adapters(model, zero.lora, seed=config.seed)
        self._module: Any = RoleModel(model, sharded=sharded)
        self._deepspeed: Any = self._wrap(settings)
        if zero.packing:
            self._enable_packing()
        self.packing: bool = self._module.packing
        """Whether rows run unpadded, with shared prompts run once."""
        self._last_outputs: dict[str, Tensor] = {}
        self._progress = Progress()
        self._random = RandomState(config.seed + self.ranks.info.rank, self.device)
        self._offloaded = False

    def _wrap(self, settings: dict[str, Any]) -> Any:
        """DeepSpeed's engine; None for a frozen model that is not sharded, which needs nothing of it."""
        if self.config.optimizer is None and self.zero.stage < 3:
            self._module.to(self.device)
            return None
        import deepspeed

        optimizer = None
        if self.config.optimizer is not None:
            if self.zero.stage < 3:
                self._module.to(self.device)
            # The buffer is allocated at this size, however small the model.
            section = settings["zero_optimization"]
            section["reduce_bucket_size"] = min(section["reduce_bucket_size"], trained_elements(self._module))
            optimizer = build_optimizer(self._module, self.config, on_host=self.zero.offload_optimizer)
        wrapped, *_ = deepspeed.initialize(model=self._module, optimizer=optimizer, config=settings)
        return wrapped

    def _enable_packing(self) -> None:
        """Tried on a few tokens, by all ranks together, so after sharding and through the root."""
        self._module.eval()
        run = self._module if self._deepspeed is None else self._deepspeed
        with torch.no_grad():
            run(batch=None, fields=())

    @property
    def model(self) -> Any:
        """The Transformers model; under ZeRO-3 its parameters are shards."""
        return self._module.model

    # ------------------------------------------------------------ scoring and stepping

    def score(self, batch: Batch, outputs: Sequence[str] = ("log_probs",)) -> ModelOutputs:
        """See TrainEngine. Ranks may have different numbers of rows, but each at least one."""
        self._module.eval()
        return score_in_micro_batches(
            batch.to(self.device),
            outputs,
            forward=self._forward,
            max_tokens=self.config.max_tokens_per_micro_batch,
            ranks=self.ranks,
        )

    def step(self, batch: Batch, loss: Loss) -> StepReport:
        """See TrainEngine. Ranks may have different numbers of rows, but each at least one.

        Raises:
            ConfigError: the engine was made without an optimizer.
            TrainingDivergedError: more than `max_skipped_steps` steps in a row had a non-finite loss or gradient.
        """
        if self.config.optimizer is None:
            raise ConfigError(f"the {self.config.role} engine is frozen; give it an optimizer to train it")
        rate = learning_rate(self.config.optimizer, self._progress.steps_taken)
        set_learning_rate(self._deepspeed, rate)
        self._module.train()
        with self._random:
            done = accumulate(
                batch.to(self.device),
                loss,
                forward=self._forward,
                backward=self._backward,
                max_tokens=self.config.max_tokens_per_micro_batch,
                ranks=self.ranks,
            )
        self._last_outputs = {}
        if not done.finite:
            drop_gradients(self._deepspeed)
            return self._skipped(batch, done, math.nan, rate, done.bad_sample_ids)
        scale = self._loss_scale()
        norm, applied = self._update()
        if not applied:
            return self._skipped(batch, done, norm, rate, self._everyones_ids(batch), scale=scale)
        self._progress.steps_taken += 1
        self._progress.skipped_in_a_row = 0
        return self._report(batch, done, norm, rate)

    def _forward(self, batch: Batch, fields: Sequence[str]) -> ModelOutputs:
        run = self._module if self._deepspeed is None else self._deepspeed
        self._last_outputs = run(batch=batch, fields=tuple(fields))
        return ModelOutputs(**self._last_outputs)

    def _backward(self, total: Tensor, last: bool) -> None:
        if not total.requires_grad:
            # A loss that found nothing to count. The backward pass must still run: its collectives are awaited.
            total = total + sum(
                value.masked_fill(torch.ones_like(value, dtype=torch.bool), 0).sum()
                for value in self._last_outputs.values()
            )
        self._deepspeed.set_gradient_accumulation_boundary(last)
        self._deepspeed.backward(total)

    def _update(self) -> tuple[float, bool]:
        """Optimizer step; the gradient norm before clipping, and whether the weights changed."""
        if self.zero.stage == 0 and self.config.dtype == "float32":
            norm = unsharded_gradient_norm(self._module.parameters())
            if not math.isfinite(norm):
                drop_gradients(self._deepspeed)
                return norm, False
            self._deepspeed.step()
            return norm, True
        try:
            self._deepspeed.step()
        except Exception as error:
            if "loss scale" not in str(error):
                raise
            raise TrainingDivergedError(
                "the loss scale of float16 training is at its minimum and gradients are still not finite; use "
                "bfloat16, or lower the learning rate"
            ) from error
        if self._deepspeed.optimizer.overflow:
            return math.nan, False
        return float(self._deepspeed.get_global_grad_norm()), True

    def _loss_scale(self) -> float:
        return float(self._deepspeed.optimizer.loss_scale) if self.config.dtype == "float16" else 1.0

    def _skipped(
        self, batch: Batch, done: Accumulated, norm: float, rate: float, ids: tuple[str, ...], *, scale: float = 1.0
    ) -> StepReport:
        # float16 looks for its loss scale by overflowing; that is no sign of divergence until the scale is 1.
        if scale <= 1.0:
            self._progress.skipped_in_a_row += 1
        if self._progress.skipped_in_a_row > self.config.max_skipped_steps:
            what = "loss" if not done.finite else "gradient"
            raise TrainingDivergedError(
                f"{self._progress.skipped_in_a_row} optimizer steps in a row had a non-finite loss or gradient "
                f"(allowed: {self.config.max_skipped_steps}); the last one a {what}, from {', '.join(ids)}. "
                "Lower the learning rate, or look at these samples"
            )
        return self._report(batch, done, norm, rate, skipped=True, ids=ids)

    def _report(
        self,
        batch: Batch,
        done: Accumulated,
        norm: float,
        rate: float,
        *,
        skipped: bool = False,
        ids: tuple[str, ...] = (),
    ) -> StepReport:
        (tokens,) = self.ranks.sum([batch.tokens])
        return StepReport(
            loss=done.loss,
            grad_norm=norm,
            learning_rate=rate,
            metrics={name: mean.value for name, mean in done.metrics.items()},
            skipped=skipped,
            bad_sample_ids=ids,
            tokens=int(tokens),
        )

    def _everyones_ids(self, batch: Batch) -> tuple[str, ...]:
        return tuple(name for part in self.ranks.gather(batch.sample_ids) for name in part)  # type: ignore

    # ------------------------------------------------------------ weights and state

    def weights(self) -> WeightSource:
        """See TrainEngine. All ranks take part in `send_weights`; only one has a sender."""
        return ZeroWeights(self.model)

    def offload(self) -> None:
        """See TrainEngine."""
        if self.device.type == "cuda" and not self._offloaded:
            move_engine(self._deepspeed, self._module, torch.device("cpu"))
            self._offloaded = True

    def reload(self) -> None:
        """See TrainEngine."""
        if self._offloaded:
            move_engine(self._deepspeed, self._module, self.device)
            self._offloaded = False

    def save(self, path: Path) -> None:
        """See TrainEngine. All ranks write into the same directory, so it must be on a file system they share."""
        save_checkpoint(
            self._trained(),
            path,
            ranks=self.ranks,
            stage=self.zero.stage,
            progress=self._progress,
            random=self._random.state,
        )

    def load(self, path: Path) -> None:
        """See TrainEngine.

        Raises:
            ConfigError: nothing is there, or it was written by another number of ranks or another stage.
        """
        self._progress, random = load_checkpoint(self._trained(), path, ranks=self.ranks, stage=self.zero.stage)
        self._random.state = list(random)

    def export(self, path: Path) -> None:
        """See TrainEngine. Rank 0 writes."""
        export_model(self.model, path, ranks=self.ranks, shard_bytes=self.zero.export_shard_bytes)

    def _trained(self) -> Any:
        return self._deepspeed if self.config.optimizer is not None else None

    def close(self) -> None:
        """See TrainEngine. The process stays in its group, which other engines may share."""
        if self._deepspeed is not None:
            release_engine(self._deepspeed, self._module)
        self._deepspeed = None
        self._module = None
        self._last_outputs = {}
