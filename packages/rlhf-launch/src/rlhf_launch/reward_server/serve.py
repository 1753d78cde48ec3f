"""A server from the name of a reward model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhf_algos import choose_device, choose_dtype, load_tokenizer
from rlhf_core import ConfigError, EngineConfig

from rlhf_launch.named_models import find_model, is_reward_model, longest_row, merged_into
from rlhf_launch.reward_server.app import RewardServer, ServerLimits
from rlhf_launch.reward_server.batching import BatchedRows, BatchLimits
from rlhf_launch.reward_server.model import RewardModel
from rlhf_launch.reward_server.requests import RowEncoder


def open_server(
    name: str,
    *,
    scratch: Path,
    token: str = "",
    device: str = "auto",
    dtype: Any = "auto",
    batching: BatchLimits | None = None,
    limits: ServerLimits | None = None,
    max_length: int | None = None,
    trust_remote_code: bool = False,
) -> RewardServer:
    """Load a reward model, and make the application that serves it.

    Args:
        name: see `find_model`.
        scratch: an empty directory; adapters are merged there.
        token: that clients must send; empty for none.
        device: `auto`, `cpu` or `cuda`.
        dtype: of the weights, or `auto`.
        batching: how requests are joined.
        limits: what a client may send.
        max_length: longest row in tokens; None for the model's.
        trust_remote_code: run the model's own code.

    Raises:
        ConfigError: there is no such model, it is no reward model with one label, or has no tokenizer.
    """
    from transformers import AutoConfig

    path = merged_into(find_model(name), scratch, trust_remote_code=trust_remote_code)
    if not is_reward_model(path, trust_remote_code=trust_remote_code):
        raise ConfigError(
            f"{name!r} is a language model, which gives no scores; give a reward model (AutoModelForSequence"
            "Classification with one label), for instance from `rlhf offline rm`"
        )
    own = longest_row(AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code))
    if max_length is not None and not 1 <= max_length <= own:
        raise ConfigError(f"--max-length must be from 1 to the model's {own}, got {max_length}")
    tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code, what="serve-rm")
    batching = batching or BatchLimits()
    on = choose_device(device)
    config = EngineConfig(
        model=path,
        role="reward",
        device=on,
        dtype=choose_dtype(dtype, on),
        max_tokens_per_micro_batch=batching.max_batch_tokens,
        trust_remote_code=trust_remote_code,
    )
    pad = next((t for t in (tokenizer.pad_token_id, tokenizer.eos_token_id) if t is not None), 0)
    model = RewardModel(config, pad_token_id=pad)
    return RewardServer(
        BatchedRows(model.score, batching),
        RowEncoder(tokenizer, max_length=max_length or own),
        name=Path(name).name,
        token=token,
        limits=limits,
        on_close=model.close,
    )
