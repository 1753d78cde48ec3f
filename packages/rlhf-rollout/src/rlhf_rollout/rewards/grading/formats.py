"""Tests as data sets have them, brought into one of three forms: texts, calls, or Python source."""

from __future__ import annotations

import ast
import builtins
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_core import DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class TextTest:
    """A program reads `given` and is to print `wanted`."""

    given: str
    wanted: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CallTest:
    """A function of the program is called; what it returns is compared."""

    function: str
    arguments: tuple[Any, ...] = ()
    named: Mapping[str, Any]
    wanted: Any
    exact: bool
    """Whether it must be equal as Python says; if not, lists and tuples are the same, and a tolerance counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceTests:
    """Python with asserts, which runs apart from the program."""

    sources: tuple[str, ...]
    setup: str
    names: tuple[str, ...]
    """What the tests use and do not define: the program's."""
    entry: str


Tests = tuple[TextTest, ...] | tuple[CallTest, ...] | SourceTests


def read_tests(found: Any, *, sample: str, entry: str = "", setup: str = "") -> Tests:
    """The tests of a row.

    Args:
        found: Python source, a list of sources (MBPP), a list of {"input", "output"} (of texts, or of arguments
            where "testtype" is "functional"), or {"inputs", "outputs", "fn_name"}; as it is, as JSON, as the text
            of a Python list, or as an array.
        sample: the sample's id, for messages.
        entry: the program's function, for tests that do not name it.
        setup: Python that runs before the sources.

    Raises:
        DataError: there are no tests, or they are in another form, or could not tell a right program from another.
    """
    try:
        return _read(_unpacked(found), entry, setup)
    except (ValueError, SyntaxError, RecursionError) as error:
        raise DataError(
            f"code reward: the tests of sample {sample!r} {error}; found {str(found)[:80]!r}. Write Python source "
            "with asserts, a list of such sources, or a list of {'input', 'output'}"
        ) from None


def _unpacked(found: Any) -> Any:
    """Arrays as lists, and what stands in a text: JSON, the text of a Python list, or source."""
    if hasattr(found, "tolist"):
        found = found.tolist()
    if not isinstance(found, str):
        return found
    if not found.strip():
        raise ValueError("are empty")
    for parse in (json.loads, ast.literal_eval):
        try:
            inner = parse(found)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if not isinstance(inner, (list, tuple, dict)):
            raise ValueError("are a single value, which no program can fail")
        return inner
    return found


def _read(found: Any, entry: str, setup: str) -> Tests:
    if isinstance(found, str):
        return _of_sources((found,), entry, setup)
    if isinstance(found, Mapping):
        found = _rows_of(found)
    items = list(found) if isinstance(found, Sequence) else []
    if items and all(isinstance(item, str) for item in items):
        return _of_sources(tuple(items), entry, setup)
    if items and all(isinstance(item, Mapping) and {"input", "output"} <= set(item) for item in items):
        kinds = {_is_call(item) for item in items}
        if kinds == {True}:
            return tuple(_call_of(item, entry) for item in items)
        if kinds == {False}:
            return tuple(TextTest(given=_text(item["input"]), wanted=_text(item["output"])) for item in items)
        raise ValueError("mix calls and texts")
    raise ValueError("have no form that is known")


def _rows_of(found: Mapping[str, Any]) -> list[Any]:
    """One {"input", "output"} for each pair of {"inputs", "outputs"}."""
    if not {"inputs", "outputs"} <= set(found):
        return [found]
    inputs, outputs = list(found["inputs"]), list(found["outputs"])
    if len(inputs) != len(outputs):
        raise ValueError(f"have {len(inputs)} inputs and {len(outputs)} outputs")
    name = found.get("fn_name")
    call = {"fn_name": name} if name else {}
    return [{"input": given, "output": wanted, **call} for given, wanted in zip(inputs, outputs, strict=True)]


def _is_call(item: Mapping[str, Any]) -> bool:
    return bool(item.get("fn_name")) or item.get("testtype") == "functional"


def _call_of(item: Mapping[str, Any], entry: str) -> CallTest:
    name = str(item.get("fn_name") or entry)
    if not name.isidentifier():
        raise ValueError("are calls without the name of the function; set entry_column")
    given, wanted = item["input"], item["output"]
    if isinstance(given, str):  # one argument on each line, as JSON
        given, wanted = [json.loads(line) for line in given.splitlines() if line.strip()], json.loads(wanted)
    elif not isinstance(given, Sequence):
        raise ValueError("have arguments that are no list")
    return CallTest(function=name, arguments=tuple(given), named={}, wanted=wanted, exact=False)


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _of_sources(sources: tuple[str, ...], entry: str, setup: str) -> Tests:
    trees = [ast.parse(source) for source in sources]
    if not setup.strip():
        calls = [_simple_call(statement) for tree in trees for statement in tree.body]
        if calls and all(calls):
            return tuple(call for call in calls if call is not None)
    for tree in trees:
        if not any(map(_can_fail, ast.walk(tree))):
            raise ValueError("assert nothing, so that any program would pass")
    names = _free_names([*trees, ast.parse(setup)], entry)
    if not names:
        raise ValueError("never use the program")
    return SourceTests(sources=sources, setup=setup, names=names, entry=entry)


def _simple_call(statement: ast.stmt) -> CallTest | None:
    """`assert f(1, x=2) == 3` as data; None for everything that is not of this form."""
    if not isinstance(statement, ast.Assert) or not isinstance(test := statement.test, ast.Compare):
        return None
    call = test.left
    if not (len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq)):
        return None
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)) or call.func.id in _BUILTINS:
        return None
    try:
        return CallTest(
            function=call.func.id,
            arguments=tuple(map(ast.literal_eval, call.args)),
            named={str(word.arg): ast.literal_eval(word.value) for word in call.keywords if word.arg or _refuse()},
            wanted=ast.literal_eval(test.comparators[0]),
            exact=True,
        )
    except (ValueError, TypeError):
        return None


def _refuse() -> bool:
    raise ValueError("unpacked arguments")


_BUILTINS = frozenset(vars(builtins))


def _can_fail(node: ast.AST) -> bool:
    if isinstance(node, (ast.Assert, ast.Raise)):
        return True
    name = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
    return name.startswith(("assert", "fail", "raises"))


def _free_names(trees: Sequence[ast.AST], entry: str) -> tuple[str, ...]:
    """Names that are read and neither made nor Python's, in the order of their first use."""
    read: dict[str, None] = {entry: None} if entry else {}
    made: set[str] = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                read.setdefault(node.id) if isinstance(node.ctx, ast.Load) else made.add(node.id)
            elif isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
                made.add(node.name)
            elif isinstance(node, ast.arg):
                made.add(node.arg)
            elif isinstance(node, ast.ExceptHandler) and node.name:
                made.add(node.name)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                made |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return tuple(name for name in read if name not in made and (name not in _BUILTINS or name == entry))
