"""Tiny random vision-language models with their processors, made on the spot: no download, no training."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch

from rlhf_core.testing.tiny import byte_tokenizer

VisionFamily = Literal["qwen2_vl", "qwen2_5_vl", "gemma3", "idefics3"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ IMAGE }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Takes contents as text and as parts, as those of the families do."""
_QWEN_TOKENS = {
    "vision_start": "<|vision_start|>",
    "vision_end": "<|vision_end|>",
    "image": "<|image_pad|>",
    "video": "<|video_pad|>",
}
_GEMMA_TOKENS = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}
_IDEFICS_TOKENS = {
    "fake": "<fake_token_around_image>",
    "image": "<image>",
    "end": "<end_of_utterance>",
    "global": "<global-img>",
}
_PIXELS = 28 * 28


def save_tiny_vision_model(
    path: Path | str, family: VisionFamily = "qwen2_vl", *, hidden_size: int = 64, seed: int = 0
) -> str:
    """Write a random float32 model of two layers with an image encoder, and its processor; returns the path.

    The weights are larger than the usual initialisation, so that log-probs differ clearly between images.
    """
    torch.manual_seed(seed)
    makers = {"gemma3": _gemma, "idefics3": _idefics}
    model, processor = makers.get(family, _qwen)(family, hidden_size)
    model.save_pretrained(path)
    processor.save_pretrained(path)
    return str(path)


def _text(hidden_size: int, tokenizer: Any, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": 320,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": True,
        **more,
    }


def _tokenizer(tokens: dict[str, str], image: str) -> Any:
    tokenizer: Any = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens.values())})
    tokenizer.chat_template = CHAT_TEMPLATE.replace("IMAGE", repr(image))
    return tokenizer


def _qwen(family: str, hidden_size: int) -> tuple[Any, Any]:
    import transformers as t

    marks = _QWEN_TOKENS
    tokenizer = _tokenizer(marks, f"{marks['vision_start']}{marks['image']}{marks['vision_end']}")
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(marks.values()))
    head = hidden_size // 4
    section = [head // 8, head // 16 * 3, head // 16 * 3]
    rope = {"rope_type": "default", "mrope_section": section, "rope_theta": 10000.0}
    tokens = {
        "image_token_id": image,
        "video_token_id": video,
        "vision_start_token_id": start,
        "vision_end_token_id": end,
    }
    text = _text(hidden_size, tokenizer, rope_parameters=rope)
    if family == "qwen2_vl":
        vision = {"depth": 1, "embed_dim": 32, "hidden_size": hidden_size, "num_heads": 2, "mlp_ratio": 2}
        made: Any = t.Qwen2VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **tokens)
        model: Any = t.Qwen2VLForConditionalGeneration(made)
        processor_class: Any = t.Qwen2VLProcessor
    else:
        vision = {
            "depth": 2,
            "hidden_size": 32,
            "out_hidden_size": hidden_size,
            "num_heads": 2,
            "intermediate_size": 64,
            "fullatt_block_indexes": [1],
        }
        made = t.Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **tokens)
        model = t.Qwen2_5_VLForConditionalGeneration(made)
        processor_class = t.Qwen2_5_VLProcessor
    processor = processor_class(
        image_processor=t.Qwen2VLImageProcessor(min_pixels=4 * _PIXELS, max_pixels=16 * _PIXELS),
        tokenizer=tokenizer,
        video_processor=t.Qwen2VLVideoProcessor(),
        chat_template=tokenizer.chat_template,
    )
    return model, processor


def _gemma(family: str, hidden_size: int) -> tuple[Any, Any]:
    import transformers as t

    tokenizer = _tokenizer(_GEMMA_TOKENS, _GEMMA_TOKENS["boi_token"])
    # Gemma's tokenizer has lines' ends as tokens of their own, among which vLLM looks for those around an image.
    tokenizer.add_tokens(["\n" * count for count in range(1, 5)])
    # As attributes of the tokenizer, and in what it writes down.
    tokenizer = _with_attributes(tokenizer, _GEMMA_TOKENS)
    text = _text(
        hidden_size,
        tokenizer,
        head_dim=hidden_size // 4,
        sliding_window=512,
        query_pre_attn_scalar=hidden_size // 4,
        layer_types=["sliding_attention", "full_attention"],
    )
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 56,
        "patch_size": 14,
        "vision_use_head": False,
    }
    made: Any = t.Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        boi_token_index=tokenizer.boi_token_id,
        eoi_token_index=tokenizer.eoi_token_id,
        image_token_index=tokenizer.image_token_id,
        tie_word_embeddings=True,
    )
    model: Any = t.Gemma3ForConditionalGeneration(made)
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.3)
    processor = t.Gemma3Processor(
        image_processor=t.Gemma3ImageProcessor(size={"height": 56, "width": 56}),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
        image_seq_length=4,
    )
    return model, processor


def _idefics(family: str, hidden_size: int) -> tuple[Any, Any]:
    import transformers as t

    tokenizer = _tokenizer(_IDEFICS_TOKENS, _IDEFICS_TOKENS["image"])
    text = _text(hidden_size, tokenizer, model_type="llama")
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
    }
    made: Any = t.Idefics3Config(
        text_config=text,
        vision_config=vision,
        image_token_id=tokenizer.convert_tokens_to_ids(_IDEFICS_TOKENS["image"]),
        scale_factor=2,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    model: Any = t.Idefics3ForConditionalGeneration(made)
    processor = t.Idefics3Processor(
        image_processor=t.Idefics3ImageProcessor(
            size={"longest_edge": 32}, max_image_size={"longest_edge": 32}, do_image_splitting=False
        ),
        tokenizer=tokenizer,
        image_seq_len=4,
        chat_template=tokenizer.chat_template,
    )
    return model, processor


def _with_attributes(tokenizer: Any, tokens: dict[str, str]) -> Any:
    """The tokenizer with these tokens as attributes of their names, `boi_token` and `boi_token_id`."""
    from transformers import PreTrainedTokenizerFast

    made: Any = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        pad_token=tokenizer.pad_token,
        eos_token=tokenizer.eos_token,
        extra_special_tokens=tokens,
    )
    made.chat_template = tokenizer.chat_template
    return made
