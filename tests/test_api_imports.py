"""Who is outside a package imports from its top, or from a folder that is public by name."""

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PUBLIC_FOLDERS = {
    "rlhf_algos": ("rlhf_algos.testing",),
    "rlhf_core": ("rlhf_core.testing",),
    "rlhf_launch": ("rlhf_launch.planning",),
    "rlhf_train": (),
}
"""Packages whose top is their whole API, and the folders beside it that others may import from."""


@functools.cache
def imported_modules(path):
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.append(node.module)
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return found


def outsiders(package):
    folder = ROOT / "packages" / package.replace("_", "-")
    for place in ("packages", "examples", "benchmarks", "tests"):
        yield from (path for path in (ROOT / place).rglob("*.py") if folder not in path.parents)


@pytest.mark.parametrize("package", sorted(PUBLIC_FOLDERS))
def test_nobody_outside_reaches_below_the_top(package):
    found = [
        f"{path.relative_to(ROOT)}: {module}"
        for path in outsiders(package)
        for module in imported_modules(path)
        if module.startswith(package + ".") and not module.startswith(PUBLIC_FOLDERS[package])
    ]
    assert not found
