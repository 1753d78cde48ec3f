"""What a workspace lock does not check: version ranges between the packages, changelogs, descriptions."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent.parent
PROJECTS = {
    path.parent.name: tomllib.loads(path.read_text())["project"]
    for path in sorted(ROOT.glob("packages/*/pyproject.toml"))
}


def internal_requirements():
    for name, project in PROJECTS.items():
        extras = project.get("optional-dependencies", {})
        for text in [*project["dependencies"], *(item for items in extras.values() for item in items)]:
            requirement = Requirement(text)
            if requirement.name in PROJECTS:
                yield name, requirement


def test_there_are_five_packages():
    assert set(PROJECTS) == {"rlhf-core", "rlhf-algos", "rlhf-rollout", "rlhf-train", "rlhf-launch"}


@pytest.mark.parametrize(("name", "requirement"), list(internal_requirements()), ids=str)
def test_sibling_ranges_are_bounded_and_hold_the_current_version(name, requirement):
    operators = {specifier.operator for specifier in requirement.specifier}
    assert operators == {">=", "<"}, f"{name}: {requirement} needs a lower and an upper bound"
    assert Version(PROJECTS[requirement.name]["version"]) in requirement.specifier


@pytest.mark.parametrize("name", PROJECTS)
def test_changelog_has_a_heading_for_the_current_version(name):
    text = (ROOT / "packages" / name / "CHANGELOG.md").read_text()
    assert re.search(rf"^## {re.escape(PROJECTS[name]['version'])}\b", text, re.MULTILINE)


@pytest.mark.parametrize("name", PROJECTS)
def test_readme_says_something(name):
    assert len((ROOT / "packages" / name / "README.md").read_text()) > 400


def test_arrows_only_point_down():
    needs = {name: {r.name for n, r in internal_requirements() if n == name} for name in PROJECTS}
    assert needs["rlhf-core"] == set()
    for name in ("rlhf-algos", "rlhf-rollout", "rlhf-train"):
        assert needs[name] == {"rlhf-core"}
