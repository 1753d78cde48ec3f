"""A folder is there whole or not at all."""

import pytest
from rlhf_algos.run_directory.replacing import replaced_folder


def write(final, text, *, fails=False):
    with replaced_folder(final) as beside:
        (beside / "one").write_text(text)
        if fails:
            raise OSError("cut off")
        (beside / "two").write_text(text)


def content(final):
    return {path.name: path.read_text() for path in final.iterdir()}


def test_an_interrupted_write_leaves_what_was_there(tmp_path):
    final = tmp_path / "run" / "model"
    with pytest.raises(OSError, match="cut off"):
        write(final, "a", fails=True)
    assert not final.exists()
    write(final, "b")
    with pytest.raises(OSError, match="cut off"):
        write(final, "c", fails=True)
    assert content(final) == {"one": "b", "two": "b"}
    write(final, "d")
    assert content(final) == {"one": "d", "two": "d"}
    assert [path.name for path in final.parent.iterdir()] == ["model"]
