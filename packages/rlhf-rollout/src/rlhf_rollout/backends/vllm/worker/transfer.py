"""What runs inside each vLLM worker to take new weights; imported by vLLM, never by this package.

vLLM's native weight-transfer interface does the loading: `load_weights` fuses and shards checkpoint tensors for
tensor parallelism, and layer-wise reload rebuilds whatever kernels keep in a format of their own. This module
adds a transfer engine that receives over a `Link`, a check that no weight is left out, and a way back to a
loadable model after a transfer that broke off.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rlhf_core import Link, Receiver, WeightCopy, WeightManifest, WeightSyncError, join_link, receive_weights
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from rlhf_rollout.backends.vllm.worker.direct_copies import direct_copies_kept
from rlhf_rollout.backends.vllm.worker.unfinished import UnfinishedLayers

TRANSFER_NAME = "rlhf-link"


@dataclass
class LinkInfo(WeightTransferInitInfo):
    """The fields of a `Link`, and the rank of this engine's first worker on it."""

    kind: str
    address: str
    receivers: int
    timeout_s: float
    first_rank: int


@dataclass
class ManifestInfo(WeightTransferUpdateInfo):
    """A `WeightManifest` as plain data."""

    version: int
    bucket_bytes: int
    tensors: list[list[Any]]
    base_version: int | None
    checksums: bool
    keep_base: bool
    other_way: bool


class LinkTransfer(WeightTransferEngine[LinkInfo, ManifestInfo]):
    """Receives a whole manifest over a link and loads it. One update call is one complete sync."""

    init_info_cls = LinkInfo
    update_info_cls = ManifestInfo

    receiver: Receiver | None = None
    """The link's end in this worker, once connected."""
    _unfilled: dict[str, int] | None = None
    """Values that a full sync brings to layers with padding, which never reach their total."""
    _layers: UnfinishedLayers | None = None
    """Of the load under way."""
    _held: WeightCopy | None = None
    """The last weights as they came, where the sender wants to send single values."""

    def init_transfer_engine(self, init_info: LinkInfo) -> None:
        """Join the link, in place of any earlier one."""
        self.shutdown()
        link = Link(
            kind=init_info.kind,
            address=init_info.address,
            receivers=init_info.receivers,
            timeout_s=init_info.timeout_s,
        )
        rank = init_info.first_rank + self.parallel_config.rank
        self.receiver = join_link(link, rank, device=self.device if link.kind in ("nccl", "ipc") else "cpu")

    def start_weight_update(self) -> None:
        """Does nothing: `receive_weights` opens the reload session itself, so that it can close it on failure."""

    def receive_weights(self, update_info: ManifestInfo) -> None:
        """Receive, load and check all weights; on failure the model stays loadable, with undefined weights."""
        if self.receiver is None:
            raise WeightSyncError("this engine is not connected to a weight link; call connect(link, rank) first")
        manifest = WeightManifest.from_dict(vars(update_info))
        held, self._held = self._held, None  # after a failure nothing is held for certain
        if not manifest.partial:
            held = (held or WeightCopy()) if manifest.keep_base else None
        initialize_layerwise_reload(self.model)
        with _experts_packed_anew(self.model), direct_copies_kept(self.model):
            self._layers = UnfinishedLayers(self.model)
            try:
                self._receive(manifest, self.receiver, held)
                self._check_coverage(manifest)
            except BaseException:
                _forget_received(self.model)
                finalize_layerwise_reload(self.model, self.model_config)
                raise
            finally:
                self._layers = None
            with _quiet_about_untouched_layers(manifest.partial):
                finalize_layerwise_reload(self.model, self.model_config)
        if self._tied and self.device.type == "cpu":
            _repack_head(self.model)
        self._held = held

    def _receive(self, manifest: WeightManifest, receiver: Receiver, held: WeightCopy | None) -> None:
        if manifest.other_way:
            # All at once, out of memory that nothing writes to again, in place of bucket after bucket.
            copy = held or WeightCopy()
            receive_weights(manifest, receiver, copy.take)
            model: Any = self.model
            model.load_weights(copy.everything())
        elif held is None:
            receive_weights(manifest, receiver, self._load)
        elif not manifest.partial:
            receive_weights(manifest, receiver, lambda weights: self._load(held.passing(weights)))
        else:
            receive_weights(manifest, receiver, held.take, base=held.value)
            model = self.model
            model.load_weights(held.with_partners(spec.name for spec in manifest.tensors))

    def finish_weight_update(self) -> None:
        """Does nothing; see `start_weight_update`."""

    def shutdown(self) -> None:
        """Leave the link."""
        if self.receiver is not None:
            self.receiver.close()
            self.receiver = None

    @property
    def _tied(self) -> bool:
        return bool(getattr(self.model_config.hf_text_config, "tie_word_embeddings", False))

    def _load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        model: Any = self.model
        memory: set[int] = set()

        def remembered() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                memory.add(tensor.untyped_storage().data_ptr())
                yield name, tensor

        model.load_weights(remembered())
        if memory and self._layers is not None:
            self._layers.settle(memory)

    def _check_coverage(self, manifest: WeightManifest) -> None:
        waiting = {
            name: info.load_numel
            for name, layer in self.model.named_modules()
            if (info := get_layerwise_info(layer)).can_load() and info.load_numel > 0
        }
        if manifest.partial:
            # A layer is reloaded with all that a full sync brings to it, or not at all.
            missing = [name for name, count in waiting.items() if count != (self._unfilled or {}).get(name)]
        else:
            missing = [name for name, layer in self.model.named_modules() if self._lacks_weights(layer)]
            self._unfilled = waiting
        if missing:
            raise WeightSyncError(
                f"{len(missing)} layers of the generator got no weights or only a part, among them "
                f"{', '.join(missing[:5])}; trainer and generator must be built from the same model"
            )

    def _lacks_weights(self, layer: nn.Module) -> bool:
        info = get_layerwise_info(layer)
        if not info.can_load():  # complete, and processed already
            return False
        owns_parameters = any(parameter is not None for parameter in layer._parameters.values())
        if not owns_parameters or is_deferred_attention_layer(layer):
            return False
        if isinstance(layer, ParallelLMHead) and self._tied:
            return False
        method = getattr(layer, "quant_method", None)
        plain = isinstance(layer, LinearBase) and isinstance(method, UnquantizedLinearMethod)
        if plain or isinstance(method, UnquantizedFusedMoEMethod):
            return info.load_numel < (info.load_numel_total or 0)
        # Others may be padded, so that a complete load does not reach the total.
        return info.load_numel == 0


def _forget_received(model: nn.Module) -> None:
    """Make unfinished layers look untouched; otherwise the next sync would add to what this one left."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            info.loaded_weights.clear()
            info.load_numel = 0


@contextlib.contextmanager
def _quiet_about_untouched_layers(partial: bool) -> Iterator[None]:
    """Silence vLLM's warning about every layer that gets no weights: in a partial sync that is most of them."""
    logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    level = logger.level
    if partial:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _experts_packed_anew(model: nn.Module) -> Iterator[None]:
    """Let kernels of unquantised experts prepare the weights of every load.

    vLLM calls that preparation when it builds a layer's kernel, at the first load only. Where it changes the layout
    (on CPUs), a later load would leave plain weights in the place of packed ones, and the kernel would read them
    wrongly.
    """
    methods = [
        method
        for layer in model.modules()
        if isinstance(method := getattr(layer, "quant_method", None), UnquantizedFusedMoEMethod)
    ]
    for method in methods:
        vars(method)["process_weights_after_loading"] = _with_preparation(method)
    try:
        yield
    finally:
        for method in methods:
            del vars(method)["process_weights_after_loading"]


def _with_preparation(method: UnquantizedFusedMoEMethod) -> Callable[[Any], None]:
    process: Callable[[Any], None] = method.process_weights_after_loading

    def process_and_prepare(layer: Any) -> None:
        built = method.moe_kernel
        process(layer)
        if built is not None and method.moe_kernel is built:
            built.fused_experts.process_weights_after_loading(layer)

    return process_and_prepare


def _repack_head(model: nn.Module) -> None:
    """Pack the head's weight anew.

    On a CPU each linear layer multiplies with a packed copy of its weight. A tied head receives no weight of its
    own, so nothing else would renew its copy.
    """
    for layer in model.modules():
        if isinstance(layer, ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)


if TRANSFER_NAME not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(TRANSFER_NAME, LinkTransfer)
