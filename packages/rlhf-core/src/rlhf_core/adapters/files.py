"""Adapters as a directory that peft can read: a few megabytes beside the merged model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from rlhf_core.adapters.lora import MODEL_HEADS, FourBit, LoraConfig, adapted_layers
from rlhf_core.errors import ConfigError

ADAPTER_FOLDER = "adapter"
"""Where an engine's export has its adapters, if it has any."""
WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
BASE = "rlhf_base.json"
_PREFIX = "base_model.model."


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterBase:
    """What an adapter was trained on."""

    model: str
    quantize: FourBit | None = None
    """The 4-bit type that its linear layers were held in."""

    @classmethod
    def read(cls, folder: Path) -> AdapterBase | None:
        """What an engine wrote beside its adapters; None if something else wrote these."""
        file = folder / BASE
        return cls(**json.loads(file.read_text())) if file.exists() else None


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of the adapters, and of a trained scalar head, under the names of peft's files."""
    layers = adapted_layers(model)
    found: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        owner = next((layer for layer in layers if name.startswith(layer + ".lora_")), None)
        if owner is not None:
            (adapter,) = layers[owner].active_adapters
            found[_PREFIX + name.replace(f".{adapter}.", ".")] = parameter
        elif parameter.requires_grad and name.split(".")[0] in MODEL_HEADS:
            found[_PREFIX + name] = parameter
    return found


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], config: LoraConfig, *, base: str) -> None:
    """Write adapters as peft's files.

    Args:
        folder: an existing directory.
        tensors: full values of `adapter_parameters`.
        config: how the adapters were made.
        base: the model that they were put into.
    """
    import peft
    from safetensors.torch import save_file

    heads = sorted({name.removeprefix(_PREFIX).split(".")[0] for name in tensors} & set(MODEL_HEADS))
    layers = sorted({name.removeprefix(_PREFIX).split(".lora_")[0] for name in tensors if ".lora_" in name})
    settings: Any = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]
        lora_dropout=config.dropout,
        # All names in full: what "all-linear" means depends on the version of peft.
        target_modules=layers,
        modules_to_save=heads or None,
        base_model_name_or_path=base,
        inference_mode=True,
    )
    settings.save_pretrained(str(folder))
    whole = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / BASE).write_text(json.dumps(asdict(AdapterBase(model=base, quantize=config.quantize))))


def find_adapter(path: Path) -> Path:
    """The adapter's directory: `path`, or the one inside it that an export has.

    Raises:
        ConfigError: there is none.
    """
    for folder in (path, path / ADAPTER_FOLDER):
        if (folder / ADAPTER_CONFIG).exists():
            return folder
    raise ConfigError(
        f"no adapter in {str(path)!r}: neither it nor {ADAPTER_FOLDER}/ in it has {ADAPTER_CONFIG}; give a "
        "directory that peft wrote, or the export of an engine that trained with lora"
    )
