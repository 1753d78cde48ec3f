"""Which sandbox a configuration means, and that none is never taken silently."""

import logging
import stat

import pytest
from rlhf_core import CapabilityError, ConfigError
from rlhf_rollout import ContainerSandbox, UnconfinedSandbox, open_sandbox
from rlhf_rollout.sandbox import choice
from sandbox_ground import python


def test_no_sandbox_is_refused_unless_it_is_asked_for(monkeypatch, caplog):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(CapabilityError, match=r"reward 'code': this machine has no sandbox.*sandbox: none"):
        open_sandbox("auto", what="reward 'code'")
    with caplog.at_level(logging.WARNING):
        assert isinstance(open_sandbox("none", what="reward 'code'"), UnconfinedSandbox)
    assert "reward 'code' run without a sandbox" in caplog.text


def test_unknown_names_and_silent_servers_are_refused():
    with pytest.raises(ConfigError, match="there is no sandbox 'jail'"):
        open_sandbox("jail")
    with pytest.raises(CapabilityError, match=r"no sandbox answers at http://127\.0\.0\.1:9"):
        open_sandbox("http://127.0.0.1:9")


def test_auto_takes_the_first_that_works(monkeypatch):
    class Works:
        pass

    def fails():
        raise CapabilityError("not here")

    monkeypatch.setattr(choice, "BubblewrapSandbox", fails)
    monkeypatch.setattr(choice, "ContainerSandbox", Works)
    assert isinstance(open_sandbox(), Works)


RUNTIME = """#!/usr/bin/env python3
# Stands in for docker: runs the command of `run` in a folder, and writes down what it was asked for.
import json, os, shutil, subprocess, sys, tempfile
words = sys.argv[1:]
with open({log!r}, "a") as log:
    log.write(json.dumps(words) + "\\n")
if words[0] == "run":
    mount = next(word for word in words if word.startswith("type=bind"))
    source = mount.split("source=")[1].split(",")[0]
    folder = tempfile.mkdtemp()
    for name in os.listdir(source):
        shutil.copy(os.path.join(source, name), folder)
    at = words.index("sh")
    sys.exit(subprocess.run(["timeout", "-s", "KILL", *words[at + 3:]], cwd=folder).returncode)
"""


def test_a_container_gets_every_bound(monkeypatch, tmp_path):
    import json
    import os
    import sys

    log = tmp_path / "log"
    docker = tmp_path / "docker"
    docker.write_text(RUNTIME.format(log=str(log)))
    docker.chmod(docker.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.path.dirname(sys.executable)}:{os.environ['PATH']}")
    sandbox = open_sandbox("container:my/image")
    outcome = sandbox.run(python("print(input())", stdin=b"hello\n"))
    assert (outcome.exit_code, outcome.stdout) == (0, b"hello\n")
    calls = [json.loads(line) for line in log.read_text().splitlines()]
    run = next(call for call in reversed(calls) if call[0] == "run")
    for words in (
        ["--network", "none"],
        ["--cap-drop", "ALL"],
        ["--read-only"],
        ["--pids-limit", "35"],
        ["my/image"],
    ):
        assert any(run[i : i + len(words)] == words for i in range(len(run))), words
    assert [call[0] for call in calls] == ["run", "rm", "run", "rm"]


def test_a_runtime_that_does_not_run_is_refused(monkeypatch, tmp_path):
    docker = tmp_path / "docker"
    docker.write_text("#!/bin/sh\necho 'Cannot connect to the daemon' >&2; exit 125\n")
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(CapabilityError, match="Cannot connect to the daemon"):
        ContainerSandbox()
