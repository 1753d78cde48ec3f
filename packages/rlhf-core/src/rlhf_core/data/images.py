"""What a model is given of the images of a row, beside the row's tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rlhf_core.data.pickled import reduced
from rlhf_core.errors import CapabilityError


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowImages:
    """The images of one row, as the model's processor makes them.

    They stay in host memory until the micro-batch of their row runs, and rows that show the same images share them.

    >>> one = RowImages(tensors={"pixel_values": torch.zeros(1, 3, 8, 8)}, token_ids=(9,))
    >>> joined_images([one, one])["pixel_values"].shape
    torch.Size([2, 3, 8, 8])
    """

    tensors: Mapping[str, Tensor]
    """Argument of the forward pass -> the tensor of this row alone: `pixel_values`, `image_grid_thw`, ..."""
    token_ids: tuple[int, ...]
    """Tokens in whose places the model puts what it makes of the images."""
    row_dimension: bool = False
    """Whether the tensors are [1, images, ...] (Idefics, SmolVLM), not [images or patches, ...]."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return reduced(self, protocol)

    @property
    def layout(self) -> tuple[object, ...]:
        """Equal for rows that can run together: names, types, and all sizes but the number of images or patches."""
        joined = int(self.row_dimension)
        shapes = [
            (name, one.dtype, *one.shape[:joined], *one.shape[joined + 1 :]) for name, one in self.tensors.items()
        ]
        return self.row_dimension, *sorted(shapes, key=str)


class LoadsImages(Protocol):
    """The images of a row as they are stored: what the model is shown of them is made when their batch is."""

    def load(self) -> RowImages:
        """What the model is given.

        Raises:
            DataError: an image is not what it was when the data was read.
        """
        ...


def loaded_images(rows: Iterable[LoadsImages | None]) -> tuple[RowImages | None, ...]:
    """What the model is shown of each row, loaded once for all rows of one source; empty if no row has any."""
    sources = list(rows)
    loaded = {id(one): one.load() for one in {id(one): one for one in sources if one is not None}.values()}
    return tuple(loaded.get(id(one)) for one in sources) if loaded else ()


def joined_images(rows: Sequence[RowImages]) -> dict[str, Tensor]:
    """The arguments of a forward pass over several rows, in their order.

    Raises:
        CapabilityError: the images of some row have another size or form than those of another.
    """
    first = rows[0]
    for row in rows[1:]:
        if row.layout != first.layout:
            raise CapabilityError(
                f"the images of two rows cannot run together: {first.layout} and {row.layout}; resize them alike"
            )
    return {
        name: torch.cat([row.tensors[name] for row in rows], dim=int(first.row_dimension)) for name in first.tensors
    }
