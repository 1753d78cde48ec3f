"""Images in requests to vLLM: log-probs are those of the model that sees them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from rlhf_core import CapabilityError, GenerationRequest, RolloutConfig, Sample, SamplingConfig
from rlhf_rollout import VLLMBackend
from tiny_vision_model import save_tiny_vision_model

pytestmark = pytest.mark.stack

TEXT = "left <|vision_start|><|image_pad|><|vision_end|> right <|vision_start|><|image_pad|><|vision_end|>?"


def noise(seed: int, size: tuple[int, int]) -> Image.Image:
    return Image.fromarray(numpy.random.default_rng(seed).integers(0, 255, (*size, 3), dtype=numpy.uint8))


@torch.no_grad()
def gap(model: Any, seen: Any, sample: Sample) -> float:
    """Largest difference to a forward pass of the processor's own inputs, continued by the sample."""
    inputs, length = dict(seen), seen["input_ids"].shape[1]
    inputs["input_ids"] = torch.cat([seen["input_ids"], torch.tensor([sample.token_ids])], dim=1)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    text = torch.zeros(1, sample.length, dtype=seen["mm_token_type_ids"].dtype)
    inputs["mm_token_type_ids"] = torch.cat([seen["mm_token_type_ids"], text], dim=1)
    log_probs = model(**inputs).logits[0, length - 1 : -1].log_softmax(dim=-1)
    expected = log_probs.gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
    return float((expected - torch.tensor(sample.log_probs)).abs().max())


def test_samples_see_the_images_in_the_order_of_their_placeholders(tmp_path: Path) -> None:
    model, processor = save_tiny_vision_model(tmp_path)
    options = {"limit_mm_per_prompt": {"image": 2, "video": 0}}
    backend = VLLMBackend(RolloutConfig(model=str(tmp_path), max_model_len=256, max_num_seqs=8, options=options))
    assert backend.capabilities.images
    images = (noise(0, (56, 84)), noise(1, (112, 56)))
    prompt = tuple(processor.tokenizer(TEXT)["input_ids"])

    def request(*shown: Image.Image, tokens: tuple[int, ...] = prompt) -> GenerationRequest:
        sampling = SamplingConfig(max_tokens=12)
        return GenerationRequest(
            request_id="r", prompt_token_ids=tokens, sampling=sampling, n=2, seed=0, images=shown
        )

    for shown in (images, images[::-1]):
        seen = processor(text=TEXT, images=list(shown), return_tensors="pt")
        samples = asyncio.run(backend.generate(request(*shown))).samples
        assert max(gap(model, seen, sample) for sample in samples) < 1e-4
    other = processor(text=TEXT, images=list(images), return_tensors="pt")
    assert gap(model, other, samples[0]) > 0.01, "the images must matter, or nothing was shown"

    repeated = tuple(other["input_ids"][0].tolist())
    with pytest.raises(CapabilityError, match=r"2 images, but the prompt has the image token \d+ 14 times"):
        asyncio.run(backend.generate(request(*images, tokens=repeated)))
    with pytest.raises(CapabilityError, match="1 images, but the prompt"):
        asyncio.run(backend.generate(request(images[0])))
    backend.close()
