"""A disk that is full, and a folder that turns read-only, while a run saves; then it goes on to the same bits."""

import subprocess
import sys

import pytest
import yaml
from chaos.comparison import differences
from rlhf_core import ResourceError
from rlhf_launch.online.run import train

pytestmark = pytest.mark.stack


def mount(*arguments):
    subprocess.run(["mount", *map(str, arguments)], check=True, capture_output=True)


@pytest.fixture
def disk(tmp_path):
    """A small disk of its own, and a function that gives it another size."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        mount("-t", "tmpfs", "-o", "size=64m", "tmpfs", folder)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"mounting a file system takes root: {error}")
    yield folder
    subprocess.run(["umount", "--recursive", "--lazy", str(folder)], check=True)


@pytest.fixture
def settings(settings):
    rollout = settings["rollout"] | {"options": {"separate_requests": True}}  # the same bits at any time
    return settings | {
        "rollout": rollout,
        "checkpoint": {"every": 1},
        "evaluation": {"every": 2},
        "tensorboard": False,
    }


@pytest.fixture
def whole(settings, make_config, tmp_path):
    """The folder of the same run on a disk with room."""
    return train(make_config(settings, train__steps=4, output=str(tmp_path / "whole"))).folder


def bytes_below(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def whole_checkpoints(run):
    return sorted(path.name for path in (run / "checkpoints").glob("step-*"))


def test_a_full_disk_costs_the_checkpoint_that_it_has_no_room_for(settings, make_config, disk, whole):
    config = make_config(settings, train__steps=4, output=str(disk / "run"))
    # Two checkpoints stay and a third is written beside them.
    size = bytes_below(whole / "checkpoints" / "step-000004")
    mount("-o", f"remount,size={int(2.4 * size) + (1 << 20)}", disk)
    with pytest.raises(ResourceError, match=r"the disk is full: .* has .* left") as caught:
        train(config)
    assert any("--resume continues" in note for note in caught.value.__notes__)
    assert whole_checkpoints(disk / "run") == ["step-000001", "step-000002"]
    mount("-o", "remount,size=64m", disk)
    train(config, resume=True)
    assert differences(whole, disk / "run") == []
    assert [path.name for path in (disk / "run" / "checkpoints").glob(".*")] == []


def test_a_folder_that_turns_read_only_is_named_and_the_run_goes_on_later(settings, make_config, disk, whole):
    config = make_config(settings, train__steps=4, output=str(disk / "run"))

    def refuse_writers(step, metrics):
        if step == 3:
            mount("--bind", disk / "run", disk / "run")
            mount("-o", "remount,bind,ro", disk / "run")

    with pytest.raises(ResourceError, match="cannot be written: read-only file system") as caught:
        train(config, on_step=refuse_writers)
    assert str(disk / "run") in str(caught.value)
    subprocess.run(["umount", str(disk / "run")], check=True)
    assert whole_checkpoints(disk / "run") == ["step-000001", "step-000002"]
    train(config, resume=True)
    assert differences(whole, disk / "run") == []


def test_a_limit_on_files_is_a_full_disk(settings, tmp_path, whole):
    """In a process of its own, since the limit cannot be raised again."""
    file = tmp_path / "run.yaml"
    limited = settings | {"output": str(tmp_path / "run"), "train": settings["train"] | {"steps": 4}}
    file.write_text(yaml.safe_dump(limited))
    largest = max(path.stat().st_size for path in (whole / "checkpoints").rglob("*") if path.is_file())
    program = (
        f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({largest // 2}, {largest // 2}));"
        "from rlhf_launch.cli.main import main; main()"
    )
    ended = subprocess.run([sys.executable, "-c", program, "train", str(file)], capture_output=True, text=True)
    assert ended.returncode == 2
    assert "the disk is full" in ended.stderr
