"""The stream of groups, with a generator whose tokens and scores are known: nothing lost, nothing twice."""

import asyncio
import json
import random
import threading
import time
import types
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rlhf_core import (
    DeadlineExceeded,
    DroppedSample,
    EngineDiedError,
    GenerationRequest,
    RewardError,
    Sample,
    SamplingConfig,
    Score,
)
from rlhf_core.testing.fakes import ScriptedBackend
from rlhf_launch.samples.groups import GroupMaker, collate_groups, staleness
from rlhf_launch.samples.ledger import Ledger, LedgerLimits
from rlhf_launch.samples.producer import Producer, ProducerConfig
from rlhf_launch.samples.prompts import Prompt, PromptStream
from rlhf_launch.samples.reward import Rewarder
from rlhf_launch.samples.sampling import response_sampler
from rlhf_launch.samples.saved_groups import pack_groups, unpack_groups
from rlhf_launch.workers.handles import LocalHandle
from rlhf_launch.workers.rollout_pool import RolloutPool
from rlhf_launch.workers.waits import Waits

TOKENIZER = types.SimpleNamespace(batch_decode=lambda rows, **_: ["" for _ in rows])


class Engine(ScriptedBackend):
    """A scripted backend as a worker, whose version is set by hand."""

    pause_modes = frozenset({"keep", "abort"})

    async def start(self):
        return 0.0

    async def capabilities(self):
        from rlhf_core import BackendCapabilities

        return BackendCapabilities(transports=frozenset({"local"}), pause_modes=self.pause_modes)

    def set_version(self, version):
        self._version = version


class ByPrompt:
    """Prompts with an even number get unequal scores, the others equal ones; `bad` prompts have none."""

    def __init__(self, bad=()):
        self.bad = bad

    async def score(self, trajectories, texts):
        number = int(trajectories[0].metadata["number"])
        if number in self.bad:
            return [DroppedSample(sample_id=t.sample_id, reason="no verdict") for t in trajectories]
        return [Score(value=float(i if number % 2 == 0 else 1)) for i in range(len(trajectories))]


class Run:
    """A producer on one or more scripted engines; a step is `step()`."""

    def __init__(self, *, reward=None, script=None, engines=1, during="rest", filter_flat=False, **limits):
        pause_modes = limits.pop("pause_modes", Engine.pause_modes)
        waits = Waits(limits.pop("limit_s", 20))
        numbered = [
            Prompt(prompt_id=str(n), text=str(n), token_ids=(5, n), metadata={"number": n}) for n in range(100)
        ]
        script = script or (lambda request, index: (9,))
        self.engines = [Engine(script=script, token_delay_s=0.0005) for _ in range(engines)]
        for engine in self.engines:
            engine.pause_modes = pause_modes
        self.pool = RolloutPool(
            [LocalHandle(f"rollout-{i}", lambda e=e: e) for i, e in enumerate(self.engines)], waits=waits
        )
        self.pool.start()
        self.prompts = PromptStream(numbered, seed=0, shuffle=False)
        self.ledger = Ledger(LedgerLimits(**{"per_step": 6, "steps": 100, **limits}))
        self.producer = Producer(
            GroupMaker(
                response_sampler(self.pool, SamplingConfig(max_tokens=64), seed=0),
                Rewarder(reward or ByPrompt(), TOKENIZER),
            ),
            self.prompts,
            self.ledger,
            self.pool,
            ProducerConfig(samples=4, during_training=during, filter_flat=filter_flat),
            self.pool.waits,
        )
        self.version = 0
        self.account = []

    def step(self):
        groups, self.report = self.producer.collect()
        self.account += self.report.prompts
        self.producer.pause()
        self.version += 1
        for engine in self.engines:
            engine.set_version(self.version)
        self.producer.resume(self.version)
        return groups

    @property
    def requests(self):
        return [request for engine in self.engines for request in engine.requests]

    def close(self):
        self.producer.close()
        self.pool.close()


@pytest.fixture
def start():
    runs = []

    def make(**options):
        runs.append(Run(**options))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


def numbers(groups):
    return [group.trajectories[0].metadata["number"] for group in groups]


def of_length(length):
    return lambda request, index: (9,) * length(request.prompt_token_ids[1])


def test_alternation_takes_the_prompts_in_order(start):
    run = start()
    groups = run.step()
    assert numbers(groups) == [0, 1, 2, 3, 4, 5]
    assert collate_groups(groups).sample_ids[:5] == ("0/0", "0/1", "0/2", "0/3", "1/0")
    assert len(run.requests) == 6  # one request for all samples of a prompt
    assert len({request.seed for request in run.requests}) == 6
    time.sleep(0.05)
    assert len(run.requests) == 6  # nothing is generated while the trainer is at work
    assert numbers(run.step()) == [6, 7, 8, 9, 10, 11]


def test_groups_that_teach_nothing_are_replaced(start):
    run = start(filter_flat=True, max_misses=24)
    assert numbers(run.step()) == [0, 2, 4, 6, 8, 10]
    assert run.report.counts["prompts/started"] - run.report.counts["prompts/filtered"] == 6
    assert run.report.counts["prompts/used"] == 6


def test_a_step_that_stays_short_trains_on_what_it_has(start):
    run = start(filter_flat=True, max_misses=3)
    assert numbers(run.step()) == [0, 2, 4, 6, 8]
    assert run.report.counts["prompts/filtered"] == 4


def test_prompts_without_a_score_are_replaced_and_counted(start):
    run = start(reward=ByPrompt(bad={1, 4}))
    groups = run.step()
    assert sorted(run.ledger.dropped) == [(1, "no verdict"), (4, "no verdict")]
    assert numbers(groups) == [0, 2, 3, 5, 6, 7]
    assert run.report.counts["prompts/dropped"] == 2
    assert run.report.counts["dropped_samples"] == 8


def test_a_step_without_any_score_ends_the_run(start):
    with pytest.raises(RewardError, match="no sample of 12 prompts has a score"):
        start(reward=ByPrompt(bad=range(100))).step()


def test_an_error_of_a_reward_is_raised_by_collect(start):
    class Broken:
        async def score(self, trajectories, texts):
            raise RewardError("no network")

    with pytest.raises(RewardError, match="no network"):
        start(reward=Broken()).step()


def test_a_wait_that_gets_too_long_says_what_is_missing(start):
    run = start(script=of_length(lambda n: 10_000 if n == 3 else 1), limit_s=0.3)
    run.engines[0]._delay = 0.01
    with pytest.raises(DeadlineExceeded, match=r"1 prompts are unfinished, 5 groups are there"):
        run.step()


def test_partial_rollouts_continue_under_the_new_weights(start):
    run = start(during="pause", max_staleness=1, per_step=2, script=of_length(lambda n: 60 if n == 1 else 2))
    first = run.step()
    assert 1 not in numbers(first)
    second = run.step()
    assert 1 in numbers(second)  # where it is due; it was waited for
    (slow,) = (group for group in second if numbers([group]) == [1])
    versions = {v for t in slow.trajectories for v in t.weight_versions if v >= 0}
    assert versions == {0, 1}
    assert staleness(second, 1) == {"staleness/mean": pytest.approx(1), "staleness/max": 1}
    assert sum(request.prompt_token_ids[1] == 1 for request in run.requests) == 1  # never started over


def test_engines_that_can_only_abort_continue_from_the_tokens_they_had(start):
    def countdown(request, index):
        """The rest of a fixed text, whatever part of it the prompt has already."""
        text = range(60 if request.prompt_token_ids[1] == 1 else 2)
        return list(text)[len(request.prompt_token_ids) - 2 :]

    run = start(during="pause", max_staleness=1, per_step=2, script=countdown, pause_modes=frozenset({"abort"}))
    run.step()
    (slow,) = (group for group in run.step() if numbers([group]) == [1])
    for trajectory in slow.trajectories:
        assert trajectory.response_token_ids == tuple(range(60))
        assert not trajectory.truncated
        assert {v for v in trajectory.weight_versions if v >= 0} == {0, 1}
    continued = [request for request in run.requests if request.request_id.startswith("1+")]
    assert len(continued) == 4
    assert len({request.seed for request in run.requests}) == len(run.requests)
    assert all(r.sampling.max_tokens == 64 - (len(r.prompt_token_ids) - 2) for r in continued)


def test_samples_that_were_given_up_start_again_where_penalties_count_their_tokens():
    """To a further request the tokens that were there would be the prompt's, which such penalties pass over."""

    class GivesUpOnce(Engine):
        async def generate(self, request):
            result = await super().generate(request)
            if request.request_id != "r":
                return result
            early = Sample(token_ids=(3,), log_probs=(-1.0,), weight_versions=(0,), finish_reason="abort")
            return replace(result, samples=(result.samples[0], early))

    engine = GivesUpOnce(script=lambda request, index: (7, 8, 9))
    pool = RolloutPool([LocalHandle("rollout-0", lambda: engine)], waits=Waits(60))
    pool.start()
    for penalty, starts_again in (({"frequency_penalty": 0.5}, True), ({"repetition_penalty": 1.5}, False)):
        sampling = SamplingConfig(max_tokens=8, **penalty)
        request = GenerationRequest(request_id="r", prompt_token_ids=(1,), sampling=sampling, n=2, seed=1)
        result = asyncio.run(pool.generate(request))
        assert [s.finish_reason for s in result.samples] == ["stop", "stop"]
        again = engine.requests[-1]
        assert again.prompt_token_ids == ((1,) if starts_again else (1, 3))
        assert again.sampling.max_tokens == (8 if starts_again else 7)
        assert result.samples[1].token_ids == ((7, 8, 9) if starts_again else (3, 7, 8, 9))
    pool.close()


def test_engines_stand_still_while_training_only_where_that_is_wanted(start):
    for during, still in (("pause", True), ("run", False)):
        run = start(during=during, max_staleness=1, per_step=2, script=of_length(lambda n: 1 if n < 2 else 60))
        run.producer.collect()
        run.producer.pause()
        assert run.pool.take_idle_seconds() >= 0
        time.sleep(0.1)
        assert run.engines[0]._paused is still
        if still:  # whether an engine that works is done by now depends on the machine
            assert run.pool.take_idle_seconds() > 0.08
        run.producer.resume(1)
        assert not run.engines[0]._paused


def test_asynchronous_generation_goes_on_during_training(start):
    run = start(during="run", max_staleness=1, per_step=2)
    run.producer.collect()
    deadline = time.monotonic() + 120
    while run.ledger.waiting < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert run.ledger.waiting == 2  # the next step is there before this one is trained
    assert len(run.requests) == 4


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    bound=st.integers(1, 3),
    during=st.sampled_from(["pause", "run"]),
    engines=st.integers(1, 2),
    filter_flat=st.booleans(),
)
def test_no_token_is_older_than_the_bound_and_no_prompt_is_lost_or_used_twice(
    seed, bound, during, engines, filter_flat
):
    length = [random.Random(seed + n).choice((1, 3, 40)) for n in range(1000)]
    run = Run(
        script=of_length(lambda n: length[n]),
        during=during,
        max_staleness=bound,
        engines=engines,
        filter_flat=filter_flat,
        per_step=3,
        steps=5,
        max_misses=50,
    )
    try:
        used = []
        for step in range(5):
            groups = run.step()
            assert staleness(groups, step)["staleness/max"] <= bound
            used += numbers(groups)
        assert len(used) == len(set(used)) == 15
        assert not filter_flat or all(n % 2 == 0 for n in used)
        counts = run.ledger.counts
        assert counts["dispatched"] == run.prompts.position
        assert counts["dispatched"] == len(run.ledger.in_flight) + run.ledger.waiting + 15 + counts["filtered"]
        assert filter_flat or not run.ledger.in_flight  # nothing is started that no step would take
    finally:
        run.close()


def test_prompts_in_flight_are_generated_again_after_resume(start):
    script = of_length(lambda n: 60 if n in (0, 3) else 1)
    run = start(during="run", max_staleness=1, per_step=2, script=script)
    first = run.step()
    state, groups = run.producer.state()
    assert set(state["ledger"]["in_flight"]) >= {0, 3}
    run.close()
    again = start(during="run", max_staleness=1, per_step=2, script=script)
    again.version = 1
    again.producer.restore(state, groups, step=1)
    rest = [numbers(again.step()) for _ in range(4)]
    used = sorted(n for groups in (numbers(first), *rest) for n in groups)
    assert len(used) == len(set(used)) == 10
    assert used[:6] == [0, 1, 2, 3, 4, 5]  # the long ones too: no bias to short answers
    seeds = {r.request_id: r.seed for r in run.requests}
    assert all(seeds[r.request_id] == r.seed for r in again.requests if r.request_id in seeds)


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 99),
    bound=st.integers(0, 2),
    during=st.sampled_from(["pause", "run"]),
    interrupted=st.integers(0, 4),
)
def test_every_prompt_is_in_the_account_once_whatever_is_interrupted(seed, bound, during, interrupted):
    length = [random.Random(seed + n).choice((1, 3, 30)) for n in range(1000)]
    limits = {"max_staleness": bound, "per_step": 3, "steps": 5, "max_misses": 50, "filter_flat": True}
    limits["during"] = during if bound else "rest"

    def begin():
        return Run(script=of_length(lambda n: length[n]), reward=ByPrompt(bad=range(6, 1000, 7)), **limits)

    run, account, used = begin(), [], []
    try:
        for step in range(5):
            if step == interrupted:
                account, reported = run.account, run.producer.state()
                state, groups = json.loads(json.dumps(reported[0])), unpack_groups(pack_groups(reported[1]))
                run.close()
                run = begin()
                run.account, run.version = account, step
                for engine in run.engines:
                    engine.set_version(step)
                run.producer.restore(state, groups, step=step)
            used += numbers(run.step())
            newest = {entry["position"]: entry for entry in run.report.prompts}
            assert [run.report.counts[f"prompts/{what}"] for what in ("used", "filtered", "dropped")] == [
                sum(entry["outcome"] == what for entry in newest.values())
                for what in ("used", "filtered", "dropped")
            ]
        positions = [entry["position"] for entry in run.account]
        assert sorted(positions) == list(range(run.prompts.position))
        assert not run.ledger.in_flight
        outcome = {entry["position"]: entry["outcome"] for entry in run.account}
        assert sorted(used) == [position for position in sorted(outcome) if outcome[position] == "used"]
        assert len(used) == 15
        for entry in run.account:
            assert (entry["outcome"] == "dropped") == (entry["position"] % 7 == 6) == ("reason" in entry)
            assert entry["outcome"] == "dropped" or entry["lengths"] == [length[entry["position"]]] * 4
    finally:
        run.close()


def test_restoring_gives_up_what_runs(start):
    run = start(during="run", max_staleness=1, per_step=2, script=of_length(lambda n: 60))
    run.step()
    state, groups = run.producer.state()
    for engine in run.engines:
        engine.set_version(1)
    run.producer.restore(state, groups, step=1)
    assert len(numbers(run.step())) == 2
    counts = run.ledger.counts
    assert counts["dispatched"] == len(run.ledger.in_flight) + run.ledger.waiting + counts["consumed"]


def test_an_engine_that_dies_in_mid_generation_costs_no_prompt(start):
    run = start(during="run", max_staleness=1, per_step=4, engines=2, script=of_length(lambda n: 30))
    threading.Timer(0.01, run.engines[0].die).start()
    used = [n for _ in range(3) for n in numbers(run.step())]
    assert len(used) == len(set(used)) == 12
    assert run.pool.live == [1]


def test_the_last_engine_s_death_ends_the_run(start):
    run = start()
    run.engines[0].die("power cut")
    with pytest.raises(EngineDiedError, match="power cut"):
        run.step()


def test_a_request_that_a_failed_sync_ended_starts_again(start):
    from rlhf_core import StaleWeightsError

    run = start(per_step=1)
    engine, calls = run.engines[0], []
    generate = engine.generate

    async def once_stale(request):
        calls.append(request.request_id)
        if len(calls) == 1:
            raise StaleWeightsError("the last weight sync failed")
        return await generate(request)

    engine.generate = once_stale
    assert numbers(run.step()) == [0]
    assert calls == ["0", "0"]


def test_closing_twice_is_harmless_and_ends_what_runs():
    run = Run(during="run", max_staleness=1, script=of_length(lambda n: 60))
    run.producer._open = True
    with run.producer._lock:
        run.producer._fill()
    run.close()
    run.producer.close()
    assert not asyncio.all_tasks(run.producer._thread._loop)
