"""The check of the API, on a small repository with a release."""

import importlib.util
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("griffe")
SPEC = importlib.util.spec_from_file_location("api_breaks", Path(__file__).with_name("api_breaks.py"))
api_breaks = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(api_breaks)


def git(root, *arguments):
    who = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    subprocess.run(["git", *who, *arguments], cwd=root, check=True, capture_output=True)


@pytest.fixture
def released(tmp_path):
    """A repository of one package, `demo`, released as 0.1.0 with two functions."""
    source = tmp_path / "packages" / "demo" / "src" / "demo"
    source.mkdir(parents=True)
    (source / "__init__.py").write_text('__all__ = ["kept", "gone"]\ndef kept(a): ...\ndef gone(): ...\n')
    (source.parents[1] / "pyproject.toml").write_text('[project]\nname = "demo"\nversion = "0.1.0"\n')
    (source.parents[1] / "CHANGELOG.md").write_text("# demo\n\n## 0.1.0\n\nFirst.\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "first")
    git(tmp_path, "tag", "demo-v0.1.0")
    return tmp_path


def test_before_a_release_there_is_nothing_to_compare(released, capsys):
    git(released, "tag", "-d", "demo-v0.1.0")
    assert api_breaks.main(released) == 0
    assert "no release yet" in capsys.readouterr().out


def test_an_unchanged_api_passes(released):
    assert api_breaks.main(released) == 0


def test_a_break_has_to_be_announced(released, capsys):
    folder = released / "packages" / "demo"
    (folder / "src" / "demo" / "__init__.py").write_text('__all__ = ["kept"]\ndef kept(a): ...\n')
    (folder / "pyproject.toml").write_text('[project]\nname = "demo"\nversion = "0.2.0"\n')
    assert api_breaks.main(released) == 1
    assert "NOT ANNOUNCED" in capsys.readouterr().out
    (folder / "CHANGELOG.md").write_text("# demo\n\n## 0.2.0\n\nRemoved: `gone`.\n\n## 0.1.0\n\nFirst.\n")
    assert api_breaks.main(released) == 0
