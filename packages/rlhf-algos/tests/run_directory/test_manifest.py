import pytest
from rlhf_algos.run_directory import manifest
from rlhf_algos.run_directory.manifest import check_seen_here, files_below, manifest_problem, write_manifest
from rlhf_core import ConfigError


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "shard-0").write_bytes(b"1234")
    (tmp_path / "policy" / "shard-1").write_bytes(b"56")
    return tmp_path


def test_files_are_known_by_their_names_below_the_folder(folder):
    assert files_below(folder) == {"policy/shard-0": 4, "policy/shard-1": 2}
    write_manifest(folder)
    assert files_below(folder) == {"policy/shard-0": 4, "policy/shard-1": 2}
    assert manifest_problem(folder) is None


def test_a_large_file_is_known_by_its_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "_WHOLE_BYTES", 8)
    monkeypatch.setattr(manifest, "_END_BYTES", 4)
    file = tmp_path / "shard"
    file.write_bytes(b"head middle tail")
    write_manifest(tmp_path)
    file.write_bytes(b"head MIDDLE tail")
    assert manifest_problem(tmp_path) is None
    for other in (b"head middle tai\0", b"HEAD middle tail"):
        file.write_bytes(other)
        assert manifest_problem(tmp_path) == "shard has other content than was written"
    file.write_bytes(b"head middle")
    assert manifest_problem(tmp_path) == "shard has 11 bytes, 16 were written"


def test_a_rank_whose_files_are_elsewhere_is_named(folder):
    here = files_below(folder)
    check_seen_here(folder, [("a", here), ("b", {"policy/shard-1": 2})])
    for lost in ({"policy/shard-2": 2}, {"policy/shard-1": 3}):
        with pytest.raises(ConfigError, match=r"rank 1 on far wrote 'policy/shard-\d' .* all hosts share"):
            check_seen_here(folder, [("a", here), ("far", lost)], wait_s=0)
