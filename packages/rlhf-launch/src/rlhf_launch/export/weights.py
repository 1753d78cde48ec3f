"""Weights and tokenizer of a model, written as Transformers or peft load them, and compared with their source."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rlhf_core import (
    ADAPTER_CONFIG,
    AdapterBase,
    ConfigError,
    DType,
    EngineConfig,
    Role,
    find_adapter,
    load_role,
    naming_damage,
)
from torch import Tensor

from rlhf_launch.export.check import LogitGap, compare, logits_of, probe_tokens, tolerance
from rlhf_launch.named_models import FoundModel, find_tokenizer, is_reward_model

if TYPE_CHECKING:
    from rlhf_train import AdaptedModel

_ADAPTER_WEIGHTS = "adapter_model.safetensors"
_ADAPTER_BASE = "rlhf_base.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenModel:
    """A model that was written, and what its source says."""

    dtype: torch.dtype
    """Of the written weights."""
    scalar: bool
    """A reward model."""
    base: str | None
    """Of adapters: the model that was loaded below them."""
    token_ids: Sequence[int]
    logits: Tensor
    """What the source says of these tokens."""
    gap: LogitGap


@dataclass(frozen=True, kw_only=True, slots=True)
class _Opened:
    model: Any
    tokenizer: Any
    dtype: torch.dtype
    scalar: bool
    adapted: AdaptedModel | None = None

    def probed(self) -> tuple[list[int], Tensor]:
        token_ids = probe_tokens(self.tokenizer, self.model.get_input_embeddings().num_embeddings)
        return token_ids, logits_of(self.model, token_ids)


def write_model(
    found: FoundModel, folder: Path, *, base: str | None, dtype: DType | None, trust_remote_code: bool = False
) -> WrittenModel:
    """Write the whole model, adapters merged into their base, as safetensors with its tokenizer.

    The source and what was written are in memory one after the other, never both.

    Args:
        found: the model.
        folder: an existing, empty directory.
        base: of adapters, the model below; None for the one that they name.
        dtype: of the written weights; None for the source's.
        trust_remote_code: run the model's own code.

    Raises:
        ConfigError: the model cannot be loaded.
        CheckpointError: a file of it is damaged, or what was written does not say what it says.
    """
    if found.is_adapter:
        source = _open_adapted(Path(found.path), base, trust_remote_code)
    else:
        source = _open_model(found.path, trust_remote_code)
    token_ids, logits = source.probed()
    if source.adapted is not None:
        below, (model, _) = source.adapted.base, source.adapted.merged(dtype)
    else:
        below, model = None, source.model if dtype is None else source.model.to(getattr(torch, dtype))
    model.save_pretrained(folder)
    if source.tokenizer is not None:
        source.tokenizer.save_pretrained(folder)
    before, scalar = source.dtype, source.scalar
    del model, source
    written = _open_model(str(folder), trust_remote_code)
    gap = compare(logits, logits_of(written.model, token_ids), tolerance(before, written.dtype))
    return WrittenModel(dtype=written.dtype, scalar=scalar, base=below, token_ids=token_ids, logits=logits, gap=gap)


def write_adapter_alone(
    adapter: Path,
    folder: Path,
    *,
    base: str | None,
    base_name: str | None,
    dtype: DType | None,
    trust_remote_code: bool = False,
) -> WrittenModel:
    """Write adapters in peft's format, with the tokenizer; the base model stays where it is.

    Args:
        adapter: directory of the adapters.
        folder: an existing, empty directory.
        base: the model below, to compare with; None for the one that the adapters name.
        base_name: what the written adapters call it; None: as it was found.
        dtype: of the adapters' weights; None for the source's.
        trust_remote_code: run the model's own code.

    Raises:
        ConfigError: the base cannot be loaded, or the adapters do not fit it.
        CheckpointError: a file is damaged, or what was written does not say what its source says.
    """
    from safetensors.torch import load_file, save_file

    source = _open_adapted(adapter, base, trust_remote_code)
    token_ids, logits = source.probed()
    below = source.adapted.base if source.adapted else ""
    weights = adapter / _ADAPTER_WEIGHTS
    if not weights.exists():
        raise ConfigError(f"{str(adapter)!r} has no {_ADAPTER_WEIGHTS}; save the adapters with safe_serialization")
    with naming_damage(f"the adapter in {str(adapter)!r}", adapter):
        tensors = load_file(weights)
    kind = getattr(torch, dtype) if dtype else next(iter(tensors.values())).dtype
    save_file(
        {name: tensor.to(kind) for name, tensor in tensors.items()}, folder / _ADAPTER_WEIGHTS, {"format": "pt"}
    )
    described = json.loads((adapter / ADAPTER_CONFIG).read_text())
    described["base_model_name_or_path"] = base_name or below
    (folder / ADAPTER_CONFIG).write_text(json.dumps(described, indent=2, sort_keys=True) + "\n")
    if (trained_on := AdapterBase.read(adapter)) is not None:
        named = AdapterBase(model=base_name or below, quantize=trained_on.quantize)
        (folder / _ADAPTER_BASE).write_text(json.dumps(asdict(named)))
    if source.tokenizer is not None:
        source.tokenizer.save_pretrained(folder)
    before, scalar = source.dtype, source.scalar
    del source
    written = _open_adapted(folder, below, trust_remote_code)
    gap = compare(logits, logits_of(written.model, token_ids), tolerance(before, kind))
    return WrittenModel(dtype=kind, scalar=scalar, base=below, token_ids=token_ids, logits=logits, gap=gap)


def _open_model(path: str, trust_remote_code: bool) -> _Opened:
    from transformers import AutoConfig

    scalar = is_reward_model(path, trust_remote_code=trust_remote_code)
    config: Any = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    role: Role = "reward" if scalar else "policy"
    dtype = config.dtype or torch.float32
    held: Any = str(dtype).removeprefix("torch.")
    given = EngineConfig(model=path, role=role, dtype=held, trust_remote_code=trust_remote_code)
    model, _ = load_role(given, extra="rlhf-train[qlora]")
    return _Opened(
        model=model,
        tokenizer=find_tokenizer([path], trust_remote_code=trust_remote_code),
        dtype=dtype,
        scalar=scalar,
    )


def _open_adapted(adapter: Path, base: str | None, trust_remote_code: bool) -> _Opened:
    from rlhf_train import load_adapted

    adapted = load_adapted(adapter, base=base, trust_remote_code=trust_remote_code)
    # The run's own tokenizer, where it is beside the adapters or beside what they were merged into.
    folder = find_adapter(adapter)
    places = [str(folder), str(folder.parent), adapted.base]
    return _Opened(
        model=adapted.model,
        tokenizer=find_tokenizer(places, trust_remote_code=trust_remote_code),
        dtype=adapted.dtype,
        scalar=type(adapted.model.get_base_model()).__name__.endswith("ForSequenceClassification"),
        adapted=adapted,
    )
