"""Whether a model's cached decoding of padded rows gives the log-probs of its own forward pass."""

from __future__ import annotations

import logging
from typing import Any

import torch
from rlhf_core import ConfigError, GenerationRequest, SamplingConfig
from torch import Tensor

from rlhf_rollout.backends.transformers.decoder import Decoder, Draw
from rlhf_rollout.backends.transformers.token_sampling import score_rows

logger = logging.getLogger(__name__)

_PROMPTS = (9, 3, 14)
"""Lengths: the rows need padding."""
_TOKENS = 6
_LIMITS = {torch.float32: (1e-4, 1e-3)}
"""The median of all differences and the largest one, in nats. In 16 bits rounding has a median of up to 0.09."""
_LIMITS_16_BITS = (0.2, torch.inf)


def try_decoding(model: Any) -> None:
    """Sample a few tokens from a model that was just loaded, and compare; takes `eager` attention if that is right.

    Rows of three lengths join one after the other and leave at different times. The truth is the model's own
    forward pass with `eager` attention over each row alone, nothing padded or cached.

    Raises:
        ConfigError: the log-probs differ. Names the model, with the difference.
    """
    loaded = model.config._attn_implementation
    found = _gaps(model)
    if found is not None and loaded != "eager":
        model.set_attn_implementation("eager")
        left = _gaps(model)
        if left is None:
            logger.warning(
                "%s is sampled from with eager attention: with %s its log-probs are off by up to %.2g nats",
                _name(model),
                loaded,
                found.max(),
            )
        found = left
    if found is not None:
        raise ConfigError(
            f"{_name(model)} cannot be sampled from with the transformers backend: log-probs of cached decoding "
            f"differ from those of the model's own forward pass by up to {found.max():.2g} nats, half of them by "
            f"more than {found.median():.2g}; use the vllm backend"
        )


def _name(model: Any) -> str:
    return f"{model.name_or_path or type(model).__name__} ({model.config.model_type})"


def _gaps(model: Any) -> Tensor | None:
    """Differences of log-probs in nats; None where they are rounding."""
    try:
        draws = _sampled(model)
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise ConfigError(
            f"{_name(model)} cannot be sampled from with the transformers backend: its cached decoding of padded "
            f"rows fails ({type(error).__name__}: {error}); use the vllm backend"
        ) from error
    attention = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        gaps = torch.cat([_differences(model, draw) for draw in draws])
    finally:
        model.set_attn_implementation(attention)
    median, largest = _LIMITS.get(model.dtype, _LIMITS_16_BITS)
    return None if gaps.median() <= median and gaps.max() <= largest else gaps


def _sampled(model: Any) -> list[Draw]:
    random = torch.Generator().manual_seed(0)
    vocabulary = model.get_input_embeddings().num_embeddings
    draws = []
    for number, length in enumerate(_PROMPTS):
        ids = torch.randint(vocabulary, (length,), generator=random).tolist()
        sampling = SamplingConfig(max_tokens=_TOKENS - number)
        request = GenerationRequest(request_id="trial", prompt_token_ids=tuple(ids), sampling=sampling)
        draws.append(Draw(request=request, generator=random, stop_token_ids=frozenset()))
    decoder = Decoder(model, max_model_len=max(_PROMPTS) + _TOKENS)
    for draw in draws:
        decoder.step([draw], version=0)
    while decoder.draws:
        decoder.step([], version=0)
    return draws


def _differences(model: Any, draw: Draw) -> Tensor:
    (own,) = score_rows(model, [draw.sequence])
    return (torch.tensor(draw.log_probs) - torch.tensor(own[-len(draw.tokens) :])).abs()
