"""Small random models and a byte-level tokenizer, made on the spot: no download, no training."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL_TOKENS = ["<|pad|>", "<|eos|>", "<|im_start|>", "<|im_end|>", "<|step|>"]


def byte_tokenizer():
    """A tokenizer with one token per byte and ChatML's special tokens; 261 tokens in all."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|im_end|>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def save_tiny_model(
    path: Path | str,
    *,
    head: Literal["causal", "scalar"] = "causal",
    tied: bool = True,
    vocab_size: int = 512,
    hidden_size: int = 128,
    layers: int = 2,
    seed: int = 0,
    tokenizer: bool = True,
) -> str:
    """Write a random float32 Qwen2 (4 heads, 2 key/value heads) and the byte tokenizer; returns the path.

    `head="scalar"` makes an AutoModelForSequenceClassification with one label (reward model, critic).
    The weights are larger than the usual initialisation, so that log-probs differ clearly between models.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=tied,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=SPECIAL_TOKENS.index("<|im_end|>"),
        pad_token_id=SPECIAL_TOKENS.index("<|pad|>"),
    )
    if head == "scalar":
        config.num_labels = 1
    model_class = Qwen2ForCausalLM if head == "causal" else Qwen2ForSequenceClassification
    model_class(config).save_pretrained(path)
    if tokenizer:
        byte_tokenizer().save_pretrained(path)
    return str(path)


def save_tiny_experts(
    path: Path | str,
    family: Literal["mixtral", "qwen3_moe", "jamba"] = "mixtral",
    *,
    seed: int = 0,
    tokenizer: bool = True,
) -> str:
    """Write a random float32 mixture of experts (2 layers, 2 of its experts per token) and the byte tokenizer.

    Mixtral and Jamba have 4 experts, Qwen3-MoE 8; Jamba's first layer carries a state along the sequence.
    Transformers keeps the experts of a layer in one tensor; the checkpoint has each by itself. Returns the path.
    """
    from transformers import (
        JambaConfig,
        JambaForCausalLM,
        MixtralConfig,
        MixtralForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    torch.manual_seed(seed)
    shape = {
        "vocab_size": 512,
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": SPECIAL_TOKENS.index("<|im_end|>"),
        "pad_token_id": SPECIAL_TOKENS.index("<|pad|>"),
    }
    if family == "mixtral":
        model = MixtralForCausalLM(
            MixtralConfig(intermediate_size=128, num_local_experts=4, sliding_window=None, **shape)
        )
    elif family == "jamba":
        layers = {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 16,
            "mamba_dt_rank": 8,
        }
        model = JambaForCausalLM(JambaConfig(intermediate_size=128, num_experts=4, **layers, **shape))
    else:
        experts = {"num_experts": 8, "moe_intermediate_size": 64, "norm_topk_prob": True, "head_dim": 32}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(intermediate_size=128, **experts, **shape))
    model.save_pretrained(path)
    if tokenizer:
        byte_tokenizer().save_pretrained(path)
    return str(path)
