"""The worker that is one rank of a training engine: a plain class that knows nothing of Ray."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from rlhf_algos import Moments, Recipe, WhitenConfig, files_below
from rlhf_core import (
    TRAIN_ENGINES,
    Batch,
    ConfigError,
    DeltaMode,
    DeltaSource,
    EngineConfig,
    FittedTokens,
    KeepsAverage,
    Link,
    Loss,
    MeasuresMicroBatches,
    ModelOutputs,
    PendingSave,
    RaggedBatch,
    ReportsMemory,
    SavesInBackground,
    ScoresWithoutAdapters,
    Sender,
    SendReport,
    SendsAdapters,
    StepReport,
    TokenPass,
    TrainCapabilities,
    TrainEngine,
    WeightManifest,
    WeightSource,
    load_plugin,
    model_loading,
    open_sender,
    send_weights,
    shared_memory_id,
)

from rlhf_launch.workers.prepare import Prepared, Unwhitened, joined_outputs, prepare_blocks
from rlhf_launch.workers.probe import ProbedModel, describe_model
from rlhf_launch.workers.process import (
    device_names,
    host_address,
    keep_freed_memory,
    seed_everything,
    trim_memory,
)


class TrainWorker:
    """One rank of a policy, critic, reference or reward engine.

    `address` and `start` are two steps because ranks meet: rank 0 offers the address first, then all build
    their engines at the same time.
    """

    def __init__(self, engine: str, config: EngineConfig, env_vars: Mapping[str, str]) -> None:
        os.environ.update(env_vars)
        self._engine_name = engine
        self._config = config
        self._engine: TrainEngine | None = None
        self._sender: Sender | None = None
        self._delta: DeltaSource | None = None
        self._store: object = None
        self._unwhitened: Unwhitened | None = None
        self._pending: PendingSave | None = None

    def address(self, world_size: int) -> tuple[str, int]:
        """Open the meeting point of the ranks, on rank 0. A lone rank needs none: its engine finds its own."""
        host = host_address()
        if world_size == 1:
            return host, 0
        # The store listens on a port that the system chose, and stays open: no bind-and-close race. The ranks'
        # process group joins it as clients (TORCHELASTIC_USE_AGENT_STORE).
        self._store = torch.distributed.TCPStore(host, 0, world_size, is_master=True, wait_for_workers=False)
        return host, self._store.port  # type: ignore[attr-defined]

    def start(self, rank: int, world_size: int, address: tuple[str, int]) -> float:
        """Build the engine, on all ranks at once; returns the seconds that took."""
        begin = time.perf_counter()
        if world_size > 1:
            os.environ.update(
                RANK=str(rank),
                LOCAL_RANK=os.environ.get("RLHF_LOCAL_RANK", "0"),
                WORLD_SIZE=str(world_size),
                MASTER_ADDR=address[0],
                MASTER_PORT=str(address[1]),
                TORCHELASTIC_USE_AGENT_STORE="True",
            )
        seed_everything(self._config.seed)
        with model_loading:
            self._engine = load_plugin(TRAIN_ENGINES, self._engine_name)(self._config)
        trim_memory()
        if self._config.device == "cpu":
            keep_freed_memory()
        return time.perf_counter() - begin

    @property
    def engine(self) -> TrainEngine:
        """The engine, which is there after `start`."""
        if self._engine is None:
            raise RuntimeError("the training worker is not started")
        return self._engine

    def capabilities(self) -> TrainCapabilities:
        """See TrainEngine."""
        return self.engine.capabilities(self._config)

    def describe_model(self) -> ProbedModel:
        """What a probe of synced weights must know of the model."""
        config = self._config
        return describe_model(
            config.model,
            precision=config.dtype,
            adapters=config.lora is not None,
            trust_remote_code=config.trust_remote_code,
        )

    def score(self, batch: Batch, outputs: Sequence[str]) -> ModelOutputs:
        """See TrainEngine."""
        return self.engine.score(batch, outputs)

    def score_without_adapters(self, batch: Batch, outputs: Sequence[str]) -> ModelOutputs:
        """See ScoresWithoutAdapters.

        Raises:
            ConfigError: the engine cannot.
        """
        if not (self.capabilities().scores_without_adapters and isinstance(self.engine, ScoresWithoutAdapters)):
            raise ConfigError(
                f"the train engine {self._engine_name} cannot score with its adapters off; name a reference of its "
                "own (model.reference)"
            )
        return self.engine.score_without_adapters(batch, outputs)

    def score_rows(
        self, batch: RaggedBatch, outputs: Sequence[str], adapters: bool = True
    ) -> dict[str, NDArray[Any]]:
        """`score`, or `score_without_adapters`, of rows without padding; see `joined_outputs`."""
        padded = batch.padded()
        found = self.score(padded, outputs) if adapters else self.score_without_adapters(padded, outputs)
        return joined_outputs(found, padded)

    def prepare(
        self, batch: RaggedBatch, recipe: Recipe, kl_coef: float, blocks: Sequence[int], width: int
    ) -> list[Prepared]:
        """See prepare_blocks; no model is needed for it."""
        return prepare_blocks(batch, recipe, kl_coef, blocks, width)

    def prepare_unwhitened(
        self, batch: RaggedBatch, recipe: Recipe, kl_coef: float, blocks: Sequence[int], width: int
    ) -> list[Moments]:
        """`prepare` all but the whitening, which `whiten` does; returns the moments of each block's advantages."""
        self._unwhitened = unwhitened = Unwhitened(
            batch, prepare_blocks(batch, recipe, kl_coef, blocks, width), blocks
        )
        return unwhitened.moments()

    def whiten(self, config: WhitenConfig, moments: Moments) -> list[Prepared]:
        """The blocks of `prepare_unwhitened`, their advantages whitened by the moments of all of them."""
        unwhitened, self._unwhitened = self._unwhitened, None
        if unwhitened is None:
            raise RuntimeError("nothing was prepared that could be whitened")
        return unwhitened.whitened(config, moments)

    def step(self, batch: Batch | RaggedBatch, loss: Loss) -> StepReport:
        """See TrainEngine."""
        return self.engine.step(batch.padded() if isinstance(batch, RaggedBatch) else batch, loss)

    def fitted_tokens(self) -> Mapping[TokenPass, FittedTokens]:
        """See MeasuresMicroBatches; nothing if the engine does not measure."""
        return self.engine.fitted_tokens() if isinstance(self.engine, MeasuresMicroBatches) else {}

    def take_fitted_tokens(self, found: Mapping[TokenPass, FittedTokens]) -> None:
        """See MeasuresMicroBatches."""
        if isinstance(self.engine, MeasuresMicroBatches):
            self.engine.take_fitted_tokens(found)

    def open_link(self, kind: str, receivers: int, timeout_s: float) -> Link:
        """Open the sending end of a weight link on this rank, replacing an older one."""
        self.close_link()
        self._sender = open_sender(
            kind,
            receivers=receivers,
            host=host_address(),
            device="cuda" if kind in ("nccl", "ipc") else "cpu",
            timeout_s=timeout_s,
        )
        return self._sender.link

    def close_link(self) -> None:
        """Close this rank's end of the weight link, if it has one."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def accept_link(self) -> None:
        """Wait for all receivers."""
        if self._sender is not None:
            self._sender.accept()

    def device_names(self) -> list[str]:
        """See `process.device_names`."""
        return device_names(self._config.device)

    def shared_memory(self) -> str | None:
        """See shared_memory_id."""
        return shared_memory_id()

    def manifest(self, version: int, bucket_bytes: int, adapters: bool = False) -> WeightManifest:
        """What a sync of all weights, or of the adapters alone, would move; collective."""
        self._delta = None
        return self._weights(adapters).manifest(version, bucket_bytes=bucket_bytes)

    def _weights(self, adapters: bool) -> WeightSource:
        if not adapters:
            return self.engine.weights()
        if not (self.capabilities().adapter_weights and isinstance(self.engine, SendsAdapters)):
            raise ConfigError(
                f"the train engine {self._engine_name} cannot send adapters alone with these settings; set "
                "weight_sync.adapters: merged"
            )
        return self.engine.adapter_weights()

    def changes(self, version: int, bucket_bytes: int, mode: DeltaMode) -> WeightManifest:
        """What changed since the confirmed version, or all weights; collective. Rank 0's answer counts."""
        if self._delta is None:
            self._delta = DeltaSource(self.engine.weights(), mode=mode, sends=self._sender is not None)
        return self._delta.changes(version, bucket_bytes=bucket_bytes)

    def confirm(self, version: int) -> None:
        """Note that every engine has `version`."""
        if self._delta is not None:
            self._delta.confirm(version)

    def send(self, manifest: WeightManifest) -> SendReport:
        """Gather and send what the manifest says, a collective."""
        return send_weights(self._delta or self._weights(manifest.adapter is not None), manifest, self._sender)

    def offload(self) -> None:
        """See TrainEngine; what is freed on the host goes back to the system."""
        self.engine.offload()
        trim_memory()

    def reload(self) -> None:
        """See TrainEngine."""
        self.engine.reload()

    def save(self, path: Path, background: bool = False) -> None:
        """See TrainEngine. An engine that can writes in the background, if asked to, until `finish_save`."""
        if background and isinstance(self.engine, SavesInBackground) and self.capabilities().background_save:
            self._pending = self.engine.save_in_background(path)
        else:
            self.engine.save(path)

    def saved(self) -> bool:
        """Whether this rank's files are on disk."""
        return self._pending is None or self._pending.written

    def finish_save(self) -> None:
        """Wait until all ranks' files are on disk; collective."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    def files(self, path: Path) -> tuple[str, dict[str, int]]:
        """This rank's host, and the files below `path` that it sees there, with their bytes."""
        return socket.gethostname(), files_below(path)

    def load(self, path: Path) -> None:
        """See TrainEngine."""
        self.engine.load(path)

    def export(self, path: Path) -> None:
        """See TrainEngine."""
        self.engine.export(path)

    def export_average(self, path: Path) -> None:
        """See KeepsAverage.

        Raises:
            ConfigError: the engine keeps no average.
        """
        if not (self.capabilities().average and isinstance(self.engine, KeepsAverage)):
            raise ConfigError(
                f"the train engine {self._engine_name} keeps no average of these weights; set train.average_decay"
            )
        self.engine.export_average(path)

    def memory(self) -> dict[str, int]:
        """Bytes by what they are for, peaks under `peak_<phase>`; empty if the engine does not say."""
        return self.engine.memory_report().sizes if isinstance(self.engine, ReportsMemory) else {}

    def close(self) -> None:
        """Release engine, link and store."""
        self.close_link()
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        self._store = None
