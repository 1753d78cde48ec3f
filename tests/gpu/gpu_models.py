"""Models of real sizes with random weights, made on the spot: the shapes of the Qwen2.5 family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "heads": (14, 2)},
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "heads": (12, 2)},
    "3B": {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "heads": (16, 2)},
    "7B": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "heads": (28, 4)},
}
BILLIONS = {"0.5B": 0.49, "1.5B": 1.54, "3B": 3.09, "7B": 7.62}
TRAINED_BYTES = 18
"""Of a parameter in bfloat16 under Adam: 2 for itself, 4 for its gradient, 12 for float32 masters and moments."""


def qwen_config(size: str) -> Any:
    """The configuration of that size."""
    from transformers import Qwen2Config

    shape = dict(SHAPES[size])
    heads, key_heads = shape.pop("heads")
    return Qwen2Config(
        vocab_size=151_936,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        max_position_embeddings=32_768,
        tie_word_embeddings=size != "7B",
        rope_theta=1e6,
        bos_token_id=None,
        eos_token_id=None,
        **shape,
    )


def save_config(size: str, folder: Path) -> str:
    """The configuration alone: for an engine that makes up its weights."""
    config = qwen_config(size)
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(folder)
    return str(folder)


def save_model(size: str, folder: Path) -> str:
    """Random weights in bfloat16, made on the GPU."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(qwen_config(size), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    del model
    torch.cuda.empty_cache()
    return str(folder)


def largest_trained() -> str:
    """The largest size whose training state takes at most 0.7 of the first GPU."""
    import torch

    room = 0.7 * torch.cuda.get_device_properties(0).total_memory
    fits = [size for size, billions in BILLIONS.items() if billions * 1e9 * TRAINED_BYTES < room]
    return fits[-1] if fits else "0.5B"


def largest_served() -> str:
    """The largest size whose weights take at most 0.4 of the first GPU."""
    import torch

    room = 0.4 * torch.cuda.get_device_properties(0).total_memory
    fits = [size for size, billions in BILLIONS.items() if 2e9 * billions < room]
    return fits[-1] if fits else "0.5B"
