"""Immutable sequences of numbers that are arrays inside: tokens, log-probs and masks by the million."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, Self, TypeVar, overload

import numpy as np
import torch
from numpy.typing import NDArray

T = TypeVar("T", int, float, bool)
_SHOWN = 64
_WORTH_A_PART = 64
"""Numbers below which a part of a sequence is no part of its own: to copy it costs less than to look after it."""


class Run(NamedTuple):
    """One number many times."""

    value: Any
    count: int


Part = NDArray[Any] | Run
"""What a packed sequence is made of."""


class Packed(Sequence[T]):
    """A sequence that behaves as a tuple of Python numbers and holds arrays of four bytes a number, or fewer.

    It is made of any sequence, array or tensor of one dimension; a number that its type cannot hold is refused, and
    a float is rounded to the nearest one that it can. An array that can be written is copied, another one is
    shared: memory that another process wrote (Ray's object store) is read where it is.

    What long sequences are joined of is not copied: `parts` are the arrays that were there, and runs of one number.
    `numpy.asarray` gives one array, which cannot be written: the only part itself, else a copy of all that nobody
    keeps. A pickle of protocol 5 has each array as a buffer out of band.

    `+` concatenates, `*` repeats, `==` compares the whole, all as for tuples: nothing is ever done by element, also
    not with arrays.

    >>> PackedInts((5, 6)) + (7,), PackedInts([5, 6, 7])[1:] == (6, 7), PackedFlags([True]) * 2
    (PackedInts([5, 6, 7]), True, PackedFlags([True, True]))

    Raises:
        TypeError: what is given is no sequence of such numbers.
        ValueError: it has more than one dimension, or a number that the type cannot hold.
    """

    __slots__ = ("_length", "_parts")
    __array_ufunc__ = None  # an array with this on the other side of an operator leaves it to this class

    kind: ClassVar[np.dtype[Any]]
    """Of the numbers in memory."""
    takes: ClassVar[str]
    """Kinds of numbers that are converted, by numpy's letters."""

    def __init__(self, values: Sequence[Any] | NDArray[Any] | torch.Tensor | Packed[Any] = ()) -> None:
        array = self._converted(values)
        array.flags.writeable = False
        self._parts: tuple[Part, ...] = (array,)
        self._length = len(array)

    @classmethod
    def of(cls, values: Sequence[Any] | NDArray[Any] | torch.Tensor | Packed[Any]) -> Self:
        """The values in this form: themselves, if they have it."""
        return values if type(values) is cls else cls(values)

    @classmethod
    def full(cls, length: int, value: T) -> Self:
        """One number many times."""
        return cls._of_parts([Run(cls.kind.type(value).item(), max(0, length))])

    @classmethod
    def joined(cls, parts: Sequence[Sequence[Any] | NDArray[Any] | Packed[Any] | Run]) -> Self:
        """All parts one after the other; long ones are shared, short ones are copied."""
        found: list[Part] = []
        for part in parts:
            if type(part) is Run:
                found.append(part)
            else:
                found += cls.of(part)._parts
        return cls._of_parts(found)

    @classmethod
    def _of_parts(cls, parts: Iterable[Part]) -> Self:
        """Parts of this kind that nobody will write."""
        kept: list[Part] = []
        length = 0
        for part in parts:
            if count := part[1] if type(part) is Run else len(part):
                kept.append(part)
                length += count
        alone = len(kept) == 1 and type(kept[0]) is not Run
        if not alone and (length < _WORTH_A_PART * len(kept) or not kept):
            kept = [_locked(whole_of(kept, cls.kind))]
        new = object.__new__(cls)
        new._length, new._parts = length, tuple(kept)
        return new

    @property
    def parts(self) -> tuple[Part, ...]:
        """The arrays and runs that it is made of, one after the other."""
        return self._parts

    @property
    def _array(self) -> NDArray[Any]:
        first = self._parts[0]
        if len(self._parts) == 1 and not isinstance(first, Run):
            return first
        return _locked(whole_of(self._parts, self.kind))

    def compressed(self) -> Self:
        """The same numbers with runs in place of arrays, where numbers repeat so often that they take less room."""
        for part in self._parts:
            if type(part) is not Run:
                break
        else:
            return self
        return self._of_parts(runs_of(self._array))

    def owned(self) -> Self:
        """The same numbers in memory of this process alone: a copy of what another process wrote."""
        if not any(_is_foreign(part) for part in self._parts):
            return self
        return self._of_parts([_locked(np.array(part)) if _is_foreign(part) else part for part in self._parts])

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
        return self._length

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> T | Self:
        if not isinstance(index, slice):
            return self._at(range(self._length)[index])
        start, stop, step = index.indices(self._length)
        if step != 1:
            return self._of_parts([self._array[index]])
        cut: list[Part] = []
        begin = 0
        for part in self._parts:
            end = begin + length_of(part)
            low, high = max(begin, start), min(end, stop)
            if low < high:
                cut.append(
                    Run(part.value, high - low) if isinstance(part, Run) else part[low - begin : high - begin]
                )
            begin = end
        return self._of_parts(cut)

    def _at(self, place: int) -> T:
        for part in self._parts:
            if place < (count := length_of(part)):
                break
            place -= count
        else:
            raise IndexError(place)
        return part.value if isinstance(part, Run) else part[place].item()

    def __iter__(self) -> Iterator[T]:
        return iter(self._array.tolist())

    def __contains__(self, value: object) -> bool:
        return isinstance(value, (bool, int, float, np.number)) and bool((self._array == value).any())

    def index(self, value: Any, start: int = 0, stop: int | None = None) -> int:
        """See tuple."""
        if start or stop is not None:
            return range(self._length)[start:stop][self[start:stop].index(value)]
        begin = 0
        for part in self._parts:
            if isinstance(part, Run):
                if part.value == value or self.kind.type(part.value) == value:
                    return begin
            elif (found := part == value).any():
                return begin + int(found.argmax())
            begin += length_of(part)
        raise ValueError(f"{value!r} is not in the sequence")

    def count(self, value: Any) -> int:
        """See tuple."""
        return sum(
            part.count * int(self.kind.type(part.value) == value)
            if isinstance(part, Run)
            else int(np.count_nonzero(part == value))
            for part in self._parts
        )

    def __add__(self, other: Any) -> Self:
        if isinstance(other, (tuple, list, type(self))):
            return self.joined((self, other))
        return NotImplemented

    def __radd__(self, other: Any) -> Self:
        if isinstance(other, (tuple, list)):
            return self.joined((other, self))
        return NotImplemented

    def __mul__(self, times: int) -> Self:
        return self._of_parts(self._parts * max(0, times)) if isinstance(times, int) else NotImplemented

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
        shown = self[:_SHOWN].tolist()
        more = f", ... {len(self)} in all]" if len(self) > _SHOWN else "]"
        return f"{type(self).__name__}({str(shown)[:-1]}{more})"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _unpickled, (type(self), [_sent(part, protocol) for part in self._parts])

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        return self


def length_of(part: Part) -> int:
    """Numbers of a part."""
    return part.count if isinstance(part, Run) else len(part)


def _is_foreign(part: Part) -> bool:
    """Whether an array is in memory that numpy has not asked for."""
    array: Any = part
    while isinstance(array, np.ndarray):
        if array.flags.owndata:
            return False
        array = array.base
    return not isinstance(part, Run)


def _locked(array: NDArray[Any]) -> NDArray[Any]:
    array.flags.writeable = False
    return array


def runs_of(array: NDArray[Any]) -> tuple[Part, ...]:
    """The runs of an array, where numbers repeat so often that they take less room; else the array."""
    # Floats are compared by their bits: 0.0 is not -0.0, and NaN is itself.
    bits = array.view(f"u{array.itemsize}")
    some = bits[:_SHOWN]
    if not len(bits) or np.count_nonzero(some[1:] != some[:-1]) > len(some) // 2:
        return (array,)
    starts = np.concatenate(([0], np.flatnonzero(bits[1:] != bits[:-1]) + 1))
    if _WORTH_A_PART * len(starts) > len(bits):
        return (array,)
    counts = np.diff(starts, append=len(bits)).tolist()
    return tuple(map(Run, array[starts].tolist(), counts))


def fill(target: NDArray[Any], parts: Iterable[Part]) -> None:
    """Write parts one after the other into an array, from its start on."""
    begin = 0
    for part in parts:
        end = begin + length_of(part)
        target[begin:end] = part.value if isinstance(part, Run) else part
        begin = end


def whole_of(parts: Sequence[Part], kind: np.dtype[Any], tail: tuple[int, ...] = ()) -> NDArray[Any]:
    """All parts one after the other: a new array [numbers, *tail]."""
    whole = np.empty((sum(map(length_of, parts)), *tail), dtype=kind)
    fill(whole, parts)
    return whole


def memory_of(array: NDArray[Any], protocol: Any) -> Any:
    """An array as it goes into a pickle: its memory, out of band from protocol 5 on."""
    whole: Any = np.ascontiguousarray(array)
    return pickle.PickleBuffer(whole) if protocol >= 5 else whole.tobytes()


def _sent(part: Part, protocol: Any) -> Any:
    """A part as it goes into a pickle: as two numbers, or as memory."""
    return tuple(part) if isinstance(part, Run) else memory_of(part, protocol)


def _unpickled(cls: type[Packed[Any]], sent: Sequence[Any]) -> Packed[Any]:
    """Numbers in memory that the pickle brought, or that another process wrote."""
    parts = [Run(*part) if isinstance(part, tuple) else _locked(np.frombuffer(part, cls.kind)) for part in sent]
    return cls._of_parts(parts)  # pyright: ignore[reportPrivateUsage]


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
