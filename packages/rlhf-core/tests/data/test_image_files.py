"""Images of files: what is decoded, and what is refused before it costs memory."""

import io

import numpy as np
import pytest
from PIL import Image
from rlhf_core import DataError, decoded_image, image_pixels
from rlhf_core.data import image_files


def encoded(image: Image.Image, kind: str) -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "BMP", "GIF", "WEBP", "JPEG"])
def test_known_formats_come_as_rgb(kind):
    image = decoded_image(encoded(Image.new("L", (5, 3), 128), kind), "a picture")
    assert image.mode == "RGB"
    assert image.size == (5, 3)
    assert abs(int(np.asarray(image)[0, 0, 0]) - 128) <= 2


def test_what_is_no_image_is_named():
    for content in (b"", b"no image", encoded(Image.new("RGB", (64, 64), "red"), "PNG")[:60]):
        with pytest.raises(DataError, match="pairs row 7 cannot be decoded"):
            decoded_image(content, "pairs row 7")
    with pytest.raises(DataError, match="cannot be decoded"):
        decoded_image(encoded(Image.new("RGB", (2, 2)), "TIFF"), "a file of a format that is not read")


def test_size_is_looked_at_before_pixels_are_made(monkeypatch):
    content = encoded(Image.new("1", (400, 400)), "PNG")
    assert image_pixels(content, "a small file") == 160_000
    monkeypatch.setattr(image_files, "MAX_IMAGE_PIXELS", 100_000)
    with pytest.raises(DataError, match="400 x 400 pixels, at most 100,000"):
        decoded_image(content, "a small file")
    with pytest.raises(DataError, match="at most 100,000"):
        image_pixels(content, "a small file")
