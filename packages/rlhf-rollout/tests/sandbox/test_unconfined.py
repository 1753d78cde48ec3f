"""Programs without a sandbox: limits for each process, a deadline, and a folder that is taken away."""

import tempfile

import pytest
from rlhf_core import ProgramLimits
from rlhf_rollout import UnconfinedSandbox
from sandbox_ground import python


@pytest.mark.parametrize(
    ("source", "limit", "note"),
    [
        ("import time; time.sleep(60)", "time", b""),
        ("x = bytearray(1 << 30)", "", b"MemoryError"),
        ("while True: print('x' * 1000)", "output", b""),
        ("raise SystemExit(3)", "", b""),
    ],
)
def test_limits_hold(source, limit, note):
    outcome = UnconfinedSandbox().run(python(source, limits=ProgramLimits(wall_s=1.0)))
    assert not outcome.ok
    assert outcome.limit == limit
    assert note in outcome.stderr


def test_the_folder_is_taken_away_whatever_the_program_does_to_it(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    outcome = UnconfinedSandbox().run(python("import shutil; shutil.rmtree('.', ignore_errors=True); print(1)"))
    assert outcome.stdout == b"1\n"
    assert not list(tmp_path.iterdir())
