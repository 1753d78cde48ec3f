"""What tests of programs share."""

import pytest
from rlhf_core import CapabilityError, Program, ProgramLimits
from rlhf_rollout import BubblewrapSandbox

QUICK = ProgramLimits(wall_s=5.0)


def bubblewrap():
    """The sandbox of this machine; skips where bwrap is missing or not permitted."""
    try:
        return BubblewrapSandbox()
    except CapabilityError as error:
        pytest.skip(str(error))


def python(source, *, stdin=b"", limits=QUICK, **more):
    files = {"main.py": source.encode(), **more}
    return Program(command=("python", "-S", "-s", "main.py"), files=files, stdin=stdin, limits=limits)
