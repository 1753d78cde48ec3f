"""Programs in namespaces: what they see, their bounds, and that nothing is left of them."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from rlhf_core import CapabilityError, Program, ProgramLimits, SandboxError
from rlhf_rollout import BubblewrapSandbox
from sandbox_ground import QUICK, bubblewrap, python


@pytest.fixture(scope="module")
def sandbox():
    return bubblewrap()


def test_a_program_reads_and_writes(sandbox):
    outcome = sandbox.run(
        python("import sys; print(input()[::-1]); print('oops', file=sys.stderr)", stdin=b"abc\n")
    )
    assert (outcome.exit_code, outcome.stdout, outcome.stderr, outcome.limit) == (0, b"cba\n", b"oops\n", "")
    assert outcome.ok


def test_input_larger_than_a_pipe_arrives(sandbox):
    source = "import sys; print(len(sys.stdin.buffer.read()))"
    assert sandbox.run(python(source, stdin=b"x" * 1_000_000)).stdout == b"1000000\n"
    assert sandbox.run(python("print('unread')", stdin=b"x" * 1_000_000)).stdout == b"unread\n"


@pytest.mark.parametrize(
    ("source", "limits", "limit", "note"),
    [
        ("import time; time.sleep(60)", {"wall_s": 0.5}, "time", b""),
        ("x = bytearray(1 << 30)", {}, "", b"MemoryError"),
        ("while True: print('x' * 1000)", {}, "output", b""),
        ("import os\nfor i in range(999): open(f'/tmp/{i}', 'w')\nwhile True: pass", {"files": 100}, "files", b""),
        ("import ctypes; ctypes.string_at(0)", {}, "", b""),
        ("raise SystemExit(3)", {}, "", b""),
        ("open('big', 'wb').write(bytes(2 << 20))", {"file_bytes": 1 << 20}, "", b""),
    ],
)
def test_limits_hold(sandbox, source, limits, limit, note):
    outcome = sandbox.run(python(source, limits=replace(QUICK, **limits)))
    assert not outcome.ok
    assert outcome.limit == limit
    assert note in outcome.stderr
    assert len(outcome.stdout) <= QUICK.output_bytes


def test_memory_and_processes_are_counted_over_the_whole_tree(sandbox):
    hungry = "import os, time\nfor i in range(6):\n  if not os.fork(): x = bytearray(200 << 20); time.sleep(9)\n"
    assert sandbox.run(python(hungry + "time.sleep(9)")).limit == "memory"
    forks = "import os, time\nfor i in range(100):\n  if not os.fork(): time.sleep(9); os._exit(0)\n"
    outcome = sandbox.run(python(forks))
    assert outcome.limit == "processes" or b"BlockingIOError" in outcome.stderr


def test_nothing_of_this_process_reaches_it(sandbox, monkeypatch, tmp_path):
    monkeypatch.setenv("SECRET_KEY", "x")
    (tmp_path / "secret").write_text("s")
    source = f"import os; print('SECRET_KEY' in os.environ, os.path.exists({str(tmp_path)!r}), os.listdir('.'))"
    assert sandbox.run(python(source)).stdout == b"False False ['main.py']\n"


def test_a_detached_child_ends_with_the_program(sandbox):
    mark = f"8{os.getpid()}.25"
    source = (
        "import subprocess, time\n"
        f"subprocess.Popen(['sleep', {mark!r}], start_new_session=True)\n"
        "time.sleep(0.05)\n"
    )
    assert sandbox.run(python(source)).ok
    assert not [p for p in os.listdir("/proc") if p.isdigit() and mark.encode() in _command_of(p)]


def _command_of(process):
    try:
        with open(f"/proc/{process}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


def test_linked_programs_talk(sandbox):
    first = "import sys; print('ping', flush=True); sys.stderr.write(input())"
    second = "while True: print(input() + ' pong', flush=True)"
    outcome, other = sandbox.run_linked(python(first), python(second))
    assert (outcome.exit_code, outcome.stderr) == (0, b"ping pong")
    assert not other.ok


def test_many_at_once_do_not_meet(sandbox):
    found = {}

    def one(number):
        source = f"import os, time; open('/tmp/mine', 'w').write('{number}'); time.sleep(0.1)\n"
        source += "print(open('/tmp/mine').read(), len([p for p in os.listdir('/proc') if p.isdigit()]))"
        found[number] = sandbox.run(python(source)).stdout

    threads = [threading.Thread(target=one, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: f"{number} 2\n".encode() for number in range(4)}


def test_programs_that_start_slowly_are_not_taken_for_programs_that_hide(sandbox):
    with ThreadPoolExecutor(8) as threads:
        outcomes = list(threads.map(lambda number: sandbox.run(python(f"print({number})")), range(24)))
    assert [outcome.stdout for outcome in outcomes] == [f"{number}\n".encode() for number in range(24)]


def test_a_process_that_hides_is_killed(sandbox):
    hide = "import ctypes, time; ctypes.CDLL(None).prctl(4, 0, 0, 0, 0); time.sleep(9)"
    assert sandbox.run(python(hide, limits=ProgramLimits(wall_s=8.0))).limit == "processes"


def test_no_descriptor_is_left(sandbox):
    sandbox.run(python("1"))
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(3):
        sandbox.run(python("1"))
        sandbox.run_linked(python("1"), python("1"))
    assert set(os.listdir("/proc/self/fd")) == before


def test_other_commands_run(sandbox):
    script = Program(command=("sh", "run.sh", "a b"), files={"run.sh": b'echo "$1"; exit 3'})
    outcome = sandbox.run(script)
    assert (outcome.exit_code, outcome.stdout) == (3, b"a b\n")
    missing = sandbox.run(Program(command=("no-such-program",)))
    assert missing.exit_code == 127
    assert b"cannot start no-such-program" in missing.stderr


def test_where_there_is_no_bwrap_it_says_what_to_install(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(CapabilityError, match="install it"):
        BubblewrapSandbox()


def test_a_bwrap_that_fails_is_refused_with_its_reason(monkeypatch, tmp_path):
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'No permissions to create a new namespace' >&2; exit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(CapabilityError, match=r"No permissions to create a new namespace.*permit user namespaces"):
        BubblewrapSandbox()


def test_a_failure_of_the_sandbox_is_no_outcome(sandbox, monkeypatch):
    monkeypatch.setattr(sandbox, "_bwrap", "/bin/false")
    with pytest.raises(SandboxError, match="did not start"):
        sandbox.run(python("1", limits=ProgramLimits()))
