"""Compare the public API of every package with its last release; a break must stand in its changelog.

A release of rlhf-core 0.3.0 is the tag `rlhf-core-v0.3.0`. A break is announced if the section of the package's
present version in its CHANGELOG.md names what breaks.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]


def main(root: Path = ROOT) -> int:
    """Check all packages below `root`; the number of breaks that are not announced."""
    unannounced = 0
    for folder in sorted((root / "packages").iterdir()):
        tag = last_release(root, folder.name)
        if tag is None:
            print(f"{folder.name}: no release yet, so nothing to compare with")
            continue
        changes = changelog_section(folder)
        for name, explanation in breaks(root, folder, tag):
            announced = re.search(rf"\b{re.escape(name.rpartition('.')[2])}\b", changes) is not None
            unannounced += not announced
            print(f"{folder.name} since {tag}: {'announced' if announced else 'NOT ANNOUNCED'}: {explanation}")
    return unannounced


def last_release(root: Path, package: str) -> str | None:
    """The newest release tag of a package; None if there is none."""
    command = ["git", "tag", "--list", f"{package}-v*", "--sort=-version:refname"]
    tags = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.split()
    return tags[0] if tags else None


def changelog_section(folder: Path) -> str:
    """What the changelog says of the package's present version."""
    version = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["version"]
    text = (folder / "CHANGELOG.md").read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(version)}\b.*?(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    return found[0] if found else ""


def breaks(root: Path, folder: Path, tag: str) -> Iterable[tuple[str, str]]:
    """(name, explanation) of everything in the package's `__all__` that changed incompatibly since the tag."""
    import griffe

    module, source = folder.name.replace("-", "_"), folder / "src"
    old = griffe.load_git(module, ref=tag, repo=root, search_paths=[source.relative_to(root)], resolve_aliases=True)
    new = griffe.load(module, search_paths=[source], resolve_aliases=True)
    for breakage in griffe.find_breaking_changes(old, new):
        yield breakage.obj.path, breakage.explain(griffe.ExplanationStyle.ONE_LINE)


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
