"""A sandbox behind HTTP, both sides."""

import pytest
from rlhf_core import CapabilityError, ConfigError, DataError, ProgramLimits, ProgramOutcome, SandboxError
from rlhf_rollout import RemoteSandbox, SandboxServer, UnconfinedSandbox
from rlhf_rollout.gateway.http import ServerThread
from rlhf_rollout.sandbox.wire import outcome_from_json, outcome_to_json, program_from_json, program_to_json
from sandbox_ground import python


class Broken:
    def run(self, program):
        raise SandboxError("out of order")


@pytest.fixture
def serve():
    opened = []

    def start(sandbox, **settings):
        server = SandboxServer(sandbox, **settings)
        thread = ServerThread(server, host="127.0.0.1", port=0)
        opened.extend([server, thread])
        return thread.address

    yield start
    for one in opened:
        one.close()


def test_programs_run_over_there(serve):
    url = serve(UnconfinedSandbox(), token="t")
    sandbox = RemoteSandbox(url, token="t")
    assert sandbox.run(python("print(input())", stdin=b"hello")).stdout == b"hello\n"
    first = "import sys; print('ping', flush=True); sys.stderr.write(input())"
    outcome, _ = sandbox.run_linked(python(first), python("while True: print(input() + ' pong', flush=True)"))
    assert outcome.stderr == b"ping pong"
    with pytest.raises(CapabilityError, match="401"):
        RemoteSandbox(url, token="guess")


def test_the_server_bounds_what_clients_ask_for(serve):
    sandbox = RemoteSandbox(serve(UnconfinedSandbox(), most=ProgramLimits(wall_s=2.0), most_body_bytes=10_000))
    with pytest.raises(DataError, match=r"wall_s is at most 2.0 here"):
        sandbox.run(python("1", limits=ProgramLimits(wall_s=3.0)))
    with pytest.raises((DataError, SandboxError), match=r"larger than 10000 bytes|BrokenPipe|reset"):
        sandbox.run(python("1", stdin=b"x" * 20_000, limits=ProgramLimits(wall_s=1.0)))


def test_a_sandbox_that_fails_can_be_asked_again(serve):
    with pytest.raises(SandboxError, match=r"503.*out of order"):
        RemoteSandbox(serve(Broken())).run(python("1"))


def test_programs_and_outcomes_survive_the_wire():
    program = python("1", stdin=b"\x00\xff", data=b"\x80")
    assert program_from_json(program_to_json(program)) == program
    outcome = ProgramOutcome(exit_code=-9, stdout=b"\xff", stderr=b"e", limit="memory")
    assert outcome_from_json(outcome_to_json(outcome)) == outcome


@pytest.mark.parametrize(
    "found",
    [
        None,
        [],
        {},
        {"command": []},
        {"command": [5]},
        {"command": ["a"], "files": {"../x": ""}},
        {"command": ["a"], "limits": {"wall_s": -1}},
        {"command": ["a"], "limits": {"wall_s": float("nan")}},
        {"command": ["a"], "limits": {"speed": 1}},
        {"command": ["a"], "env_vars": {"A=B": "c"}},
    ],
)
def test_what_is_no_program_is_refused(found):
    with pytest.raises(DataError, match="not a program"):
        program_from_json(found)


@pytest.mark.parametrize("found", [5, {}, {"limit": "", "exit_code": 0}, {"limit": "mood"}])
def test_what_is_no_outcome_is_refused(found):
    with pytest.raises(DataError, match="not an outcome"):
        outcome_from_json(found)


def test_limits_are_checked():
    with pytest.raises(ConfigError, match="wall_s"):
        ProgramLimits(wall_s=0)
