"""Images in a model's forward pass: what its processor makes of them, and what its backbone is given.

The model computes its positions itself, from token types that say which tokens stand for images. Where several
ranks train or hold one model together, all must run the image encoder in every micro-batch, or none: collectives of
the encoder's parameters would not match, and the ranks would wait for each other for ever. So there a micro-batch
without images gets one more row, with a small image, whose states count zero times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlhf_core.data.batch import Batch, concatenate
from rlhf_core.data.images import RowImages, joined_images
from rlhf_core.errors import CapabilityError, ConfigError

_ATTRIBUTE = "_rlhf_vision"
_TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")
"""Names that families give to the argument which is 1 for tokens of images and 0 for text."""
_SIZES = ((60, 60), (60, 88), (84, 60))
"""Height and width of the images of a trial: whole numbers of patches of no family, so each resizes them."""


def load_processor(model: str, *, trust_remote_code: bool = False, what: str = "model") -> Any:
    """The processor of a vision-language model: its tokenizer and what it makes of images.

    Raises:
        ConfigError: there is none, or it takes no images.
    """
    from transformers import AutoProcessor

    try:
        processor = AutoProcessor.from_pretrained(model, trust_remote_code=trust_remote_code)
    except Exception as error:  # a broken file ends in any of a dozen errors
        said = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            f"{what} {model!r} has no processor for images that can be loaded: {type(error).__name__}: {said}; "
            "copy its files (preprocessor_config.json or processor_config.json) beside the model"
        ) from error
    if any(getattr(processor, part, None) is None for part in ("image_processor", "tokenizer", "image_token")):
        raise ConfigError(
            f"{what} {model!r} has no processor for images, only {type(processor).__name__}; give a "
            "vision-language model with its processor's files, or rows of text"
        )
    return processor


def image_row(
    processor: Any, text: str, images: Sequence[Any], *, add_special_tokens: bool = True
) -> tuple[list[int], RowImages]:
    """The token ids of a text with images, the places of images expanded, and what the model is shown.

    Args:
        processor: see `load_processor`.
        text: with the processor's token for an image once for each of them.
        images: in their order: PIL images, or arrays [height, width, 3] of 8 bits.
        add_special_tokens: whether the tokenizer puts its own before and after the text.

    Raises:
        CapabilityError: the processor says of tokens something that does not follow from the tokens.
        ValueError: the text has another number of places for images.
    """
    found = dict(
        processor(
            text=[text],
            images=[list(images)],
            return_tensors="pt",
            return_mm_token_type_ids=True,
            add_special_tokens=add_special_tokens,
        )
    )
    ids: list[int] = found.pop("input_ids")[0].tolist()
    found.pop("attention_mask", None)
    types = next((found.pop(name)[0] for name in _TOKEN_TYPES if name in found), None)
    if types is None:
        raise CapabilityError(f"{type(processor).__name__} does not say which tokens stand for images")
    tokens = tuple(sorted({token for token, kind in zip(ids, types.tolist(), strict=True) if kind}))
    if not tokens or types.tolist() != [int(token in tokens) for token in ids]:
        raise CapabilityError(
            f"the token types of {type(processor).__name__} do not follow from its tokens; use another model family"
        )
    tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
    pixels = tensors.get("pixel_values")
    if len(tensors) < len(found) or pixels is None:
        raise CapabilityError(
            f"{type(processor).__name__} gives {', '.join(sorted(found))}; only pixel_values and other tensors are "
            "known here; use another model family"
        )
    nested = pixels.dim() == 5 and pixels.shape[0] == 1 and "image_sizes" not in tensors
    return ids, RowImages(tensors=tensors, token_ids=tokens, row_dimension=nested)


def has_vision_class(config: Any) -> bool:
    """Whether a model of this configuration (Transformers) is loaded with its image encoder.

    It is, if its checkpoint was written by the class that has one, or its family has no other causal model.
    """
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    )

    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return False
    family: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    seeing = family.__name__
    return type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or seeing in (
        getattr(config, "architectures", None) or ()
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Vision:
    """How a model that was loaded for rows with images is given them."""

    trial: Batch
    """Rows with one image, with none and with two; the last few tokens of each count."""

    @classmethod
    def of(cls, model: nn.Module) -> Vision | None:
        """That of this model; None if it was loaded for text."""
        return vars(model).get(_ATTRIBUTE)

    @classmethod
    def load(cls, model: str, *, trust_remote_code: bool = False) -> Vision:
        """By the processor of a model.

        Raises:
            ConfigError: there is none, or it is none that works here.
        """
        processor = load_processor(model, trust_remote_code=trust_remote_code)
        try:
            return cls(trial=_trial_rows(processor))
        except (CapabilityError, AttributeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"the processor of model {Path(model).name!r} ({type(processor).__name__}) cannot be used for rows "
                f"with images: {error}"
            ) from error

    def settle(self, model: nn.Module) -> None:
        """Make it that of this model."""
        object.__setattr__(model, _ATTRIBUTE, self)

    def filled(self, batch: Batch) -> Batch:
        """The batch, after which comes the first row of the trial if none of its rows has images."""
        if batch.images:
            return batch
        extra = self.trial.select([0]).to(batch.token_ids.device)
        rows = replace(batch, columns={}, rows_per_unit=1, sample_ids=(), temperature=1.0)
        return concatenate([rows, replace(extra, response_mask=torch.zeros_like(extra.response_mask))])


def sees_in_every_pass(model: nn.Module) -> bool:
    """Whether every micro-batch must run the image encoder, as other ranks may."""
    distributed = torch.distributed
    several = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
    return several and Vision.of(model) is not None


def image_arguments(model: Any, body: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """What the backbone `body` is given beside the tokens of a batch; nothing for a batch of text.

    Raises:
        CapabilityError: the model was not loaded for images.
    """
    shown = [one for one in batch.images if one is not None]
    if not shown:
        return {}
    if Vision.of(model) is None:
        raise CapabilityError(
            f"a batch has images, and {type(model).__name__} was loaded for text; give EngineConfig.images=True"
        )
    device, dtype = batch.token_ids.device, model.get_input_embeddings().weight.dtype
    given = {
        name: tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)
        for name, tensor in joined_images(shown).items()
    }
    return given | token_types(body, batch.token_ids, shown)


def token_types(body: nn.Module, ids: Tensor, images: Sequence[RowImages]) -> dict[str, Tensor]:
    """The token types that the model asks for: 1 where a token stands for an image, else 0."""
    asked = signature(type(body).forward).parameters
    tokens = torch.tensor(sorted({token for one in images for token in one.token_ids}), device=ids.device)
    return {name: torch.isin(ids, tokens).int() for name in _TOKEN_TYPES if name in asked}


def _picture(index: int) -> np.ndarray[Any, Any]:
    """An image in which every place has another colour."""
    height, width = _SIZES[index]
    y, x = np.mgrid[0:height, 0:width]
    colours = np.stack([x * 3 + 40 * index, y * 3, (x + y) * 2 + 80 * index], axis=-1)
    return (colours % 256).astype(np.uint8)


def _trial_rows(processor: Any) -> Batch:
    token = processor.image_token
    rows = [
        image_row(processor, f"{token} a", [_picture(0)]),
        (processor.tokenizer("a b c")["input_ids"], None),
        image_row(processor, f"a {token} b {token}", [_picture(1), _picture(2)]),
    ]
    answer = processor.tokenizer("d e f g", add_special_tokens=False)["input_ids"]
    if not answer or not all(ids for ids, _ in rows):
        raise ValueError("its tokenizer makes no tokens of letters")
    return concatenate([_one_row(ids, answer, images) for ids, images in rows])


def _one_row(prompt: list[int], answer: list[int], images: RowImages | None) -> Batch:
    ids = torch.tensor([[*prompt, *answer]])
    return Batch(
        token_ids=ids,
        attention_mask=torch.ones_like(ids).bool(),
        response_mask=(torch.arange(ids.shape[1]) >= len(prompt))[None],
        images=() if images is None else (images,),
    )
