"""Lost engines: requests go elsewhere, replacements come up with the right weights, limits hold."""

import asyncio
import threading
import time
import types

import pytest
from rlhf_core import (
    BackendCapabilities,
    DeadlineExceeded,
    EngineDiedError,
    GenerationRequest,
    GenerationResult,
    ResourceError,
    Sample,
    SamplingConfig,
)
from rlhf_launch.weight_sync.replacement import RolloutReplacement
from rlhf_launch.workers.handles import LocalHandle
from rlhf_launch.workers.rollout_pool import RolloutPool
from rlhf_launch.workers.waits import Waits


class Engine:
    """Dies at its `dies_at`-th request."""

    def __init__(self, dies_at=None):
        self.served = 0
        self.delay_s = 0.001
        self.dies_at = dies_at
        self.version = 0
        self.going = asyncio.Event()
        self.going.set()

    async def start(self):
        return 0.0

    async def capabilities(self):
        return BackendCapabilities(transports=frozenset({"local"}))

    async def generate(self, request):
        self.served += 1
        if self.dies_at is not None and self.served >= self.dies_at:
            raise EngineDiedError("out of memory")
        await asyncio.sleep(self.delay_s)
        await self.going.wait()
        sample = Sample(token_ids=(1,), log_probs=(-1.0,), weight_versions=(self.version,), finish_reason="stop")
        return GenerationResult(request_id=request.request_id, samples=(sample,) * request.n)

    async def pause(self, mode):
        self.going.clear()

    async def resume(self):
        self.going.set()

    def close(self):
        pass


class Broken:
    """Cannot start."""

    async def start(self):
        raise RuntimeError("CUDA out of memory")


class Executor:
    """Restarts healthy engines, or ones that die at once, after so many that cannot start."""

    def __init__(self, dies_at=None, broken=0):
        self.restarted, self.engines = [], []
        self.dies_at = dies_at
        self.broken = broken

    def restart(self, name):
        self.restarted.append(name)
        if len(self.restarted) <= self.broken:
            return LocalHandle(name, Broken)
        self.engines.append(Engine(self.dies_at))
        return LocalHandle(name, lambda engine=self.engines[-1]: engine)


@pytest.fixture
def make_pool():
    pools = []

    def make(*engines, executor, limit=3, version=None, limit_s=10):
        pool = RolloutPool(
            [LocalHandle(f"rollout-{i}", lambda e=e: e) for i, e in enumerate(engines)], waits=Waits(limit_s)
        )
        pool.start()
        brought_up = []
        sync = types.SimpleNamespace(version=version)
        sync.check_loaded = lambda engine: brought_up.append(f"{engine} as loaded")
        sync.bring_up = lambda engine: (brought_up.append(engine), pool.admit(engine))
        replacement = RolloutReplacement(executor, pool, sync, limit=limit)
        pool.replace_with(replacement)
        pools.append(pool)
        return pool, replacement, brought_up

    yield make
    for pool in pools:
        pool.close()


def request(index):
    return GenerationRequest(
        request_id=str(index), prompt_token_ids=(1,), sampling=SamplingConfig(max_tokens=1), n=2, seed=index
    )


def run_all(pool, count=20):
    async def everything():
        return await asyncio.gather(*(pool.generate(request(i)) for i in range(count)))

    return asyncio.run(everything())


def test_requests_of_a_dead_engine_go_to_another_once(make_pool):
    healthy, executor = Engine(), Executor()
    pool, replacement, brought_up = make_pool(Engine(dies_at=3), healthy, executor=executor, version=7)
    results = run_all(pool)
    assert [result.request_id for result in results] == [str(i) for i in range(20)]
    assert pool.live == [1]
    assert "out of memory" in pool.lost[0]
    assert executor.restarted == []  # another engine was left, so nobody waited
    replacement()
    assert executor.restarted == ["rollout-0"]
    assert brought_up == [0]
    assert pool.live == [0, 1]
    assert len(run_all(pool)) == 20


def test_when_none_is_left_the_replacement_is_waited_for(make_pool):
    executor = Executor()
    pool, _, brought_up = make_pool(Engine(dies_at=2), executor=executor)
    assert len(run_all(pool)) == 20
    assert executor.restarted == ["rollout-0"]
    assert brought_up == ["0 as loaded"]  # nothing was synced before: the weights on disk are the right ones


def test_a_sample_under_way_on_an_engine_that_is_given_up_is_drawn_again(make_pool):
    slow = Engine(dies_at=2)
    slow.delay_s = 3600
    pool, _, _ = make_pool(slow, executor=Executor())
    assert len(run_all(pool)) == 20


def test_an_engine_that_stands_still_is_ended_and_its_samples_are_drawn_elsewhere(make_pool):
    stuck, healthy = Engine(), Engine()
    stuck.going.clear()
    pool, _, _ = make_pool(stuck, healthy, executor=Executor(), limit_s=0.5)
    pool.waits.rescue = pool.end_stuck

    async def everything():
        return await asyncio.gather(*(pool.generate(request(i)) for i in range(20)))

    assert len(pool.waits.run(everything(), what="samples")) == 20
    assert pool.lost == {0: "it stood still with samples under way"}
    assert healthy.served == 20


def test_a_standstill_that_no_engine_causes_ends_the_wait(make_pool):
    pool, _, _ = make_pool(Engine(), executor=Executor(), limit_s=0.3)
    pool.waits.rescue = pool.end_stuck
    with pytest.raises(DeadlineExceeded, match="while waiting for a reward"):
        pool.waits.run(asyncio.sleep(60), what="a reward")
    assert pool.live == [0]


def test_an_engine_that_keeps_dying_ends_the_run_with_the_reason(make_pool):
    executor = Executor(dies_at=1)
    pool, _, _ = make_pool(Engine(dies_at=1), executor=executor, limit=2, version=1)
    with pytest.raises(EngineDiedError, match=r"after 2 replacements.*out of memory"):
        run_all(pool)
    assert executor.restarted == ["rollout-0", "rollout-0"]


def test_a_replacement_waits_while_the_trainer_is_busy(make_pool):
    executor = Executor()
    pool, replacement, _ = make_pool(Engine(dies_at=1), executor=executor)
    with replacement.suspended():
        requests = threading.Thread(target=run_all, args=(pool, 3))
        requests.start()
        while not pool.lost:
            time.sleep(0.001)
        time.sleep(0.05)
        assert executor.restarted == []
    requests.join()
    assert executor.restarted == ["rollout-0"]


def syncing(pool, executor):
    """A weight sync that finds the engines dead at its first call."""
    calls = []

    def sync(version):
        calls.append(version)
        if pool.live and len(calls) == 1 and not executor.engines:
            pool.drop(0, "power cut")
            raise EngineDiedError("no rollout engine is left to take weights: power cut")
        for engine in executor.engines:
            assert not engine.going.is_set()  # nothing is sampled with the weights that it started with
            engine.version = version
        return calls

    return sync


def test_a_sync_that_finds_the_last_engine_dead_goes_to_its_replacement(make_pool):
    executor = Executor()
    pool, replacement, _ = make_pool(Engine(dies_at=1), executor=executor)
    replacement._sync = syncing(pool, executor)
    results = []
    with replacement.suspended():
        requests = threading.Thread(target=lambda: results.extend(run_all(pool, 3)))
        requests.start()
        while not pool.lost:
            time.sleep(0.001)
        assert replacement.sync(5) == [5]
    requests.join()
    assert {sample.weight_versions for result in results for sample in result.samples} == {(5,)}
    assert executor.restarted == ["rollout-0"]


def test_an_engine_that_dies_amid_the_sync_is_replaced_within_it(make_pool):
    executor = Executor()
    pool, replacement, _ = make_pool(Engine(), executor=executor)
    replacement._sync = syncing(pool, executor)
    assert replacement.sync(5) == [5, 5]
    assert pool.live == [0]


def test_a_dead_engine_is_left_out_of_a_pause(make_pool):
    class Gone(Engine):
        async def pause(self, mode):
            raise EngineDiedError("gone")

    pool, _, _ = make_pool(Engine(), Gone(), executor=Executor())
    pool.pause()
    assert pool.live == [0]
    pool.resume()
    assert len(run_all(pool)) == 20


def test_a_replacement_that_cannot_start_leaves_the_run_to_the_others(make_pool, caplog):
    executor = Executor(broken=2)
    pool, replacement, brought_up = make_pool(Engine(dies_at=1), Engine(), executor=executor, version=7)
    run_all(pool)
    for tries in (1, 2):
        replacement()
        assert len(executor.restarted) == tries
        assert pool.live == [1]
        assert "out of memory" in pool.lost[0]
        assert len(run_all(pool)) == 20
    assert "rollout engine 0 could not start (CUDA out of memory); 1 engine(s) at work, 1 repl" in caplog.text
    replacement()  # the third works
    assert brought_up == [0]
    assert pool.live == [0, 1]


def test_without_replacements_left_the_others_go_on(make_pool):
    executor = Executor(broken=9)
    pool, replacement, _ = make_pool(Engine(dies_at=1), Engine(), executor=executor, limit=2, version=7)
    run_all(pool)
    for _ in range(4):
        replacement()
    assert len(executor.restarted) == 2
    assert len(run_all(pool)) == 20


def test_only_without_any_engine_does_the_run_end_and_names_the_first_cause(make_pool):
    executor = Executor(broken=9)
    pool, _, _ = make_pool(Engine(dies_at=1), executor=executor, limit=2, version=7)
    with pytest.raises(EngineDiedError, match=r"after 2 replacements.*engine 0 was lost because: out of memory"):
        run_all(pool)
    assert len(executor.restarted) == 2


def test_a_slow_replacement_holds_up_nobody_while_others_are_at_work(make_pool):
    slow = threading.Event()

    class Slow(Engine):
        async def start(self):
            await asyncio.to_thread(slow.wait)
            return 0.0

    class SlowExecutor(Executor):
        def restart(self, name):
            self.restarted.append(name)
            return LocalHandle(name, Slow)

    executor = SlowExecutor()
    pool, replacement, brought_up = make_pool(Engine(dies_at=1), Engine(), executor=executor, version=7)
    run_all(pool)
    replacement()
    replacement()
    assert executor.restarted == ["rollout-0"]
    assert brought_up == []
    assert len(run_all(pool)) == 20
    slow.set()
    replacement()
    assert brought_up == [0]


def test_one_that_is_still_coming_up_goes_with_the_run(make_pool):
    class Never(Engine):
        async def start(self):
            await asyncio.sleep(3600)

    class Waiting(Executor):
        def restart(self, name):
            self.engines.append(LocalHandle(name, Never))
            return self.engines[-1]

    executor = Waiting()
    pool, replacement, _ = make_pool(Engine(dies_at=1), Engine(), executor=executor, version=7)
    run_all(pool)
    replacement()
    replacement.stop()
    with pytest.raises(EngineDiedError, match="closed"):
        executor.engines[0].call("start")


class LostHost(Executor):
    """The host of the first engine is lost, and no other has room."""

    def restart(self, name):
        if name == "rollout-0":
            raise ResourceError("rollout: no host has 1 GPUs free")
        return Executor.restart(self, name)


def test_an_engine_whose_host_is_lost_is_not_waited_for_while_others_live(make_pool):
    pool, replacement, _ = make_pool(Engine(dies_at=3), Engine(), executor=LostHost())
    run_all(pool)
    replacement()
    assert pool.live == [1]


def test_an_engine_that_has_room_comes_up_although_another_has_none(make_pool):
    pool, *_ = make_pool(Engine(dies_at=3), Engine(dies_at=4), executor=LostHost())
    assert len(run_all(pool)) == 20
    assert pool.live == [1]


def test_a_run_ends_at_once_where_no_engine_has_room(make_pool):
    pool, *_ = make_pool(Engine(dies_at=3), executor=LostHost())
    with pytest.raises(EngineDiedError, match="no room for another: rollout: no host has 1 GPUs free"):
        run_all(pool)
