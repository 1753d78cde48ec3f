"""The staleness bound and the accounts, for any order in which samples come back."""

import dataclasses
import datetime
import json
import random
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rlhf_core import DroppedSample, Score, Trajectory
from rlhf_launch.samples.ledger import Ledger, LedgerLimits
from rlhf_launch.samples.saved_groups import pack_groups, unpack_groups
from rlhf_rollout import ScoredGroup


def group(position, *scores):
    trajectory = Trajectory(
        sample_id=f"{position}/0",
        group_id=str(position),
        token_ids=(1, 2),
        response_mask=(False, True),
        rollout_log_probs=(0.0, -1.0),
        weight_versions=(-1, 0),
    )
    values = tuple(Score(value=float(score)) for score in scores or (0,))
    return ScoredGroup(trajectories=(trajectory,) * len(values), scores=values)


def positions(groups):
    return [int(group.trajectories[0].group_id) for group in groups]


def start_all(ledger, next_position):
    """Start what there is room for; returns the next free position."""
    while ledger.room:
        again = ledger.again()
        ledger.start(next_position if again is None else again, repeated=again is not None)
        next_position += again is None
    return next_position


def balanced(ledger):
    counts = ledger.counts
    done = counts["consumed"] + counts["filtered"] + counts["dropped"]
    return counts["dispatched"] == len(ledger.in_flight) + ledger.waiting + done


def test_without_staleness_a_step_takes_exactly_its_prompts():
    ledger = Ledger(LedgerLimits(per_step=3, steps=2))
    assert start_all(ledger, 0) == 3
    for position in (2, 0):
        ledger.finish(position, group(position))
        assert not ledger.ready
    ledger.finish(1, group(1))
    assert ledger.ready
    assert positions(ledger.take()) == [0, 1, 2]
    assert ledger.room == 0  # nothing is generated while the step is trained
    ledger.version = 1
    assert ledger.room == 3
    start_all(ledger, 3)
    for position in (3, 4, 5):
        ledger.finish(position, group(position))
    ledger.take()
    ledger.version = 2
    assert ledger.room == 0  # the run is over


def test_one_version_of_staleness_lets_a_step_more_be_under_way():
    ledger = Ledger(LedgerLimits(per_step=2, steps=9, max_staleness=1))
    assert start_all(ledger, 0) == 4
    ledger.finish(3, group(3))
    ledger.finish(2, group(2))
    assert ledger.ready  # 0 and 1 fit into the next step, where they are due
    assert positions(ledger.take()) == [2, 3]
    assert ledger.room == 0
    ledger.version = 1
    assert start_all(ledger, 4) == 6
    ledger.finish(4, group(4))
    ledger.finish(5, group(5))
    assert not ledger.ready  # 0 and 1 would come too late in the step after
    ledger.finish(0, group(0))
    ledger.finish(1, group(1))
    assert ledger.ready
    assert positions(ledger.take()) == [0, 1]


def test_the_number_in_flight_can_be_bounded():
    ledger = Ledger(LedgerLimits(per_step=4, steps=9, max_staleness=2, max_in_flight=3))
    assert start_all(ledger, 0) == 3
    ledger.finish(1, group(1))
    assert start_all(ledger, 3) == 4


def test_prompts_without_use_are_replaced_up_to_a_limit():
    ledger = Ledger(LedgerLimits(per_step=2, steps=9, max_misses=2))
    start_all(ledger, 0)
    ledger.filter(0, group(0))
    assert start_all(ledger, 2) == 3
    ledger.drop(1, "no verdict")
    assert list(resumed(ledger, ledger.limits).dropped) == [(1, "no verdict")]
    assert start_all(ledger, 3) == 4
    ledger.filter(2, group(2))
    assert ledger.room == 0  # the limit is reached; what is in flight is waited for
    assert not ledger.ready
    ledger.filter(3, group(3))
    assert ledger.ready
    assert positions(ledger.take()) == [0, 2]  # nothing better is there
    assert ledger.counts["consumed"] == 0
    assert balanced(ledger)
    ledger.version = 1
    assert ledger.room == 2


def test_a_step_with_nothing_at_all_is_empty():
    ledger = Ledger(LedgerLimits(per_step=1, steps=9))
    start_all(ledger, 0)
    ledger.drop(0, "no verdict")
    start_all(ledger, 1)
    ledger.drop(1, "no verdict")
    assert ledger.ready
    assert ledger.take() == []


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    per_step=st.integers(1, 4),
    staleness=st.integers(0, 3),
    limit=st.sampled_from([0, 1, 3]),
)
def test_no_order_of_completion_breaks_the_bound_or_loses_a_prompt(seed, per_step, staleness, limit):
    """Which prompt ends next and how, when the trainer looks and when it is done: all by chance."""
    chance, steps = random.Random(seed), 6
    ledger = Ledger(
        LedgerLimits(per_step=per_step, steps=steps, max_staleness=staleness, max_in_flight=limit, max_misses=9)
    )
    fresh, used, useless, started = 0, [], set(), {}
    while ledger.step < steps:
        before = set(ledger.in_flight)
        fresh = start_all(ledger, fresh)
        started |= dict.fromkeys(set(ledger.in_flight) - before, ledger.version)
        assert balanced(ledger)
        training = ledger.version < ledger.step
        if training and (not ledger.in_flight or chance.random() < 0.4):
            ledger.version = ledger.step
        elif not training and ledger.ready and (not ledger.in_flight or chance.random() < 0.5):
            taken = [position for position in positions(ledger.take()) if position not in useless]
            assert all(ledger.step - 1 - started[position] <= staleness for position in taken)
            used += taken
        else:
            position = chance.choice(ledger.in_flight)  # raises if the run is stuck
            outcome = chance.choices(["finish", "filter", "drop"], [8, 1, 1])[0]
            if outcome == "drop":
                ledger.drop(position, "no verdict")
            else:
                getattr(ledger, outcome)(position, group(position, 0, 1))
            useless |= {position} if outcome != "finish" else set()
    assert len(set(used)) == len(used) == ledger.counts["consumed"]
    assert balanced(ledger)


def resumed(ledger, limits):
    other = type(ledger)(limits)
    plain, groups = ledger.state()
    other.restore(json.loads(json.dumps(plain)), unpack_groups(pack_groups(groups)), step=ledger.step)
    return other


def test_a_resumed_ledger_repeats_what_was_in_flight_and_keeps_what_was_finished():
    limits = LedgerLimits(per_step=2, steps=9, max_staleness=1)
    ledger = Ledger(limits)
    start_all(ledger, 0)
    for position in (1, 3, 2):
        ledger.finish(position, group(position, position))
    ledger.take()
    ledger.version = 1
    ledger = resumed(ledger, limits)
    assert ledger.in_flight == [0]
    assert ledger.waiting == 1
    assert ledger.room == 3
    assert ledger.again() == 0
    ledger.start(0, repeated=True)
    assert balanced(ledger)
    assert start_all(ledger, 4) == 6
    ledger.finish(0, group(0))
    assert positions(ledger.take()) == [0, 3]


class BruteForce(Ledger):
    """The rules as they are stated: everything is sorted and looked at again whenever something is asked."""

    @property
    def unfinished(self):
        return len(self.in_flight)

    def chosen(self):
        oldest = sorted(self._finished, key=lambda position: (self._started_at[position], position))
        return sorted(oldest[: self.limits.per_step])

    @property
    def ready(self):
        limits, chosen = self.limits, self.chosen()
        if len(chosen) < limits.per_step and (self.in_flight or not self._exhausted):
            return False
        versions = [version for position, version in self._started_at.items() if position not in chosen]
        return all(
            sum(version + limits.max_staleness <= self.step + later for version in versions)
            <= limits.per_step * later
            for later in range(limits.max_staleness + 1)
        )

    def _pop_oldest(self, count):
        return self.chosen()


class Twins:
    """The ledger and the brute force, which are told the same and must say the same."""

    def __init__(self, limits):
        self.both = Ledger(limits), BruteForce(limits)

    def __getattr__(self, name):
        def told(*args, **kwargs):
            first, second = (getattr(ledger, name)(*args, **kwargs) for ledger in self.both)
            assert first == second
            return first

        return told

    @property
    def seen(self):
        """Whatever can be asked, which is the same."""
        names = ("step", "version", "in_flight", "unfinished", "waiting", "room", "ready", "counts", "dropped")
        first, second = ({name: getattr(ledger, name) for name in names} for ledger in self.both)
        assert first == second
        return types.SimpleNamespace(**first)

    def resume(self, limits):
        assert self.both[0].state()[0]["in_flight"] == self.both[1].state()[0]["in_flight"]
        self.both = tuple(resumed(ledger, limits) for ledger in self.both)


@settings(max_examples=1000, deadline=None)
@given(seed=st.integers(0, 10**9), staleness=st.integers(0, 4))
def test_every_decision_is_that_of_the_brute_force(seed, staleness):
    chance = random.Random(seed)

    def limits():
        return LedgerLimits(
            per_step=chance.randint(1, 4),
            steps=9,
            max_staleness=staleness,
            max_in_flight=chance.choice([0, 0, 1, 2, 5]),
            max_misses=chance.choice([0, 1, 4]),
        )

    twins, fresh = Twins(limits()), 0
    for _ in range(chance.randint(1, 60)):
        seen = twins.seen
        running = [p for p in seen.in_flight if p in twins.both[0]._started_at]
        event = chance.choice(["start", "start", "end", "end", "end", "take", "sync", "resume"])
        if event == "start" and seen.room:
            again = twins.again()
            twins.start(fresh if again is None else again, repeated=again is not None)
            fresh += again is None
        elif event == "end" and running:
            position = chance.choice(running)
            outcome = chance.choices(["finish", "filter", "drop"], [6, 1, 1])[0]
            getattr(twins, outcome)(position, "no verdict" if outcome == "drop" else group(position, 0, 1))
        elif event == "take" and seen.ready and seen.step == seen.version:
            twins.take()
        elif event == "sync":
            for ledger in twins.both:
                ledger.version = ledger.step
        elif event == "resume" and seen.step == seen.version and chance.random() < 0.2:
            twins.resume(limits() if chance.random() < 0.3 else twins.both[0].limits)


@pytest.mark.parametrize("tighter", [{"max_staleness": 0}, {"per_step": 1}])
def test_groups_that_tighter_limits_make_too_old_are_generated_again(tighter):
    ledger = Ledger(LedgerLimits(per_step=2, steps=9, max_staleness=1))
    start_all(ledger, 0)
    for position in range(4):
        ledger.finish(position, group(position))
    ledger.take()
    ledger.version = 1
    wanted = {"per_step": 2, "steps": 9, "max_staleness": 1} | tighter
    ledger = resumed(ledger, LedgerLimits(**wanted))
    assert len(ledger.in_flight) + ledger.waiting == 2
    assert ledger.in_flight
    start_all(ledger, 4)
    for position in ledger.in_flight:
        ledger.finish(position, group(position))
    assert ledger.ready


def test_groups_that_no_file_can_hold_are_generated_again():
    limits = LedgerLimits(per_step=2, steps=9)
    ledger = Ledger(limits)
    start_all(ledger, 0)
    (trajectory,) = group(0).trajectories
    dated = dataclasses.replace(trajectory, metadata={"day": datetime.date(2026, 1, 2)})
    ledger.finish(0, ScoredGroup(trajectories=(dated,), scores=(Score(value=1.0),)))
    ledger.finish(1, group(1))
    ledger = resumed(ledger, limits)
    assert ledger.in_flight == [0]
    assert ledger.waiting == 1


def test_a_waiting_group_survives_a_checkpoint_whole():
    whole = dataclasses.replace(
        group(0, 0.5),
        scores=(Score(value=0.5, components={"a": 1.0}, rewards=(0.0, 0.5)),),
        dropped=(DroppedSample(sample_id="0/1", reason="hung"),),
        greedy_score=0.25,
    )
    limits = LedgerLimits(per_step=1, steps=1)
    ledger = Ledger(limits)
    ledger.start(0)
    ledger.finish(0, whole)
    assert resumed(ledger, limits).take() == [whole]
