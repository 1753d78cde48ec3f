"""Reading a Transformers directory without Transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from rlhf_core import CapabilityError, ConfigError, RolloutConfig
from safetensors.torch import load_file
from torch import Tensor

from rlhf_rollout_plain.decoder import DecoderShape


def load_checkpoint(config: RolloutConfig) -> tuple[DecoderShape, dict[str, Tensor]]:
    """Shape and weights of the model that `config.model` points to, in the dtype and on the device it asks for.

    Raises:
        ConfigError: not a local directory with `config.json` and `*.safetensors`.
        CapabilityError: another architecture than Llama or Qwen2 with ordinary rotary positions.
    """
    path = Path(config.model)
    files = sorted(path.glob("*.safetensors"))
    if not (path / "config.json").is_file() or not files:
        raise ConfigError(
            f"rollout: {config.model!r} is not a directory with config.json and *.safetensors; the plain backend "
            "downloads nothing, give the path of a saved model"
        )
    model = json.loads((path / "config.json").read_text(encoding="utf-8"))
    _refuse_other_architectures(model)
    dtype = getattr(torch, config.dtype)
    weights = {
        name: tensor.to(config.device, dtype)
        for file in files
        for name, tensor in load_file(file).items()
        if not (model.get("tie_word_embeddings") and name == "lm_head.weight")
    }
    return _shape(model, path), weights


def _rope(model: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings, from where Transformers 5 keeps them or from where Transformers 4 did."""
    return model.get("rope_parameters") or {**(model.get("rope_scaling") or {}), "rope_theta": model["rope_theta"]}


def _refuse_other_architectures(model: dict[str, Any]) -> None:
    needs = {
        "model_type": (model.get("model_type"), ("llama", "qwen2")),
        "hidden_act": (model.get("hidden_act"), ("silu",)),
        "use_sliding_window": (model.get("use_sliding_window", False), (False,)),
        "rope_type": (_rope(model).get("rope_type", "default"), ("default",)),
    }
    for name, (found, known) in needs.items():
        if found not in known:
            raise CapabilityError(
                f"rollout: the plain backend knows {name} {' or '.join(map(str, known))}, the model has {found!r}; "
                "use the transformers or vllm backend"
            )


def _shape(model: dict[str, Any], path: Path) -> DecoderShape:
    generation = path / "generation_config.json"
    source = json.loads(generation.read_text(encoding="utf-8")) if generation.is_file() else model
    ends = source.get("eos_token_id", model.get("eos_token_id"))
    return DecoderShape(
        layers=model["num_hidden_layers"],
        heads=model["num_attention_heads"],
        key_value_heads=model.get("num_key_value_heads") or model["num_attention_heads"],
        rope_theta=_rope(model)["rope_theta"],
        norm_eps=model["rms_norm_eps"],
        end_of_text=frozenset([] if ends is None else [ends] if isinstance(ends, int) else ends),
    )
