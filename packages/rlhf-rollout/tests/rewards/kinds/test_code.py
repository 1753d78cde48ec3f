"""Programs in their sandbox, and the reward for passing tests."""

import sys
import threading

import pytest
from reward_ground import score, values
from rlhf_core import ConfigError, DataError
from rlhf_rollout import CodeReward, CodeRewardConfig, ProgramLimits, run_program
from rlhf_rollout.rewards import sandbox as sandbox_module

QUICK = ProgramLimits(wall_s=3.0)


def test_a_program_reads_and_writes():
    result = run_program("import sys; print(input()[::-1]); print('oops', file=sys.stderr)", stdin="abc\n")
    assert (result.status, result.exit_code, result.stdout, result.stderr) == ("ok", 0, "cba\n", "oops\n")


@pytest.mark.stack
@pytest.mark.parametrize(
    ("source", "status", "note"),
    [
        ("raise SystemExit(3)", "error", ""),
        ("1 / 0", "error", "ZeroDivisionError"),
        ("import time; time.sleep(60)", "timeout", ""),
        ("x = bytearray(1 << 30)", "error", "MemoryError"),
        ("while True: print('x' * 1000)", "output", ""),
        ("import ctypes; ctypes.string_at(0)", "error", ""),
    ],
)
def test_limits_hold(source, status, note):
    result = run_program(source, limits=QUICK)
    assert result.status == status
    assert note in result.stderr
    assert len(result.stdout) <= QUICK.output_bytes


def test_nothing_of_this_process_reaches_it(monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "x")
    result = run_program("import os; print('SECRET_KEY' in os.environ, os.listdir('.'))")
    assert result.stdout.startswith("False")


@pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
def test_there_is_no_network_where_the_system_allows():
    if not sandbox_module.namespaces_available():
        pytest.skip("this system permits no namespaces")
    import socket

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    source = f"import socket; socket.create_connection(('127.0.0.1', {port}), 2); print('connected')"
    result = run_program(source, limits=ProgramLimits(network="off"))
    listener.close()
    assert (result.status, result.stdout) == ("error", "")


def test_without_namespaces_the_limits_hold_and_off_is_refused(monkeypatch):
    monkeypatch.setattr(sandbox_module, "namespaces_available", lambda: False)
    assert run_program("import time; time.sleep(60)", limits=ProgramLimits(wall_s=0.5)).status == "timeout"
    assert run_program("print(1)").stdout == "1\n"
    with pytest.raises(Exception, match="must run without network"):
        run_program("print(1)", limits=ProgramLimits(network="off"))


def test_processes_do_not_outlive_the_program(tmp_path):
    if not sandbox_module.namespaces_available():
        pytest.skip("this system permits no namespaces")
    mark = tmp_path / "mark"
    code = f"import time; time.sleep(1.0); open({str(mark)!r}, 'w')"
    source = (
        "import subprocess, sys\n"
        f"code = {code!r}\n"
        "subprocess.Popen([sys.executable, '-c', code], start_new_session=True)\n"
    )
    assert run_program(source).status == "ok"
    assert not threading.Event().wait(2.0)
    assert not mark.exists()


# ------------------------------------------------------------ the reward

ASSERTS = "assert double(2) == 4\nassert double(-1) == -2"
RIGHT = "Like this:\n```python\ndef double(x):\n    return 2 * x\n```\nDone."


def test_asserts_after_the_program():
    texts = [RIGHT, "def double(x): return x * x", "```python\nexit(0)\n```", "```python\n```", "no code at all"]
    found = score(CodeReward(), texts, tests=ASSERTS)
    assert [s.value for s in found] == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert [s.components["no_code"] for s in found] == [0.0, 0.0, 0.0, 1.0, 0.0]


def test_pairs_of_input_and_output():
    tests = [{"input": "2\n", "output": "4"}, {"input": "3", "output": "6\n"}, {"input": "0", "output": "1"}]
    text = "print(2 * int(input()))  "
    assert values(CodeReward(), [text], tests=tests) == [0.0]
    assert values(CodeReward(), [text], tests=tests[:2]) == [1.0]
    partial = CodeReward(CodeRewardConfig(partial=True))
    assert values(partial, [text], tests=tests) == [pytest.approx(2 / 3)]


def test_a_program_that_hangs_scores_nothing_and_says_so():
    reward = CodeReward(CodeRewardConfig(limits=ProgramLimits(wall_s=0.5)))
    (found,) = score(reward, ["while True: pass"], tests="pass")
    assert (found.value, found.components["timeout"]) == (0.0, 1.0)


@pytest.mark.parametrize("tests", [None, "", [], [{"input": "1"}], 7])
def test_rows_without_tests_are_refused(tests):
    with pytest.raises(DataError, match="'s0' needs the column 'tests'"):
        values(CodeReward(), ["print(1)"], tests=tests)


def test_settings_are_checked():
    with pytest.raises(ConfigError, match="wall_s"):
        ProgramLimits(wall_s=0)
    with pytest.raises(ConfigError, match="workers"):
        CodeRewardConfig(workers=0)
