"""Uploads by the real client to a hub on this machine."""

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import uvicorn
from rlhf_core.testing.tiny import save_tiny_model

sys.path.insert(0, str(Path(__file__).parent))
from hub_server import TOKEN, HubServer

pytestmark = pytest.mark.stack


@pytest.fixture
def hub():
    served = HubServer()
    listening = socket.create_server(("127.0.0.1", 0))
    served.address = f"http://127.0.0.1:{listening.getsockname()[1]}"
    server = uvicorn.Server(uvicorn.Config(served.app(), log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield served
    server.should_exit = True
    thread.join(30)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model") / "base", hidden_size=32)


def export(model, output, endpoint, *options, token=TOKEN, offline="0"):
    """The command in a process of its own: the client reads its settings when it is imported."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": endpoint,
        "HF_HUB_OFFLINE": offline,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(output.parent / "home"),
        "NO_PROXY": "127.0.0.1",
        "HF_TOKEN": token,
    }
    program = "from rlhf_launch.cli.main import main; main()"
    command = [sys.executable, "-c", program, "export", model, str(output), *options]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, cwd=output.parent, check=False
    )


def test_an_export_is_uploaded_whole_to_its_branch(hub, model, tmp_path):
    done = export(
        model, tmp_path / "out", hub.address, "--push-to-hub", "me/tiny", "--private", "--revision", "first"
    )
    assert done.returncode == 0, done.stderr
    assert f"{hub.address}/me/tiny/commit/0f3a" in done.stdout
    made = hub.repositories["me/tiny"]
    assert made.get("private") is True or made.get("visibility") == "private"
    assert any(path.endswith("/branch/first") for path in hub.asked)
    files = hub.files["me/tiny", "first"]
    there = {
        str(f.relative_to(tmp_path / "out")): f.read_bytes() for f in (tmp_path / "out").rglob("*") if f.is_file()
    }
    there = {name: content for name, content in there.items() if not name.startswith(".cache")}
    assert files == there
    assert TOKEN.encode() not in b"".join(files.values())
    assert b'from_pretrained("me/tiny")' in files["README.md"]
    hub.refuses = 403
    done = export(model, tmp_path / "second", hub.address, "--push-to-hub", "me/tiny")
    assert done.returncode == 2, done.stderr[-2500:]
    assert "the hub refused it with 403" in done.stderr
    assert "hf upload me/tiny" in done.stderr
    assert (tmp_path / "second" / "config.json").exists()


def test_no_token_a_wrong_one_and_no_network_are_said_before_anything_is_written(hub, model, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = f"http://127.0.0.1:{closed.getsockname()[1]}"
    given = ["--push-to-hub", "me/tiny"]
    done = export(model, tmp_path / "out", hub.address, *given, token="")
    assert (done.returncode, "there is no token" in done.stderr) == (2, True), done.stderr
    done = export(model, tmp_path / "out", hub.address, *given, token="hf_wrong")
    assert (done.returncode, "does not take the token" in done.stderr) == (2, True), done.stderr
    done = export(model, tmp_path / "out", nobody, *given)
    assert (done.returncode, "cannot be reached" in done.stderr) == (2, True), done.stderr
    done = export(model, tmp_path / "out", hub.address, *given, offline="1")
    assert (done.returncode, "HF_HUB_OFFLINE" in done.stderr) == (2, True), done.stderr
    assert not (tmp_path / "out").exists()
    assert not hub.repositories
