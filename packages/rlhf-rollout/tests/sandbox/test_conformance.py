"""The attacks that are tried every time; `nox -s attacks` has all of them, as several users."""

import threading

import pytest
from rlhf_rollout import RemoteSandbox, SandboxServer, UnconfinedSandbox
from rlhf_rollout.gateway.http import ServerThread
from rlhf_rollout.testing.attacks import LIMITS, SHORT, Attack, AttackGround, attacks, try_attack
from rlhf_rollout.testing.sandbox import SandboxConformance
from sandbox_ground import bubblewrap

WITHOUT_SOLVE = {
    *("exit at once", "exit without cleaning up", "excepthook", "kill the first process", "deaf to signals"),
    *("forks without end", "time asleep", "time over processes"),
}


class TestBubblewrap(SandboxConformance):
    short = True

    @pytest.fixture(scope="class")
    @classmethod
    def sandbox(cls):
        return bubblewrap()


@pytest.mark.stack
class TestRemote(SandboxConformance):
    short = True

    @pytest.fixture(scope="class")
    @classmethod
    def sandbox(cls):
        server = SandboxServer(bubblewrap(), token="t")
        thread = ServerThread(server, host="127.0.0.1", port=0)
        yield RemoteSandbox(thread.address, token="t")
        thread.close()
        server.close()


def test_there_are_enough_attacks_and_the_short_ones_are_among_them():
    names = {attack.name for attack in attacks()}
    assert len(names) >= 60
    assert names >= SHORT
    assert len({attack.id for attack in attacks()}) == len(attacks())


def test_every_attack_is_a_program():
    with AttackGround() as ground:
        for attack in attacks():
            code = compile(ground.fill(attack.code, LIMITS), attack.id, "exec")
            assert "solve" in code.co_names or attack.name in WITHOUT_SOLVE, attack.id


def test_the_ground_sees_harm():
    """Without a sandbox attacks do harm: a kit that cannot see it would pass anything."""

    def attack(code, wanted="secret"):
        return Attack(name="own", group="escape", code=code, wanted=wanted, form="calls")

    with AttackGround() as ground:
        sandbox = UnconfinedSandbox()
        read = try_attack(attack("def solve(): return open('@FOLDER@/secret').read()"), sandbox, ground)
        assert (read.score, read.repelled) == (1.0, False)
        wrote = try_attack(attack("open('@CANARY@', 'w').close()\ndef solve(): return 1"), sandbox, ground)
        assert wrote.harm == ("a file of the user was changed",)
        killed = try_attack(attack("import os\nos.kill(@VICTIM@, 9)\ndef solve(): return 1"), sandbox, ground)
        assert killed.harm == ("a process of the user was killed",)
        daemon = "import subprocess\nsubprocess.Popen(['sleep', '@SLEEP@'], start_new_session=True)\n"
        left = try_attack(attack(daemon + "def solve(): return 1"), sandbox, ground)
        assert left.harm[0].startswith("processes are left")
        connect = (
            "import socket\ndef solve(): return socket.create_connection(('127.0.0.1', @PORT@)).recv(99).decode()"
        )
        assert try_attack(attack(connect), sandbox, ground).score == 1.0
        honest = try_attack(attack("def solve(): return 1"), sandbox, ground)
        assert honest.repelled
    assert threading.active_count() < 50
