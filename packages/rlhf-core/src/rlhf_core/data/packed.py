"""Immutable sequences of numbers that are one array inside: tokens, log-probs and masks by the million."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Self, TypeVar, overload

import numpy as np
import torch
from numpy.typing import NDArray

T = TypeVar("T", int, float, bool)
_SHOWN = 64


class Packed(Sequence[T]):
    """A sequence that behaves as a tuple of Python numbers and holds one array of four bytes a number, or fewer.

    It is made of any sequence, array or tensor of one dimension; a number that its type cannot hold is refused, and
    a float is rounded to the nearest one that it can. `numpy.asarray` gives the array, which cannot be written,
    without a copy. An array that can be written is copied, another one is shared: memory that another process
    wrote (Ray's object store) is read where it is. A pickle of protocol 5 has the array as one buffer out of band.

    `+` concatenates, `*` repeats, `==` compares the whole, all as for tuples: nothing is ever done by element, also
    not with arrays.

    >>> PackedInts((5, 6)) + (7,), PackedInts([5, 6, 7])[1:] == (6, 7), PackedFlags([True]) * 2
    (PackedInts([5, 6, 7]), True, PackedFlags([True, True]))

    Raises:
        TypeError: what is given is no sequence of such numbers.
        ValueError: it has more than one dimension, or a number that the type cannot hold.
    """

    __slots__ = ("_array",)
    __array_ufunc__ = None  # an array with this on the other side of an operator leaves it to this class

    kind: ClassVar[np.dtype[Any]]
    """Of the numbers in memory."""
    takes: ClassVar[str]
    """Kinds of numbers that are converted, by numpy's letters."""

    def __init__(self, values: Sequence[Any] | NDArray[Any] | torch.Tensor | Packed[Any] = ()) -> None:
        self._array: NDArray[Any] = self._converted(values)
        self._array.flags.writeable = False

    @classmethod
    def of(cls, values: Sequence[Any] | NDArray[Any] | torch.Tensor | Packed[Any]) -> Self:
        """The values in this form: themselves, if they have it."""
        return values if type(values) is cls else cls(values)

    @classmethod
    def full(cls, length: int, value: T) -> Self:
        """One number many times."""
        return cls._owning(np.full(length, value, dtype=cls.kind))

    @classmethod
    def joined(cls, parts: Sequence[Sequence[Any] | NDArray[Any] | Packed[Any]]) -> Self:
        """All parts one after the other, with one copy."""
        arrays = [np.asarray(cls.of(part)) for part in parts]
        return cls._owning(np.concatenate(arrays)) if arrays else cls()

    @classmethod
    def _owning(cls, array: NDArray[Any]) -> Self:
        """An array that nobody else knows."""
        new = object.__new__(cls)
        array.flags.writeable = False
        new._array = array
        return new

    @classmethod
    def _converted(cls, values: Any) -> NDArray[Any]:
        """An array of this kind that nobody will write."""
        if isinstance(values, torch.Tensor):
            values = values.detach().cpu()
            values = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
        given = np.asarray(values if hasattr(values, "__array__") else tuple(values))
        if given.ndim != 1:
            raise ValueError(f"{cls.__name__} is a sequence of numbers, got an array of shape {given.shape}")
        if given.dtype == cls.kind:
            return np.array(given) if given.flags.writeable else given.view()
        if not given.size:
            return np.empty(0, dtype=cls.kind)
        if given.dtype.kind not in cls.takes:
            example = given.tolist()[0]
            raise TypeError(f"{cls.__name__} holds {cls.kind} numbers, got {given.dtype} such as {example!r}")
        with np.errstate(over="ignore"):
            array = given.astype(cls.kind)
        if cls.kind.kind != "f" and bool((wrong := array != given).any()):
            raise ValueError(f"{cls.__name__} holds {cls.kind} numbers, got {given[int(wrong.argmax())]}")
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if dtype is None or np.dtype(dtype) == self.kind:
            return np.array(self._array) if copy else self._array
        if copy is False:
            raise ValueError(f"{type(self).__name__} cannot be seen as {np.dtype(dtype)} without a copy")
        return self._array.astype(dtype)

    def tolist(self) -> list[T]:
        """Python's numbers."""
        return self._array.tolist()

    def __len__(self) -> int:
        return len(self._array)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> T | Self:
        if isinstance(index, slice):
            return self._owning(self._array[index])
        return self._array[index].item()

    def __iter__(self) -> Iterator[T]:
        return iter(self._array.tolist())

    def __contains__(self, value: object) -> bool:
        return isinstance(value, (bool, int, float, np.number)) and bool((self._array == value).any())

    def index(self, value: Any, start: int = 0, stop: int | None = None) -> int:
        """See tuple."""
        found = self._array[start:stop] == value
        if not found.any():
            raise ValueError(f"{value!r} is not in the sequence")
        return range(len(self))[start:stop][int(found.argmax())]

    def count(self, value: Any) -> int:
        """See tuple."""
        return int(np.count_nonzero(self._array == value))

    def __add__(self, other: Any) -> Self:
        if isinstance(other, (tuple, list, type(self))):
            return self.joined((self, other))
        return NotImplemented

    def __radd__(self, other: Any) -> Self:
        if isinstance(other, (tuple, list)):
            return self.joined((other, self))
        return NotImplemented

    def __mul__(self, times: int) -> Self:
        return self._owning(np.tile(self._array, max(0, times))) if isinstance(times, int) else NotImplemented

    __rmul__ = __mul__

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (Packed, np.ndarray)):
            return bool(np.array_equal(self._array, np.asarray(other)))
        if isinstance(other, (tuple, list)):
            return len(other) == len(self) and self._array.tolist() == list(other)
        return NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self._array.tolist()))  # as that of the tuple that it equals

    def __repr__(self) -> str:
        shown = self._array[:_SHOWN].tolist()
        more = f", ... {len(self)} in all]" if len(self) > _SHOWN else "]"
        return f"{type(self).__name__}({str(shown)[:-1]}{more})"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        whole: Any = np.ascontiguousarray(self._array)
        return _unpickled, (type(self), pickle.PickleBuffer(whole) if protocol >= 5 else whole.tobytes())

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        return self


def _unpickled(cls: type[Packed[Any]], memory: Any) -> Packed[Any]:
    """Numbers in memory that the pickle brought, or that another process wrote."""
    return cls._owning(np.frombuffer(memory, dtype=cls.kind))  # pyright: ignore[reportPrivateUsage]


class PackedInts(Packed[int]):
    """Whole numbers of 32 bits: token ids, weight versions."""

    __slots__ = ()
    kind = np.dtype(np.int32)
    takes = "iub"


class PackedFloats(Packed[float]):
    """Floats of 32 bits: log-probs, which engines compute no finer."""

    __slots__ = ()
    kind = np.dtype(np.float32)
    takes = "fiu"


class PackedDoubles(Packed[float]):
    """Floats of 64 bits: rewards, which are given as Python's numbers and summed."""

    __slots__ = ()
    kind = np.dtype(np.float64)
    takes = "fiu"


class PackedFlags(Packed[bool]):
    """True or False: masks."""

    __slots__ = ()
    kind = np.dtype(np.bool_)
    takes = "biu"


IntsLike = Packed[Any] | Sequence[int] | NDArray[Any] | torch.Tensor
"""What `PackedInts` are made of."""
FloatsLike = Packed[Any] | Sequence[float] | NDArray[Any] | torch.Tensor
"""What `PackedFloats` and `PackedDoubles` are made of."""
FlagsLike = Packed[Any] | Sequence[bool] | NDArray[Any] | torch.Tensor
"""What `PackedFlags` are made of."""
