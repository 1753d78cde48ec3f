"""Images in chat messages: taken from what clients send, and the tokens in whose places a model sees them."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rlhf_core import (
    MAX_IMAGE_BYTES,
    MAX_IMAGE_PIXELS,
    CapabilityError,
    ConfigError,
    DataError,
    PackedInts,
    RowImages,
    decoded_image,
    image_pixels,
    image_row,
)

_DATA_URL = re.compile(r"data:image/[a-zA-Z0-9.+-]{1,40};base64,")
_TRIAL_SIZE = (60, 88)
"""Height and width of the image of a trial: whole numbers of patches of no family."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatImage:
    """An image of a message, as its client sent it. Equal content is an equal image."""

    content: bytes
    digest: str
    place: str
    """For messages: `message 3, image 1`."""

    @classmethod
    def of_data_url(cls, url: Any, place: str) -> ChatImage:
        """The image in a URL `data:image/png;base64,...`.

        Raises:
            DataError: it is none: nothing is fetched for a client.
        """
        found = _DATA_URL.match(url) if isinstance(url, str) else None
        if found is None:
            raise DataError(
                f"{place}: an image must be in the request, as a URL `data:image/png;base64,...`; got "
                f"{str(url)[:60]!r}"
            )
        if len(url) > MAX_IMAGE_BYTES * 4 // 3:
            raise DataError(f"{place} has more than {MAX_IMAGE_BYTES:,} bytes; make the image smaller")
        try:
            content = base64.b64decode(url[found.end() :], validate=True)
        except (binascii.Error, ValueError) as error:
            raise DataError(f"{place} is not base64: {error}") from None
        return cls(content=content, digest=hashlib.sha256(content).hexdigest(), place=place)

    def open(self) -> Any:
        """The image itself, of PIL.

        Raises:
            DataError: it cannot be decoded, or is too large.
        """
        return decoded_image(self.content, self.place)


def image_parts(message: Mapping[str, Any]) -> list[ChatImage]:
    """The images of a message, as `plain_message` gives it."""
    content = message.get("content")
    return [part["image"] for part in content if part["type"] == "image"] if isinstance(content, list) else []


def check_pixels(messages: Iterable[Mapping[str, Any]]) -> None:
    """Refuse images that would take much memory once they are decoded; a few bytes can hold many pixels.

    Raises:
        DataError: they have too many pixels together, or one cannot be read.
    """
    images = [image for message in messages for image in image_parts(message)]
    pixels = sum(image_pixels(image.content, image.place) for image in images)
    if pixels > MAX_IMAGE_PIXELS:
        raise DataError(
            f"the {len(images)} images of the conversation have {pixels:,} pixels, at most {MAX_IMAGE_PIXELS:,} "
            "are decoded; send smaller images"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextImages:
    """The images of a context, and its tokens as an engine is asked about them."""

    images: tuple[ChatImage, ...]
    request_token_ids: PackedInts
    """One token for each image: the engine puts as many there as the image takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """Tokens that lead to a turn."""

    token_ids: PackedInts
    """As the model runs them: each image has as many as it takes."""
    images: ContextImages | None = None
    """None for text alone."""


class ImageTokens:
    """Tokens of texts with images, by a model's processor.

    A small image is tried at once, so that a processor that does not work is found out before anybody asks.

    Raises:
        ConfigError: the processor says of its tokens what cannot be used here.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        picture = np.arange(_TRIAL_SIZE[0] * _TRIAL_SIZE[1] * 3, dtype=np.uint8).reshape(*_TRIAL_SIZE, 3)
        try:
            _, seen = image_row(processor, processor.image_token, [picture], add_special_tokens=False)
        except (CapabilityError, AttributeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{type(processor).__name__} cannot be used for chats with images: {error}; use another model "
                "family"
            ) from error
        self.token_ids = seen.token_ids
        """Tokens that stand for images; no text may have them."""
        mark = processor.tokenizer(processor.image_token, add_special_tokens=False)["input_ids"]
        self.marks = frozenset({*seen.token_ids, *mark})
        """These, and those by which an engine finds the places of images in a prompt."""
        self._layout = seen.layout

    def context(self, text: str, images: Sequence[ChatImage]) -> Context:
        """The tokens of a text which has the processor's mark once for each image.

        Raises:
            DataError: it has another number of marks, or a text of the conversation has a token of images.
        """
        mark, tokenizer = self._processor.image_token, self._processor.tokenizer

        def tokens_of(text: str) -> PackedInts:
            return PackedInts(tokenizer(text, add_special_tokens=False)["input_ids"] if text else ())

        if (marks := text.count(mark)) != len(images):
            raise DataError(
                f"the conversation has {len(images)} images here, and the text of its messages {marks} places for "
                f"them; leave {mark!r} out of texts (or the chat template does not show all images)"
            )
        self.check_text(tokens_of(text.replace(mark, "")))
        if not images:
            return Context(token_ids=tokens_of(text))
        try:
            opened = [image.open() for image in images]
            ids, seen = image_row(self._processor, text, opened, add_special_tokens=False)
        except (CapabilityError, ValueError, TypeError, RuntimeError) as error:
            raise DataError(
                f"{type(self._processor).__name__} cannot take the images: {type(error).__name__}: "
                f"{str(error)[:300]}"
            ) from error
        if seen.layout != self._layout:
            raise DataError(
                f"{images[0].place}: the processor makes {seen.layout} of it, which cannot run together with "
                f"{self._layout}, which it makes of other images; resize them alike"
            )
        asked = ContextImages(images=tuple(images), request_token_ids=tokens_of(text))
        return Context(token_ids=PackedInts(ids), images=asked)

    def check_text(self, token_ids: PackedInts) -> None:
        """Refuse tokens of images where there is none: to a trainer's model they would be the place of one.

        Raises:
            DataError: there is one.
        """
        if found := next((token for token in self.token_ids if token_ids.count(token)), None):
            said = self._processor.tokenizer.decode([found])
            raise DataError(f"a text has the token of an image ({said!r}); leave it out")

    def loaded(self, images: Sequence[ChatImage]) -> RowImages:
        """What a model is given of the images of a row."""
        marks = self._processor.image_token * len(images)
        return image_row(self._processor, marks, [image.open() for image in images], add_special_tokens=False)[1]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ConversationImages:
    """The images of a trajectory (see `rlhf_core.LoadsImages`): the processor's tensors are made with its batch."""

    images: tuple[ChatImage, ...]
    tokens: ImageTokens

    def load(self) -> RowImages:
        """What the model is given."""
        return self.tokens.loaded(self.images)
