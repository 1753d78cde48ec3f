import errno
import os

import pytest
import torch
from rlhf_algos.run_directory.writing import naming_full_disk, writing_problem
from rlhf_core import DataError, ResourceError
from safetensors.torch import save_file

FULL = "/dev/full"
"""Every write to it fails as on a full disk."""

needs_full = pytest.mark.skipif(not os.path.exists(FULL), reason="needs /dev/full")


def plain(path):
    with path.open("w") as file:
        file.write("x" * 100_000)


def with_torch(path):
    torch.save({"weights": torch.zeros(1 << 16)}, path)


def nested(path):
    try:
        plain(path)
    except OSError as error:
        raise RuntimeError("policy to save a checkpoint") from error


@needs_full
@pytest.mark.parametrize("write", [plain, with_torch, nested])
def test_a_full_disk_is_one_message_with_folder_and_room(tmp_path, write):
    (tmp_path / "file").symlink_to(FULL)
    with pytest.raises(ResourceError, match="the disk is full") as caught, naming_full_disk(tmp_path):
        write(tmp_path / "file")
    assert str(tmp_path) in str(caught.value)
    assert "bytes" in str(caught.value)
    assert "--resume" in str(caught.value)


def test_what_safetensors_says_of_a_full_disk_is_understood(tmp_path):
    with pytest.raises(Exception, match=r"does not exist|No such file") as caught:
        save_file({"a": torch.zeros(1)}, tmp_path / "no" / "folder")
    kind = type(caught.value)
    full = kind("Error while serializing: I/O error: No space left on device (os error 28)")
    assert "the disk is full" in (writing_problem(full, tmp_path) or "")


def test_a_quota_is_a_full_disk(tmp_path):
    error = OSError(errno.EDQUOT, "Disk quota exceeded")
    assert "the disk is full" in (writing_problem(error, tmp_path) or "")


def test_an_output_that_is_a_file_is_named(tmp_path):
    (tmp_path / "run").write_text("mine")
    with pytest.raises(ResourceError, match="run' cannot be written"), naming_full_disk(tmp_path / "run"):
        (tmp_path / "run").mkdir()
    with pytest.raises(ResourceError, match="cannot be written"), naming_full_disk(tmp_path / "run" / "inner"):
        (tmp_path / "run" / "inner").mkdir(parents=True)


@pytest.mark.parametrize(
    "error", [DataError("row 1"), ValueError("no space left on device"), PermissionError(errno.EACCES, "no", "/x")]
)
def test_other_errors_go_on_as_they_are(tmp_path, error):
    expected = ResourceError if isinstance(error, ValueError) else type(error)
    with pytest.raises(expected), naming_full_disk(tmp_path):
        raise error


def test_an_open_file_of_a_disk_that_turned_read_only_is_named_by_its_folder(tmp_path):
    with (
        pytest.raises(ResourceError, match="cannot be written: read-only file system") as caught,
        naming_full_disk(tmp_path),
    ):
        raise OSError(errno.EROFS, "Read-only file system")
    assert str(tmp_path) in str(caught.value)


def test_what_the_first_error_notes_outlives_a_file_that_cannot_be_closed(tmp_path):
    def fail():
        first = OSError(errno.ENOSPC, "No space left on device")
        first.add_note("--resume continues")
        try:
            raise first
        finally:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ResourceError, match="the disk is full") as caught, naming_full_disk(tmp_path):
        fail()
    assert caught.value.__notes__ == ["--resume continues"]
