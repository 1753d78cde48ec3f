"""What the README and the pages of the documentation show exists."""

import ast
import re
from pathlib import Path

import pytest
import rlhf_core
import rlhf_rollout
from rlhf_rollout.rewards import parts

PACKAGE = Path(__file__).parents[1]
DOCS = PACKAGE.parents[1] / "docs"
PAGES = [PACKAGE / "README.md", *(DOCS / f"{name}.md" for name in ("rollout", "rewards", "agents"))]
PAGES = [page for page in PAGES if page.exists()]


def blocks(page):
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_parses_and_imports_what_is_there(page):
    for block in blocks(page):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module in ("rlhf_core", "rlhf_rollout"):
                package = {"rlhf_core": rlhf_core, "rlhf_rollout": rlhf_rollout}[node.module]
                assert {alias.name for alias in node.names} <= set(package.__all__)
            assert not (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rlhf_rollout."))


def test_the_readme_has_every_kind_of_reward():
    kinds = {kind.__dataclass_fields__["kind"].default for kind in parts.RewardPart.__args__}
    table = next(part for part in (PACKAGE / "README.md").read_text().split("\n\n") if part.startswith("| `kind`"))
    first_cells = " ".join(line.split("|")[1] for line in table.splitlines()[2:])
    assert set(re.findall(r"`(\w+)`", first_cells)) == kinds


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert (page.parent / target).exists(), target
