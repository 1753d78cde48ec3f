"""What runs inside each vLLM worker to take adapters; imported by vLLM, never by this package.

The engine has one adapter, the policy's, which every request names. A sync puts another in its place, in the
same slot, so running requests go on with it as they do with new weights. Before the first sync, and after one that
brings all weights (merged), it is empty and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from rlhf_core import Receiver, WeightManifest, WeightSyncError, receive_weights
from torch import Tensor
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.model_executor.models.utils import is_pp_missing_parameter

POLICY = LoRARequest(lora_name="policy", lora_int_id=1, lora_path="received over a weight link")
"""Named by every request to an engine that takes adapters. It is never loaded from its path."""


def empty(lora_manager: Any) -> None:
    """Put an adapter of zeros in the place of the policy's."""
    lora_manager.remove_adapter(POLICY.lora_int_id)
    lora_manager.add_dummy_lora(POLICY, rank=1)


def install(lora_manager: Any, manifest: WeightManifest, receiver: Receiver | None) -> None:
    """Receive all of an adapter, check it against this worker's part of the model, and activate it.

    Raises:
        WeightSyncError: not connected, or the adapter does not fit the model.
    """
    scale = manifest.adapter
    if receiver is None:
        raise WeightSyncError("this engine is not connected to a weight link; call connect(link, rank) first")
    if scale is None:
        raise WeightSyncError(f"weight version {manifest.version} is no adapter")
    tensors: dict[str, Tensor] = {}

    def keep(weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            tensors[name] = tensor.to("cpu", copy=True)

    receive_weights(manifest, receiver, keep)
    adapters = lora_manager._adapter_manager
    helper = PEFTHelper(r=scale.rank, lora_alpha=scale.alpha, target_modules=[])  # type: ignore[arg-type]
    helper.validate_legal(lora_manager.lora_config)
    mapper = getattr(adapters.model, "hf_to_vllm_mapper", None)
    model = LoRAModel.from_lora_tensors(
        POLICY.lora_int_id,
        tensors,
        helper,
        device="cpu",
        dtype=lora_manager.lora_config.lora_dtype,
        weights_mapper=mapper.get_rename_mapper() if mapper is not None else None,
    )
    _check_fit(model, adapters, scale.rank)
    lora_manager.remove_adapter(POLICY.lora_int_id)
    if model.loras:  # none, where a pipeline stage has no adapted layer
        adapters.add_adapter(model)
        adapters.activate_adapter(POLICY.lora_int_id)
    else:
        lora_manager.add_dummy_lora(POLICY, rank=1)


def _check_fit(model: LoRAModel, adapters: Any, rank: int) -> None:
    """Refuse layers without adapters in vLLM and halves of pairs; drop what other pipeline stages hold."""
    known = set(adapters.modules)
    for parts in adapters.packed_modules.values():
        known.update(parts)
    elsewhere = [name for name in model.loras if is_pp_missing_parameter(name, adapters.model)]
    for name in elsewhere:
        del model.loras[name]
    if unknown := sorted(set(model.loras) - known):
        raise WeightSyncError(
            f"{len(unknown)} layers of the adapter have none in vLLM, among them {', '.join(unknown[:5])}; choose "
            "lora.target_modules among the linear layers that vLLM adapts, or sync merged weights"
        )
    for name, layer in model.loras.items():
        a, b = layer.lora_a, layer.lora_b
        if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
            raise WeightSyncError(f"layer {name!r} of the adapter has only one of lora_A and lora_B")
        if a.shape[0] != rank or b.shape[1] != rank:
            raise WeightSyncError(
                f"layer {name!r} of the adapter has rank {a.shape[0]} (A) and {b.shape[1]} (B), its manifest says "
                f"{rank}"
            )
