"""Damaged files are named; files that are whole, or of an unknown kind, are left alone."""

import pytest
import torch
from rlhf_core import CheckpointError, find_damage, naming_damage
from safetensors.torch import save_file


@pytest.fixture
def folder(tmp_path):
    save_file({"a": torch.ones(3), "b": torch.zeros(2, 2)}, tmp_path / "model.safetensors", {"format": "pt"})
    torch.save({"a": torch.ones(3)}, tmp_path / "state.pt")
    torch.save({"a": torch.ones(3)}, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("{")
    return tmp_path


def test_whole_files_have_no_damage(folder):
    assert find_damage(sorted(folder.iterdir())) is None
    save_file({}, folder / "empty.safetensors")
    assert find_damage([folder / "empty.safetensors"]) is None


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("model.safetensors", lambda whole: whole[:-1], r"is damaged \(it has \d+ bytes, its header says \d+\)"),
        ("model.safetensors", lambda whole: whole + b"x", "its header says"),
        ("model.safetensors", lambda whole: whole[:20], "fewer than its header says"),
        ("model.safetensors", lambda whole: b"", "fewer than its header says"),
        ("model.safetensors", lambda whole: whole[:8] + b"x" + whole[9:], "is not that of a safetensors file"),
        ("state.pt", lambda whole: whole[: len(whole) // 2], "not a zip file"),
        ("state.pt", lambda whole: b"", "not a zip file"),
        ("config.json", lambda whole: b"{", "is damaged"),
        ("config.json", lambda whole: b"\xff\xfe", "is damaged"),
    ],
)
def test_damage_is_found_and_named(folder, name, content, problem):
    file = folder / name
    file.write_bytes(content(file.read_bytes()))
    found = find_damage(sorted(folder.iterdir()))
    assert found is not None
    assert found[0] == file
    with (
        pytest.raises(CheckpointError, match=f"^the model cannot be loaded: the file .*{name}.*{problem}"),
        naming_damage("the model", folder),
    ):
        raise RuntimeError("something about an archive")


def test_a_missing_file_is_damage(tmp_path):
    assert find_damage([tmp_path / "nowhere.pt"]) == (tmp_path / "nowhere.pt", "is missing")


def test_an_error_without_damage_goes_on_as_it_is(folder):
    with pytest.raises(KeyError, match="other"), naming_damage("the model", folder, "no/such/hub-name"):
        raise KeyError("other")


def test_nothing_is_looked_at_where_nothing_fails(folder):
    (folder / "state.pt").write_bytes(b"")
    with naming_damage("the model", folder):
        pass
