"""Images of a dataset's rows: found and checked when the data is read, decoded again when their batch is made."""

from __future__ import annotations

import hashlib
import io
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core import MAX_IMAGE_BYTES, ConfigError, DataError, decoded_image

from rlhf_algos.data.sources import Row

IMAGE_COLUMNS = ("images", "image")
"""A list of images, or one."""
_URL_SECONDS = 20.0
_REDIRECTS = 3


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StoredImage:
    """An image as it is stored: its bytes, or the file that holds them."""

    place: str
    """For messages: `pairs.jsonl row 7, image 1`."""
    digest: str
    """SHA-256 of its bytes."""
    path: Path | None = None
    content: bytes | None = None

    def open(self) -> Any:
        """The image in RGB, turned as its camera says.

        Raises:
            DataError: it cannot be decoded, is too large, or is another one than when the data was read.
        """
        content = _file_bytes(self.path, self.place) if self.content is None and self.path else self.content or b""
        if hashlib.sha256(content).hexdigest() != self.digest:
            raise DataError(f"{self.place}: {str(self.path)!r} has changed since the data was read; start again")
        return decoded_image(content, self.place)


def row_images(row: Row, *, urls: bool = False) -> list[StoredImage]:
    """The images of a row, in their order; none if it has no such column, or nothing in it.

    Args:
        row: of a dataset.
        urls: whether images may be fetched.

    Raises:
        DataError: an image that is not there, may not be read or cannot be decoded; names the row.
    """
    given = [name for name in IMAGE_COLUMNS if row.values.get(name) not in (None, "", [], ())]
    if not given:
        return []
    if len(given) > 1:
        raise DataError(f"{row.place} has both {IMAGE_COLUMNS[0]!r} and {IMAGE_COLUMNS[1]!r}; keep one of them")
    value = row[given[0]]
    listed = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    found: list[StoredImage] = []
    for number, one in enumerate(value if listed else [value], 1):
        stored = _stored(one, row, f"{row.place}, image {number}", urls=urls)
        stored.open()
        found.append(stored)
    return found


def _stored(value: Any, row: Row, place: str, *, urls: bool) -> StoredImage:
    if isinstance(value, Mapping):
        content, name = value.get("bytes"), value.get("path")
        value = content if content is not None else name
    if isinstance(value, str):
        if "://" in value or value.startswith("data:"):
            return _of_bytes(_fetched(value, place, allowed=urls), place)
        path = _path_beside(value, row, place)
        return StoredImage(place=place, digest=hashlib.sha256(_file_bytes(path, place)).hexdigest(), path=path)
    if isinstance(value, bytes):
        return _of_bytes(value, place)
    if hasattr(value, "save") and hasattr(value, "convert"):  # an image of PIL, whose pixels PNG keeps
        file = io.BytesIO()
        value.convert("RGB").save(file, format="PNG")
        return _of_bytes(file.getvalue(), place)
    raise DataError(
        f"{place} is a {type(value).__name__}; write a path relative to the data file, bytes, or "
        '{"bytes": ..., "path": ...}'
    )


def _of_bytes(content: bytes, place: str) -> StoredImage:
    if len(content) > MAX_IMAGE_BYTES:
        raise DataError(f"{place} has {len(content):,} bytes, at most {MAX_IMAGE_BYTES:,} are read")
    return StoredImage(place=place, digest=hashlib.sha256(content).hexdigest(), content=content)


def _path_beside(value: str, row: Row, place: str) -> Path:
    """The file of a path relative to the data file, under whose directory it stays."""
    source = Path(row.source)
    if not source.is_file():
        raise DataError(
            f"{place} is the path {value!r}, and {row.source!r} is no file that it could lie beside; store the "
            "images themselves in the dataset"
        )
    folder = source.parent.resolve()
    path = (folder / value).resolve()
    if Path(value).is_absolute() or not path.is_relative_to(folder):
        raise DataError(
            f"{place}: {value!r} does not lie under the directory of the data file, {str(folder)!r}; write a path "
            "relative to it, without links that lead elsewhere"
        )
    if not path.is_file():
        raise DataError(f"{place}: there is no file {str(path)!r}")
    return path


def _file_bytes(path: Path, place: str) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_IMAGE_BYTES + 1)
    except OSError as error:
        raise DataError(f"{place}: {str(path)!r} cannot be read: {error}") from error
    if len(content) > MAX_IMAGE_BYTES:
        raise DataError(f"{place}: {str(path)!r} has more than {MAX_IMAGE_BYTES:,} bytes, the most that are read")
    return content


def _fetched(url: str, place: str, *, allowed: bool) -> bytes:
    if not url.startswith(("https://", "http://")):
        raise DataError(f"{place}: {url[:60]!r} is no image that is read; write a path, or bytes")
    if not allowed:
        raise DataError(
            f"{place} is the URL {url[:80]!r}, and nothing is fetched unless data.image_urls: true asks for it"
        )
    try:
        import httpx
    except ImportError:
        raise ConfigError("data.image_urls needs httpx; install rlhf-algos[vision]") from None
    content, end = bytearray(), time.monotonic() + _URL_SECONDS
    try:
        with (
            httpx.Client(follow_redirects=True, max_redirects=_REDIRECTS, timeout=_URL_SECONDS) as client,
            client.stream("GET", url) as response,
        ):
            response.raise_for_status()
            for part in response.iter_bytes():
                content += part
                if len(content) > MAX_IMAGE_BYTES:
                    raise DataError(f"{place}: {url[:80]!r} gives more than {MAX_IMAGE_BYTES:,} bytes")
                if time.monotonic() > end:
                    raise DataError(f"{place}: {url[:80]!r} takes more than {_URL_SECONDS:g} s")
    except httpx.HTTPError as error:
        raise DataError(f"{place}: {url[:80]!r} cannot be fetched: {type(error).__name__}: {error}") from error
    return bytes(content)
