"""Conformance kit for sandboxes: subclass, give a sandbox, run pytest.

    from rlhf_rollout.testing.sandbox import SandboxConformance

    class TestMySandbox(SandboxConformance):
        @pytest.fixture(scope="class")
        @classmethod
        def sandbox(cls):
            return MySandbox()

Every attack is a program that a code reward is to judge; it must score 0, harm nothing around it, and be over in time.
`short = True` leaves it at a dozen of them. The attacks are real: try a sandbox that is not trusted yet on a machine
that can be lost.
"""

from __future__ import annotations

import os
from typing import Any, ClassVar

import pytest
from rlhf_core import Program, ProgramLimits

from rlhf_rollout.testing.attacks import SHORT, AttackGround, attacks, try_attack

_LIMITS = ProgramLimits(wall_s=20.0, output_bytes=1 << 16)


def _python(source: str, *, stdin: bytes = b"", limits: ProgramLimits = _LIMITS) -> Program:
    return Program(command=("python", "main.py"), files={"main.py": source.encode()}, stdin=stdin, limits=limits)


class SandboxConformance:
    """What every sandbox must do. Override the fixture `sandbox`."""

    short: ClassVar[bool] = False
    """Whether only a dozen of the attacks are tried."""

    @pytest.fixture(scope="class")
    @classmethod
    def sandbox(cls) -> Any:
        """The sandbox under test."""
        raise NotImplementedError("override the fixture `sandbox`")

    @pytest.fixture(scope="class")
    @classmethod
    def ground(cls) -> Any:
        """What attacks go for."""
        with AttackGround() as ground:
            yield ground

    def test_programs_read_write_and_end(self, sandbox: Any) -> None:
        """Input, output, errors and exit codes arrive."""
        source = "import sys; print(input()[::-1]); print('oops', file=sys.stderr); sys.exit(3)"
        outcome = sandbox.run(_python(source, stdin=b"abc\n"))
        assert (outcome.exit_code, outcome.stdout, outcome.stderr, outcome.limit) == (3, b"cba\n", b"oops\n", "")

    def test_bytes_are_kept(self, sandbox: Any) -> None:
        """Input and output are bytes, of any size below the bound."""
        data = os.urandom(60_000)
        source = "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read())"
        assert sandbox.run(_python(source, stdin=data)).stdout == data

    @pytest.mark.parametrize(
        ("source", "limit"), [("while True: print('x' * 1000)", "output"), ("while True: pass", "time")]
    )
    def test_limits_are_named(self, sandbox: Any, source: str, limit: str) -> None:
        """What stopped a program is said."""
        limits = ProgramLimits(wall_s=20.0 if limit == "output" else 1.0, output_bytes=1 << 16)
        outcome = sandbox.run(_python(source, limits=limits))
        assert outcome.limit == limit
        assert not outcome.ok
        assert len(outcome.stdout) <= 1 << 16

    def test_linked_programs_talk(self, sandbox: Any) -> None:
        """Each one's output is the other's input, and the second ends with the first."""
        first = "import sys; print('ping', flush=True); sys.stderr.write(input())"
        second = "while True: print(input() + ' pong', flush=True)"
        outcome, _ = sandbox.run_linked(_python(first), _python(second))
        assert (outcome.exit_code, outcome.stderr) == (0, b"ping pong")

    def test_programs_keep_nothing(self, sandbox: Any) -> None:
        """What one program wrote, the next does not find."""
        source = "import os; print(os.path.exists('/tmp/x')); open('/tmp/x', 'w').close()"
        assert [sandbox.run(_python(source)).stdout for _ in range(2)] == [b"False\n", b"False\n"]

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """One test for each attack."""
        if "attack" in metafunc.fixturenames:
            chosen = [attack for attack in attacks() if not self.short or attack.name in SHORT]
            metafunc.parametrize("attack", chosen, ids=[attack.id for attack in chosen])

    def test_attacks(self, sandbox: Any, ground: AttackGround, attack: Any) -> None:
        """It scores 0, harms nothing, and ends in time."""
        result = try_attack(attack, sandbox, ground)
        assert result.score == 0
        assert not result.harm
        assert result.repelled
