"""Values as text, and back as values of the language's own types: nothing else comes out of a program.

The text is JSON. What JSON lacks is an object {"t": type, "v": content}. This file is also sent into sandboxes, in
front of `two_sides`; it needs nothing but the standard library, and imports what is slow to import late.
"""

from __future__ import annotations

import _json  # type: ignore[import-not-found]
import math
import sys
from collections.abc import Callable
from typing import Any

MAX_DEPTH = 100


class NotPlain(ValueError):
    """A value, or a text, that is no plain data."""


def encode(value: Any, refer: Callable[[Any], str] | None = None, depth: int = 0) -> str:
    """The text of a value.

    Args:
        value: plain data, of these types or of types made from them.
        refer: gives the text that stands for any other value.
        depth: of the value in what it is part of.

    Raises:
        NotPlain: there is a value of another type and no `refer`, or the value is too deep.
    """
    if depth > MAX_DEPTH:
        raise NotPlain(f"a value is nested more than {MAX_DEPTH} deep")
    if value is None or isinstance(value, bool):
        return "null" if value is None else "true" if value else "false"
    if isinstance(value, str):
        return _json.encode_basestring_ascii(str.__str__(value))
    if isinstance(value, int):
        number = int.__index__(value)
        return str(number) if -(1 << 63) < number < 1 << 63 else _tagged("int", f'"{number:x}"')
    if isinstance(value, float):
        return _float_text(float.__float__(value))

    def part(inner: Any) -> str:
        return encode(inner, refer, depth + 1)

    if isinstance(value, list):
        return f"[{','.join(map(part, list.__iter__(value)))}]"
    for kind, name in _SEQUENCES.items():
        if isinstance(value, kind):
            return _tagged(name, f"[{','.join(map(part, kind.__iter__(value)))}]")
    if isinstance(value, dict):
        pairs = (f"[{part(key)},{part(inner)}]" for key, inner in dict.items(value))
        return _tagged("dict", f"[{','.join(pairs)}]")
    if isinstance(value, complex):
        return _tagged("complex", f"[{_float_text(value.real)},{_float_text(value.imag)}]")
    if isinstance(value, (bytes, bytearray)):
        return _tagged("bytes", f'"{bytes(value).hex()}"')
    if isinstance(value, range):
        return _tagged("range", f"[{value.start},{value.stop},{value.step}]")
    if (known := _of_a_library(value, part)) is not None:
        return known
    if refer is None:
        raise NotPlain(f"a value of type {type(value).__name__!r} is no plain data")
    return refer(value)


def decode(text: str, resolve: Callable[[Any], Any] | None = None) -> Any:
    """The value of a text.

    Args:
        text: what `encode` gave, or somebody who pretends.
        resolve: gives the value that a reference stands for.

    Raises:
        NotPlain: the text is no such text.
    """
    try:
        value, end = _SCAN(text, 0)
    except (StopIteration, ValueError, RecursionError) as error:
        raise NotPlain(f"not the text of a value: {text[:80]!r}") from error
    if text[end:].strip():
        raise NotPlain("there is more after the value")
    try:
        return _value(value, resolve, 0)
    except NotPlain:
        raise
    except (TypeError, ValueError, KeyError, IndexError, ArithmeticError, AttributeError) as error:
        raise NotPlain(f"a value that cannot be: {error}") from error


class _Scanner:
    strict = True
    object_hook = object_pairs_hook = None
    parse_float = float
    parse_int = int
    parse_constant = float

    def __init__(self) -> None:
        self.memo: dict[str, str] = {}


_SCAN: Any = _json.make_scanner(_Scanner())  # pyright: ignore[reportArgumentType]
_SEQUENCES: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset"}


def _tagged(name: str, content: str) -> str:
    return f'{{"t":"{name}","v":{content}}}'


def _float_text(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _of_a_library(value: Any, part: Callable[[Any], str]) -> str | None:
    """The text of a value of a type in a module that is loaded, if such values are plain data."""
    module, name = type(value).__module__, type(value).__name__
    if module == "collections" and name == "deque":
        return _tagged("deque", part(list(value)))
    if (module, name) in (("decimal", "Decimal"), ("fractions", "Fraction")):
        return _tagged(name, part(str(value)))
    if module == "datetime" and name in ("date", "datetime", "time"):
        return _tagged(name, part(value.isoformat()))
    if module == "datetime" and name == "timedelta":
        return _tagged(name, part([value.days, value.seconds, value.microseconds]))
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)) and value.dtype.kind in "biufcU":
        if isinstance(value, numpy.generic):
            return part(value.item())
        return _tagged("ndarray", part([value.dtype.str, list(value.shape), value.ravel().tolist()]))
    return None


def _value(found: Any, resolve: Callable[[Any], Any] | None, depth: int) -> Any:
    if depth > 2 * MAX_DEPTH:
        raise NotPlain("a value is too deep")
    if isinstance(found, list):
        return [_value(part, resolve, depth + 1) for part in found]
    if not isinstance(found, dict):
        return found
    kind, content = found["t"], found["v"]
    if kind == "reference":
        if resolve is None:
            raise NotPlain("a value is an object of the program, no plain data")
        return resolve(found)
    if kind == "dict":
        pairs = [(_value(key, resolve, depth + 1), _value(part, resolve, depth + 1)) for key, part in content]
        _refuse_collisions([key for key, _ in pairs])
        return dict(pairs)
    inner = _value(content, resolve, depth + 1)
    if kind in ("set", "frozenset"):
        _refuse_collisions(inner)
    return _MAKE[kind](inner)


def _refuse_collisions(keys: list[Any]) -> None:
    """Keys that all have one hash would take hours to put together."""
    if len(keys) > 100 and len({hash(key) for key in keys}) < len(keys) // 2:
        distinct = {encode(key) for key in keys}
        if len(distinct) > 100 and len({hash(key) for key in keys}) < len(distinct) // 2:
            raise NotPlain("keys with equal hashes")


def _fraction(text: str) -> Any:
    from fractions import Fraction

    numerator, _, denominator = text.partition("/")
    return Fraction(int(numerator), int(denominator or 1))


def _decimal(text: str) -> Any:
    from decimal import Decimal

    return Decimal(text)


def _deque(content: list[Any]) -> Any:
    from collections import deque

    return deque(content)


def _date(name: str) -> Callable[[Any], Any]:
    def make(content: Any) -> Any:
        import datetime

        kind = getattr(datetime, name)
        return kind(*content) if name == "timedelta" else kind.fromisoformat(content)

    return make


def _array(content: Any) -> Any:
    dtype, shape, numbers = content
    if not isinstance(dtype, str) or dtype[1:2] not in tuple("biufcU"):
        raise NotPlain("an array of another type")
    if dtype[1] != "U" and dtype[2:] not in ("1", "2", "4", "8", "16"):
        raise NotPlain("an array of another type")
    if math.prod(shape) != len(numbers):
        raise NotPlain("an array of another size")
    import numpy

    return numpy.array(numbers, dtype=None if dtype[1] == "U" else dtype).reshape([int(size) for size in shape])


_MAKE: dict[str, Callable[[Any], Any]] = {
    "int": lambda digits: int(digits, 16),
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "bytes": bytes.fromhex,
    "complex": lambda parts: complex(*parts),
    "range": lambda parts: range(*parts),
    "deque": _deque,
    "Decimal": _decimal,
    "Fraction": _fraction,
    **{name: _date(name) for name in ("date", "datetime", "time", "timedelta")},
    "ndarray": _array,
}
