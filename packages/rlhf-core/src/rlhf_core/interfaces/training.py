"""The training seam: what a training loop asks of a policy, critic, reference or reward engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from rlhf_core.data.batch import Batch
from rlhf_core.interfaces.engine_config import EngineConfig
from rlhf_core.interfaces.loss import Loss, ModelOutputs
from rlhf_core.weight_sync.source import WeightSource


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """What one optimizer step did; the same on all ranks."""

    loss: float
    grad_norm: float
    """Global gradient norm before clipping; NaN if the step was skipped before it was known."""
    learning_rate: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    skipped: bool = False
    """True if a loss or gradient was not finite and the weights stayed as they were."""
    bad_sample_ids: tuple[str, ...] = ()
    tokens: int = 0
    """Tokens that went through the model, over all ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReport:
    """Bytes that one rank holds. A tensor counts where it is, on the accelerator or in host memory."""

    parameters: int
    """Weights of the model: this rank's shards, and what every rank holds in full."""
    gradients: int
    optimizer: int
    """Moments and float32 master weights."""
    average: int
    """Moving average of the weights."""
    resident: int
    """Resident host memory of the process now."""
    peaks: Mapping[str, int] = field(default_factory=dict)
    """Highest use during each phase (`step`, `score`, `offload`): accelerator memory on CUDA, resident memory on
    the CPU."""
    device: int = 0
    """Accelerator memory in use now, of all that this process holds there; 0 on the CPU."""
    after_offload: int | None = None
    """Accelerator memory that stayed in use after the last `offload`; None if there was none."""

    @property
    def sizes(self) -> dict[str, int]:
        """All numbers in bytes under flat names, peaks as `peak_<phase>`."""
        parts = ("parameters", "gradients", "optimizer", "average", "resident", "device")
        sizes = {name: getattr(self, name) for name in parts}
        sizes |= {f"peak_{phase}": peak for phase, peak in self.peaks.items()}
        return sizes if self.after_offload is None else {**sizes, "after_offload": self.after_offload}

    def metrics(self, prefix: str = "memory") -> dict[str, float]:
        """The sizes in GiB, for a log.

        >>> one = MemoryReport(parameters=1 << 30, gradients=0, optimizer=0, average=0, resident=0)
        >>> one.metrics("policy")["policy/parameters_gib"]
        1.0
        """
        return {f"{prefix}/{name}_gib": size / 2**30 for name, size in self.sizes.items()}


TokenPass = Literal["step", "score"]
"""A pass with gradients, or one without."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FittedTokens:
    """How many tokens fit a micro-batch, and what this was found from: that of the rank where the fewest fit."""

    tokens: int
    fixed: int
    """Bytes of a pass whatever its tokens."""
    per_token: int
    """Bytes that each token adds."""
    free: int
    """Bytes that nobody used, of the device or of this rank's share of it."""
    conditions: str = ""
    """The ranks, devices and settings under which the number holds."""

    def __str__(self) -> str:
        return (
            f"micro-batches of {self.tokens:,} tokens: {self.fixed / 2**20:,.0f} MiB fixed + "
            f"{self.per_token / 2**10:,.1f} KiB a token, {self.free / 2**20:,.0f} MiB free on the smallest rank"
        )


def fitted_as_values(found: Mapping[TokenPass, FittedTokens]) -> dict[str, dict[str, Any]]:
    """What trials have found, as plain values for a checkpoint."""
    return {kind: asdict(fitted) for kind, fitted in found.items()}


def fitted_from_values(values: Mapping[Any, Mapping[str, Any]]) -> dict[TokenPass, FittedTokens]:
    """Inverse of `fitted_as_values`."""
    return {kind: FittedTokens(**fitted) for kind, fitted in values.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainCapabilities:
    """What an engine can do beyond one rank of `TrainEngine`. What needs a method has a Protocol with it."""

    adapter_weights: bool = False
    """It can send its adapters alone: `SendsAdapters`."""
    scores_without_adapters: bool = False
    """It can score with its adapters off, as the model that they were put into: `ScoresWithoutAdapters`."""
    background_save: bool = False
    """It can save while training goes on: `SavesInBackground`."""
    average: bool = False
    """It keeps a moving average of its weights: `KeepsAverage`."""
    memory_report: bool = False
    """It says what it holds in memory: `ReportsMemory`."""
    measures_micro_batches: bool = False
    """It can find out how many tokens fit a micro-batch: `MeasuresMicroBatches`."""
    several_ranks: bool = False
    """Processes that each make one, told of each other by the usual variables (`RANK`, ...), train one model."""
    ranks_together: int = 1
    """Consecutive ranks, in groups of so many, that must sit on one host: they share rows, layers or shards."""


@runtime_checkable
class TrainEngine(Protocol):
    """One rank of a training engine. Constructed as `Engine(config: EngineConfig)`; ready when that returns.

    With several ranks, every rank makes the same calls in the same order, each with its own rows. A class whose
    processes need variables set before they start also has `env_vars`; see `rlhf_core.NeedsEnvVars`.
    """

    @staticmethod
    def capabilities(config: EngineConfig) -> TrainCapabilities:
        """What an engine of this configuration can do. Loads nothing and may be called in any process.

        Raises:
            ConfigError: the engine cannot honour a field of `config`, or does not know one of its options.
        """
        ...

    def score(self, batch: Batch, outputs: Sequence[str] = ("log_probs",)) -> ModelOutputs:
        """Run the model forward, without dropout. The outputs are CPU tensors in the order of the rows."""
        ...

    def step(self, batch: Batch, loss: Loss) -> StepReport:
        """Take one optimizer step over the batch, in as many micro-batches as memory needs."""
        ...

    def weights(self) -> WeightSource:
        """The current weights under their checkpoint names, for a sync."""
        ...

    def offload(self) -> None:
        """Move the engine's state off the accelerator; a no-op on the CPU."""
        ...

    def reload(self) -> None:
        """Bring the state back to the accelerator, after `offload`."""
        ...

    def save(self, path: Path) -> None:
        """Write everything needed to continue bit for bit into the existing directory `path`."""
        ...

    def load(self, path: Path) -> None:
        """Continue from what `save` wrote."""
        ...

    def export(self, path: Path) -> None:
        """Write the model as a Transformers directory (no tokenizer)."""
        ...

    def close(self) -> None:
        """Release memory and process groups; may be called twice."""
        ...


@runtime_checkable
class SendsAdapters(Protocol):
    """An engine that can send its adapters alone, a small part of all weights."""

    def adapter_weights(self) -> WeightSource:
        """The adapters, for receivers that hold the weights that this engine was loaded with."""
        ...


@runtime_checkable
class ScoresWithoutAdapters(Protocol):
    """An engine with adapters that can stand in for the frozen model under them: a policy for its reference."""

    def score_without_adapters(self, batch: Batch, outputs: Sequence[str] = ("log_probs",)) -> ModelOutputs:
        """Like `TrainEngine.score`, with the adapters off; what is trained and how stays as it is."""
        ...


class PendingSave(Protocol):
    """A save under way."""

    @property
    def written(self) -> bool:
        """Whether this rank's files are on disk."""
        ...

    def wait(self) -> None:
        """Block until the checkpoint is complete; all ranks together, any number of times.

        Raises:
            RLHFError: a rank could not write its files; the directory is then no checkpoint.
        """
        ...


@runtime_checkable
class SavesInBackground(Protocol):
    """An engine that can be trained on while its checkpoint is written."""

    def save_in_background(self, path: Path) -> PendingSave:
        """Like `TrainEngine.save` of the state at this moment; complete when `wait` of the result has returned."""
        ...


@runtime_checkable
class KeepsAverage(Protocol):
    """An engine that keeps a moving average of its weights (`EngineConfig.average_decay`)."""

    def export_average(self, path: Path) -> None:
        """Like `TrainEngine.export`, of the average; the weights themselves stay as they are."""
        ...


@runtime_checkable
class ReportsMemory(Protocol):
    """An engine that says what its rank holds in memory."""

    def memory_report(self) -> MemoryReport:
        """Bytes that the rank holds now, and the peak of each phase so far."""
        ...


@runtime_checkable
class MeasuresMicroBatches(Protocol):
    """An engine that takes `max_tokens_per_micro_batch: auto`.

    Before its first step, and before its first scoring, it tries passes of the longest rows there can be, and takes
    the most tokens that fit on all ranks. A trial changes nothing that is trained or drawn: the run goes on as if
    the number had been written. `save` keeps the number and `load` takes it, so a resumed run has the same.
    """

    def fitted_tokens(self) -> Mapping[TokenPass, FittedTokens]:
        """What was found so far, the same on all ranks; empty where the setting is a number."""
        ...

    def take_fitted_tokens(self, found: Mapping[TokenPass, FittedTokens]) -> None:
        """Use what another engine found, instead of a trial, where its conditions are those of this one."""
        ...
