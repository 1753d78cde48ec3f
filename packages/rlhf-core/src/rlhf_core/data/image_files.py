"""Images as files hold them, decoded within bounds: they come from datasets and from clients."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rlhf_core.errors import ConfigError, DataError

MAX_IMAGE_BYTES = 64 << 20
"""Of an image as it is stored or sent."""
MAX_IMAGE_PIXELS = 64_000_000
"""Of an image that is decoded."""
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")


def decoded_image(content: bytes, place: str) -> Any:
    """An image of PIL in RGB, turned as its camera says.

    Its size is looked at before it is decoded, as a small file can hold a very large image, and formats are those
    whose decoders start no other programs.

    Args:
        content: the bytes of a file: PNG, JPEG, WebP, BMP or GIF.
        place: where it comes from, for messages: `pairs.jsonl row 7, image 1`.

    Raises:
        DataError: these bytes are no image of a known format, are cut off, or would have too many pixels.
        ConfigError: pillow is not installed.
    """
    image, ops = _opened(content, place)
    with _named(place):
        image.load()
        return ops.exif_transpose(image).convert("RGB")


def image_pixels(content: bytes, place: str) -> int:
    """How many pixels an image has, without decoding them; see `decoded_image`.

    Raises:
        DataError, ConfigError: as there.
    """
    width, height = _opened(content, place)[0].size
    return width * height


def _opened(content: bytes, place: str) -> tuple[Any, Any]:
    """The image, not decoded yet, and the module that turns it."""
    image_module, ops = _pillow()
    with _named(place):
        image = image_module.open(io.BytesIO(content), formats=_FORMATS)
        width, height = image.size
    if width * height > MAX_IMAGE_PIXELS or min(width, height) < 1:
        raise DataError(
            f"{place} has {width} x {height} pixels, at most {MAX_IMAGE_PIXELS:,} are decoded; "
            "make the image smaller"
        )
    return image, ops


@contextmanager
def _named(place: str) -> Iterator[None]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of PIL about sizes below our own bound
            yield
    except Exception as error:  # decoders raise any of a dozen errors on damaged files
        raise DataError(
            f"{place} cannot be decoded as {', '.join(_FORMATS)}: {type(error).__name__}: {str(error)[:200]}"
        ) from error


def _pillow() -> tuple[Any, Any]:
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise ConfigError("images need pillow and torchvision; install rlhf-algos[vision]") from None
    return Image, ImageOps
