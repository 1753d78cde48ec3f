"""Workers that start together, in order, and are closed together."""

import time

import pytest
from rlhf_core import BackendCapabilities, EngineDiedError
from rlhf_launch.placement.executor import LocalExecutor, WorkerPlan
from rlhf_launch.placement.start import open_executor, start_workers

LOG = []


@pytest.fixture(autouse=True)
def log():
    LOG.clear()
    return LOG


class Rank:
    def __init__(self, name, fails=False):
        self.name, self.fails = name, fails

    def address(self, world_size):
        return "localhost", 0

    def start(self, rank, world_size, address):
        if self.fails:
            raise RuntimeError("no memory")
        LOG.append(f"start {self.name} {rank}/{world_size}")
        return 0.5

    def close(self):
        LOG.append(f"close {self.name}")


class Engine:
    def __init__(self, name):
        self.name = name

    async def start(self):
        LOG.append(f"start {self.name}")
        return 0.25

    async def capabilities(self):
        settings = {"max_num_batched_tokens": 16384, "async_scheduling": True}
        return BackendCapabilities(transports=frozenset({"local"}), settings=settings)

    async def close(self):
        LOG.append(f"close {self.name}")


class Watched(LocalExecutor):
    def __init__(self, *, one_process=True):
        super().__init__()
        self.one_process = one_process

    def close(self):
        LOG.append("close executor")


def plans(*names, worker=Rank, **options):
    return [WorkerPlan(name=name, worker=worker, arguments=(name, *options.values())) for name in names]


def test_ranks_are_grouped_by_role_and_everything_is_closed():
    said = []
    training = {"policy": plans("policy-0", "policy-1"), "reward helpful": plans("judge-0")}
    rollout = plans("rollout-0", worker=Engine)
    with start_workers(Watched(), training, rollout, say=said.append) as workers:
        assert {name: group.ranks for name, group in workers.training.items()} == {"policy": 2, "reward helpful": 1}
        assert workers.pool.engines == 1
        assert LOG[-1] == "start rollout-0"  # within one process, trainers come first
    assert said == [
        *("policy: 2 rank(s), 0.5 s", "reward helpful: 1 rank(s), 0.5 s", "rollout: 1 engine(s), 0.2 s"),
        "each of them: max_num_batched_tokens=16384 async_scheduling=true",
    ]
    assert "start policy-1 1/2" in LOG
    assert LOG[-1] == "close executor"
    assert sorted(LOG[-5:-1]) == ["close judge-0", "close policy-0", "close policy-1", "close rollout-0"]


def test_a_worker_that_cannot_start_closes_the_others():
    training = {"policy": plans("policy-0"), "critic": plans("critic-0", fails=True)}
    with (
        pytest.raises(RuntimeError, match="no memory"),
        start_workers(Watched(), training, plans("rollout-0", worker=Engine)),
    ):
        pytest.fail("the block must not be entered")
    assert sorted(LOG[-4:-1]) == ["close critic-0", "close policy-0", "close rollout-0"]
    assert LOG[-1] == "close executor"


def test_in_processes_of_their_own_engines_start_beside_the_trainers():
    begun = []

    class Slow(Rank):
        def start(self, rank, world_size, address):
            import time

            deadline = time.monotonic() + 60
            while "start rollout-0" not in LOG and time.monotonic() < deadline:
                time.sleep(0.01)
            begun.extend(LOG)
            return 0.0

    training = {"policy": plans("policy-0", worker=Slow)}
    with start_workers(Watched(one_process=False), training, plans("rollout-0", worker=Engine)):
        assert begun == ["start rollout-0"]


def test_the_peers_of_a_lost_worker_are_not_waited_for():
    import threading

    released = threading.Event()

    class Stuck(Rank):
        def close(self):
            released.wait(600)

    threading.Timer(5, released.set).start()  # a thread of this process cannot be ended
    begin = time.monotonic()
    training = {"policy": plans("policy-0", worker=Stuck)}
    with (
        pytest.raises(EngineDiedError, match="policy-1 died"),
        start_workers(Watched(one_process=False), training, plans("rollout-0", worker=Engine)),
    ):
        raise EngineDiedError("policy-1 died during step")
    assert time.monotonic() - begin < 300


def test_the_local_executor_is_opened_by_name():
    assert isinstance(open_executor("local"), LocalExecutor)
