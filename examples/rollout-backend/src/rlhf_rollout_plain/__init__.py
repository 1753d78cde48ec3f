"""A rollout backend in plain torch for Llama and Qwen2 checkpoints: registered as `plain`."""

from rlhf_rollout_plain.backend import PlainBackend
from rlhf_rollout_plain.decoder import Cache, DecoderShape, next_token_logits
from rlhf_rollout_plain.loading import load_checkpoint

__all__ = ["Cache", "DecoderShape", "PlainBackend", "load_checkpoint", "next_token_logits"]
