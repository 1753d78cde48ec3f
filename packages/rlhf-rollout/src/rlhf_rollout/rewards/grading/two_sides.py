"""What runs in the two sandboxes of a test: `play` holds the program, `supervise` holds the tests.

They talk in lines over standard input and output. The program's side answers: names, calls, attributes, items. What
it answers is plain data, or a reference to an object that stays where it is. The tests' side compares values of its
own types; its verdicts leave on standard error, which the program's side has no part in.
"""

from __future__ import annotations

import builtins
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from rlhf_rollout.rewards.grading.plain_data import NotPlain, decode, encode

MAX_LINE = 8 << 20
MAX_ITEMS = 100_000


class Lost(BaseException):
    """The other side has ended, or says what no honest side says. No test can catch it by accident."""


class OtherSide:
    """The lines to and from the other side."""

    def __init__(self, source: int, target: int, *, serves: frozenset[str]) -> None:
        self._source, self._target = os.fdopen(source, "rb"), target
        self._serves = serves
        self._objects: dict[int, Any] = {}
        self.namespace: dict[str, Any] = {}
        self.asked = 0

    def ask(self, operation: str, *content: Any) -> Any:
        """Have the other side do something; returns the value, or raises its exception."""
        self.asked += 1
        self._send([operation, *content])
        while True:
            kind, *answer = self._receive()
            if kind == "value":
                return answer[0] if answer else None
            if kind == "error":
                raise _exception(*answer[:2])
            self._send(self._do(kind, answer))

    def serve(self) -> None:
        """Do what the other side asks for until it ends."""
        while True:
            try:
                operation, *content = self._receive()
            except Lost:
                return
            self._send(self._do(operation, content))

    def _do(self, operation: Any, content: list[Any]) -> list[Any]:
        if operation not in self._serves:
            raise Lost(f"the other side asks for {operation!r}")
        try:
            return ["value", getattr(self, f"_{operation}")(*content)]
        except Lost:
            raise
        except BaseException as error:
            try:
                text = str(error)[:1000]
            except BaseException:
                text = ""
            return ["error", _name_of(error), text]

    def _name(self, name: str) -> Any:
        if name in self.namespace:
            return self.namespace[name]
        solution = self.namespace.get("Solution")
        if isinstance(solution, type) and hasattr(solution, name):
            return getattr(solution(), name)
        raise NameError(f"name {name!r} is not defined")

    def _call(self, target: Any, arguments: list[Any], named: dict[str, Any]) -> Any:
        return target(*arguments, **named)

    def _invoke(self, name: str, arguments: list[Any], named: dict[str, Any]) -> Any:
        return self._name(name)(*arguments, **named)

    def _attribute(self, target: Any, name: str) -> Any:
        return getattr(target, name)

    def _item(self, target: Any, key: Any) -> Any:
        return target[key]

    def _items(self, target: Any) -> list[Any]:
        found = []
        for item in target:
            found.append(item)
            if len(found) > MAX_ITEMS:
                raise ValueError(f"more than {MAX_ITEMS} items")
        return found

    def _length(self, target: Any) -> int:
        return len(target)

    def _text(self, target: Any) -> str:
        return str(target)

    def _truth(self, target: Any) -> bool:
        return bool(target)

    def _send(self, message: list[Any]) -> None:
        try:
            text = encode(message, self._refer)
        except (NotPlain, RecursionError) as error:
            text = encode(["error", "TypeError", str(error)])
        data = memoryview(f"{text}\n".encode())
        try:
            while data:
                data = data[os.write(self._target, data) :]
        except OSError as error:
            raise Lost("the other side has ended") from error

    def _receive(self) -> list[Any]:
        line = self._source.readline(MAX_LINE)
        if not line.endswith(b"\n"):
            raise Lost("the other side has ended, or says too much at once")
        try:
            message = decode(line.decode("ascii"), self._resolve)
        except (NotPlain, ValueError, RecursionError) as error:
            raise Lost("the other side says what cannot be read") from error
        if not isinstance(message, list) or not message:
            raise Lost("the other side says what cannot be read")
        return message

    def _refer(self, value: Any) -> str:
        if isinstance(value, Remote):
            return f'{{"t":"reference","v":[{value._number},"yours"]}}'
        number = id(value)
        self._objects[number] = value
        return f'{{"t":"reference","v":[{number},"mine"]}}'

    def _resolve(self, found: Any) -> Any:
        number, whose = found["v"]
        return self._objects[number] if whose == "yours" else Remote(self, number)


class Remote:
    """An object of the other side, equal to nothing but itself: what it would say of that cannot be trusted."""

    def __init__(self, side: OtherSide, number: int) -> None:
        self._side, self._number = side, number

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call it over there."""
        return self._side.ask("call", self, list(arguments), named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._side.ask("attribute", self, name)

    def __getitem__(self, key: Any) -> Any:
        return self._side.ask("item", self, key)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._side.ask("items", self))

    def __len__(self) -> int:
        return self._side.ask("length", self)

    def __bool__(self) -> bool:
        return self._side.ask("truth", self) is True

    def __str__(self) -> str:
        return self._side.ask("text", self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and other._number == self._number

    def __hash__(self) -> int:
        return self._number


def _name_of(error: BaseException) -> str:
    """The nearest class of an exception that is Python's own, and can leave a program without ending it."""
    for kind in type(error).__mro__:
        if kind.__module__ == "builtins" and issubclass(kind, Exception):
            return kind.__name__
    return "RuntimeError"


def _exception(name: Any, text: Any) -> BaseException:
    kind = getattr(builtins, str(name), None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return RuntimeError(f"{name}: {text}")
    try:
        return kind(str(text))
    except TypeError:
        return RuntimeError(f"{name}: {text}")


def _own_pipes() -> tuple[int, int]:
    """Standard input and output for this module alone: code that reads and prints has neither."""
    pipes = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    os.close(nothing)
    return pipes


def _packages() -> None:
    """Where the interpreter was started without `site` and is not told of packages, find them."""
    if sys.flags.no_site and "PYTHONPATH" not in os.environ:
        import site

        site.main()


def play(path: str) -> None:
    """Run the program in a file, and answer for it."""
    source, target = _own_pipes()
    answers = {"name", "call", "attribute", "item", "items", "length", "text", "truth", "invoke"}
    side = OtherSide(source, target, serves=frozenset(answers))
    _packages()
    module = types.ModuleType("__main__")
    module.__dict__["__file__"] = path
    sys.modules["__main__"] = module
    sys.argv = [path]
    with open(path, "rb") as file:
        code = file.read()
    try:
        exec(compile(code, path, "exec"), module.__dict__)
    except SystemExit:
        pass
    except BaseException:
        import traceback

        traceback.print_exc()
    side.namespace = module.__dict__

    side.serve()
    os._exit(0)


def supervise(path: str) -> None:
    """Run the tests that a file holds; lines on standard error say their number, each verdict, and the end."""
    source, target = _own_pipes()
    said = os.dup(2)
    os.dup2(0, 2)
    with open(path, encoding="ascii") as file:
        job = decode(file.read())
    _packages()
    sys.argv = ["tests"]
    side = OtherSide(source, target, serves=frozenset({"call", "items"}))

    def say(word: str) -> None:
        os.write(said, f"{word}\n".encode(errors="replace"))

    try:
        run_tests(job, side, say)
    except BaseException as error:
        say(f"end {type(error).__name__}: {error}"[:500].replace("\n", " "))
    os._exit(0)


def run_tests(job: dict[str, Any], side: OtherSide, say: Callable[[str], None]) -> None:
    """Say `tests` and how many there are, then `passed`, `failed` or `empty` for each.

    Args:
        job: `setup` and `sources` (Python), `names` that the program is to define, `entry` (its function, for tests
            that have a function `check`) and `go_on` (after a test that fails).
        side: the program's.
        say: takes a line.
    """
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    space = module.__dict__
    tests = [test for source in job["sources"] for test in tests_of(source, entry=job["entry"])]
    say(f"tests {sum(kind != 'setup' for kind, _ in tests)}")
    for name in job["names"]:
        try:
            space[name] = side.ask("name", name)
        except NameError:
            continue
    exec(compile(job["setup"], "setup", "exec"), space)
    for kind, content in tests:
        before = side.asked
        try:
            _run_test(kind, content, space, job["entry"])
        except Lost:
            raise
        except BaseException:
            say("failed")
            if not job["go_on"] or kind == "setup":
                return
            continue
        if kind != "setup":
            # What passes without a question to the program is no test of it, unless it is an assert.
            say("passed" if kind == "assert" or side.asked > before else "empty")


def tests_of(source: str, *, entry: str) -> list[tuple[str, Any]]:
    """The tests of a source, in order, as a kind and what to run; they run in one namespace.

    Kinds: `assert` at the top, with what stands before it; `rest`, what follows the last assert and does something;
    `function` and `class` by name; `check`, a function that is called with the program's; `setup` is no test.
    """
    import ast

    found: list[tuple[str, Any]] = []
    waiting: list[ast.stmt] = []
    body = ast.parse(source).body
    for statement in body:
        waiting.append(statement)
        if isinstance(statement, ast.Assert):
            found.append(("assert", waiting))
            waiting = []
    passive = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
    if waiting:
        found.append(("setup" if all(isinstance(one, passive) for one in waiting) else "rest", waiting))
    functions = [one.name for one in body if isinstance(one, ast.FunctionDef)]
    classes = [one for one in body if isinstance(one, ast.ClassDef)]
    if entry and "check" in functions and found and found[-1][0] == "setup":
        found.append(("check", None))
    if not any(kind == "rest" for kind, _ in found):
        found += [("function", name) for name in functions if name.startswith("test")]
        found += [
            ("class", one.name) for one in classes if any("TestCase" in ast.unparse(base) for base in one.bases)
        ]
    return found


def _run_test(kind: str, content: Any, space: dict[str, Any], entry: str) -> None:
    if kind in ("assert", "rest", "setup"):
        import ast

        try:
            exec(compile(ast.Module(body=content, type_ignores=[]), "tests", "exec"), space)
        except SystemExit as end:  # unittest.main() ends so
            if end.code not in (None, 0, False):
                raise
    elif kind == "check":
        space["check"](space[entry])
    elif kind == "function":
        space[content]()
    else:
        import unittest

        ran = 0
        for one in unittest.defaultTestLoader.loadTestsFromTestCase(space[content]):
            one.debug()  # type: ignore[union-attr]
            ran += 1
        if not ran:
            raise ValueError(f"{content} has no test")


if __name__ == "__main__":
    {"play": play, "supervise": supervise}[sys.argv[1]](sys.argv[2])
