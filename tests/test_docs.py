"""The pages that users read: their links lead somewhere, and what their examples import exists."""

import ast
import importlib
import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    {
        ROOT / "README.md",
        *ROOT.glob("packages/*/README.md"),
        *ROOT.glob("examples/**/*.md"),
        *ROOT.glob("docs/*.md"),
    }
)


def name(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    lost = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not lost


def test_every_page_is_listed():
    listed = re.findall(r"\]\((\S+?)\)", (ROOT / "docs" / "README.md").read_text())
    assert {page.name for page in ROOT.glob("docs/*.md")} - {"README.md"} <= set(listed)


def test_every_example_is_listed():
    page = ROOT / "examples" / "README.md"
    listed = {page.parent / link for link in re.findall(r"\]\((\S+?)\)", page.read_text())}
    loose = [path for path in page.parent.iterdir() if path != page and not path.name.startswith((".", "_"))]
    assert not [path.name for path in loose if path not in listed]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_what_examples_import_exists(page):
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        if ">>>" in block:
            continue
        for node in ast.walk(ast.parse(textwrap.dedent(block))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("rlhf_"):
                module = importlib.import_module(node.module)
                assert not [alias.name for alias in node.names if not hasattr(module, alias.name)], node.module
