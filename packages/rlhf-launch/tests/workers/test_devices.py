import threading

import pytest
from rlhf_launch.workers.devices import SharedDevices, Tenant, in_turns, turns_by_phase


class Record:
    """What has left and come, in order."""

    def __init__(self, *shared):
        self.devices = SharedDevices(shared)
        self.events = []

    def admit(self, *names):
        for name in names:
            leave, come = (lambda n=name: self.events.append(f"-{n}")), (lambda n=name: self.events.append(f"+{n}"))
            with self.devices.moving_in(name, Tenant(leave=leave, come=come)):
                self.events.append(f"{name}?")
        return self

    def work(self, *names):
        self.events.clear()
        with self.devices.at_work(*names):
            assert set(names) <= self.devices.present
        return list(self.events)


def test_engines_that_come_up_one_after_the_other_leave_for_the_next():
    record = Record({"policy", "critic", "rollout"}).admit("policy", "critic", "rollout", "reference")
    assert record.events == ["policy?", "-policy", "critic?", "-critic", "rollout?", "reference?"]
    assert record.devices.present == {"rollout", "reference"}


def test_only_neighbours_leave_and_they_come_back_in_their_turn():
    record = Record({"policy", "reference"}, {"critic", "reward"}).admit("policy", "reference", "critic", "reward")
    assert record.work("policy") == ["-reference", "+policy"]
    assert record.work("policy") == []
    assert record.work("critic") == ["-reward", "+critic"]
    assert record.work("reference") == ["-policy", "+reference"]
    assert record.devices.present == {"reference", "critic"}


def test_engines_needed_together_are_there_together():
    record = Record({"policy", "critic", "rollout"}).admit("policy", "critic", "rollout")
    record.work("critic")
    assert record.work("policy", "rollout") == ["-critic", "+policy", "+rollout"]
    assert record.work("rollout") == ["-policy"]


def test_one_that_is_in_two_sets_makes_way_in_both():
    record = Record({"policy", "rollout"}, {"critic", "rollout"}).admit("policy", "critic", "rollout")
    assert record.work("policy") == ["-rollout", "+policy"]
    assert record.work("critic") == ["+critic"]
    assert record.work("rollout") == ["-critic", "-policy", "+rollout"]


def test_what_an_outer_turn_needs_stays():
    record = Record({"policy", "critic", "rollout"}).admit("policy", "critic", "rollout")
    with record.devices.at_work("policy", "rollout"):
        assert record.work("policy") == []
        assert record.devices.present == {"policy", "rollout"}


def test_one_joins_a_turn_that_has_begun():
    # An engine that is lost in generation takes its weights from the policy at once.
    record = Record({"policy", "reward", "rollout"}).admit("policy", "reward", "rollout")
    with record.devices.at_work("rollout", "reward"):
        assert record.work("policy", "rollout") == ["+policy"]
        assert record.devices.present == {"policy", "rollout", "reward"}
    assert record.work("rollout") == ["-policy", "-reward"]


def test_a_thread_that_waits_for_itself_is_told():
    record = Record({"policy", "critic"}).admit("policy", "critic")
    with record.devices.at_work("policy"), pytest.raises(RuntimeError, match="policy is at work"):
        record.work("critic")


def test_another_thread_waits_for_the_end_of_the_turn():
    record = Record({"critic", "reward"}).admit("critic", "reward")
    begun, ended = threading.Event(), []

    def score():
        begun.set()
        with record.devices.at_work("reward"):
            ended.append(record.devices.present)

    with record.devices.at_work("critic"):
        thread = threading.Thread(target=score)
        thread.start()
        begun.wait()
        thread.join(0.1)
        assert not ended
        assert record.devices.present == {"critic"}
    thread.join()
    assert ended == [{"reward"}]


def test_a_turn_is_over_even_if_it_fails():
    record = Record({"policy", "critic"}).admit("policy", "critic")
    with pytest.raises(ZeroDivisionError), record.devices.at_work("policy"):
        raise ZeroDivisionError
    assert record.work("critic") == ["-policy", "+critic"]


def test_one_that_cannot_come_is_not_there():
    devices = SharedDevices([{"policy", "critic"}])

    def fail():
        raise MemoryError

    for name, come in {"policy": fail, "critic": lambda: None}.items():
        with devices.moving_in(name, Tenant(leave=lambda: None, come=come)):
            pass
    with pytest.raises(MemoryError), devices.at_work("policy"):
        pass
    assert "policy" not in devices.present
    with devices.at_work("critic"):
        assert devices.present == {"critic"}


ROLES = ["policy", "critic", "reference", "reward model", "rollout"]


def test_the_phases_of_roles_in_one_place():
    assert turns_by_phase(ROLES, [set(ROLES)]) == {
        "generate": [["reward model", "rollout"]],
        "score": [["policy"], ["reference"], ["critic"]],
        "train": [["critic"], ["policy"]],
        "sync": [["policy", "rollout"]],
    }


def test_the_phases_of_pairs_name_those_who_share():
    found = turns_by_phase(ROLES, [{"policy", "reference"}, {"critic", "reward model"}])
    assert found == {
        "generate": [["reward model"]],
        "score": [["policy", "critic"], ["reference"]],
        "train": [["critic", "policy"]],
        "sync": [["policy"]],
    }
    assert turns_by_phase(ROLES, []) == {}


def test_roles_that_share_nothing_have_one_turn():
    assert in_turns(["policy", "reference", "critic"], []) == [["policy", "reference", "critic"]]
    assert in_turns([], [frozenset({"a", "b"})]) == []


def test_roles_that_share_devices_have_turns_of_their_own():
    everything = frozenset({"policy", "reference", "critic"})
    assert in_turns(["policy", "reference", "critic"], [everything]) == [["policy"], ["reference"], ["critic"]]
    pairs = [frozenset({"policy", "reference"}), frozenset({"critic", "reward"})]
    assert in_turns(["policy", "reference", "critic"], pairs) == [["policy", "critic"], ["reference"]]
