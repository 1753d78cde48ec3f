"""Adapters merged into the model they were trained on, for programs that know nothing of adapters."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from rlhf_core import (
    ADAPTER_CONFIG,
    MODEL_HEADS,
    AdapterBase,
    ConfigError,
    DType,
    FourBit,
    adapted_layers,
    check_choice,
    find_adapter,
    has_vision_class,
    load_processor,
    naming_damage,
    quantized_loading,
    restore_linear_layers,
    settle_quantized,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeConfig:
    """Settings of `merge_adapter`."""

    adapter: Path
    """Directory that peft wrote, or an engine's export."""
    output: Path
    """Directory to write; it must not exist, or be empty."""
    base: str | None = None
    """The model; None for the one that the adapter names."""
    dtype: DType | None = None
    """Of the merged weights; None for the base model's."""
    quantize: FourBit | None = None
    """Merge into what these 4 bits make of the base model. None: as the adapter was trained, where it says so."""
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.dtype is not None:
            check_choice("merge: dtype", self.dtype, get_args(DType))
        if self.quantize is not None:
            check_choice("merge: quantize", self.quantize, get_args(FourBit))


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptedModel:
    """A base model with adapters on top, not merged yet."""

    model: Any
    """peft's model. Over weights that were trained in 4 bits, those are back in full precision."""
    base: str
    """Directory or hub name of the model below."""
    dtype: torch.dtype
    """Of the base model's weights."""

    def merged(self, dtype: DType | None = None) -> tuple[Any, int]:
        """The model with its adapters merged in, and the number of merged layers; uses this one up.

        Each layer is merged in float32 and then brought to `dtype`, or the base model's without one.
        """
        kind = getattr(torch, dtype) if dtype else self.dtype
        layers = adapted_layers(self.model)
        with torch.no_grad():
            for layer in layers.values():
                layer.float()
                layer.merge(safe_merge=True)
                layer.to(kind)
        return self.model.unload().to(kind), len(layers)


def load_adapted(
    adapter: Path, *, base: str | None = None, quantize: FourBit | None = None, trust_remote_code: bool = False
) -> AdaptedModel:
    """The model that adapters were trained on, with the adapters on top.

    Args:
        adapter: directory that peft wrote, or an engine's export.
        base: the model; None for the one that the adapter names.
        quantize: see `MergeConfig`.
        trust_remote_code: run the model's own code.

    Raises:
        ConfigError: no adapter, no such base, or another kind of adapter.
        CheckpointError: a file of the adapter or of its base is damaged.
    """
    folder = find_adapter(adapter)
    with naming_damage(f"the adapter in {str(folder)!r}", folder):
        described = _read_description(folder)
        trained_on = AdapterBase.read(folder)
    base = base or described.get("base_model_name_or_path")
    if not base:
        raise ConfigError(f"the adapter in {str(folder)!r} does not name its model; give it with --base")
    quantize = quantize or (trained_on.quantize if trained_on else None)
    model = _load_base(base, described, quantize, trust_remote_code=trust_remote_code)
    return AdaptedModel(base=base, dtype=model.dtype, model=_put_on(model, folder))


def merge_adapter(config: MergeConfig) -> int:
    """Write the merged model, with the base model's tokenizer or processor; returns the number of merged layers.

    Each layer is merged in float32 and then brought to the dtype of the whole. An adapter that was trained over
    4-bit weights is merged into those, put back to full precision: the model that was trained, not one near it.

    Raises:
        ConfigError: no adapter, no such base, another kind of adapter, or an output that exists.
        CheckpointError: a file of the adapter or of its base is damaged.
    """
    find_adapter(config.adapter)
    output = config.output
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"{str(output)!r} exists and is not empty; give another output")
    adapted = load_adapted(
        config.adapter,
        base=config.base,
        quantize=config.quantize,
        trust_remote_code=config.trust_remote_code,
    )
    merged, count = adapted.merged(config.dtype)
    output.parent.mkdir(parents=True, exist_ok=True)
    # Beside, then renamed: whoever sees the directory sees all of it.
    beside = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    try:
        merged.save_pretrained(beside)
        _copy_tokenizer(adapted.base, beside, config)
        beside.chmod(0o755)
        os.replace(beside, output)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return count


def _read_description(folder: Path) -> dict[str, Any]:
    described = json.loads((folder / ADAPTER_CONFIG).read_text())
    if (kind := described.get("peft_type")) != "LORA":
        raise ConfigError(f"the adapter in {str(folder)!r} is of the kind {kind!r}; only LORA can be merged")
    return described


def _load_base(base: str, described: dict[str, Any], quantize: FourBit | None, *, trust_remote_code: bool) -> Any:
    import transformers as hf

    scalar = described.get("task_type") == "SEQ_CLS" or set(described.get("modules_to_save") or ()) & set(
        MODEL_HEADS[:2]
    )
    kind: Any = hf.AutoModelForSequenceClassification if scalar else hf.AutoModelForCausalLM
    arguments: dict[str, Any] = {"num_labels": 1} if scalar else {}
    try:
        its: Any = hf.AutoConfig.from_pretrained(base, trust_remote_code=trust_remote_code)
        dtype = its.dtype or torch.float32
        if not scalar and has_vision_class(its):
            kind = hf.AutoModelForImageTextToText
        if quantize is not None:
            cpu = torch.device("cpu")
            arguments |= quantized_loading(quantize, dtype=dtype, device=cpu, extra="rlhf-train[qlora]")
        with naming_damage(f"the base model {base!r}", base):
            model = kind.from_pretrained(base, dtype=dtype, trust_remote_code=trust_remote_code, **arguments)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the base model {base!r} cannot be loaded: {error}") from error
    if quantize is not None:
        settle_quantized(model)
        restore_linear_layers(model)
    return model


def _put_on(model: Any, folder: Path) -> Any:
    try:
        import peft
    except ImportError:
        raise ConfigError("merging adapters needs peft; install rlhf-train[lora]") from None
    try:
        with naming_damage(f"the adapter in {str(folder)!r}", folder):
            return peft.PeftModel.from_pretrained(model, str(folder))
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"the adapter in {str(folder)!r} does not fit {type(model).__name__}: {error}") from error


def _copy_tokenizer(base: str, path: Path, config: MergeConfig) -> None:
    from transformers import AutoConfig, AutoTokenizer

    trusted = config.trust_remote_code
    try:
        tokenizer = AutoTokenizer.from_pretrained(base, trust_remote_code=trusted)
    except (OSError, ValueError):
        return  # a model without one
    tokenizer.save_pretrained(path)
    if has_vision_class(AutoConfig.from_pretrained(base, trust_remote_code=trusted)):
        with contextlib.suppress(ConfigError):  # a model whose processor was left out
            load_processor(base, trust_remote_code=trusted).save_pretrained(path)
