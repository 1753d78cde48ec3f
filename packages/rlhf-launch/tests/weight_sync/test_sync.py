"""Weight sync over all engines: dead ones are left out, new ones catch up, failures are tried again in full."""

import asyncio
import time
from concurrent.futures import Future

import pytest
import torch
from rlhf_core import (
    ConfigError,
    EngineConfig,
    EngineDiedError,
    GenerationRequest,
    ModuleWeights,
    RolloutConfig,
    SamplingConfig,
    WeightSyncError,
)
from rlhf_core.testing.fakes import ScriptedBackend
from rlhf_launch.config.weight_sync import WeightSyncSection
from rlhf_launch.weight_sync import sync as sync_module
from rlhf_launch.weight_sync.sync import WeightSync
from rlhf_launch.workers.handles import LocalHandle
from rlhf_launch.workers.rollout_engine import RolloutWorker
from rlhf_launch.workers.rollout_pool import RolloutPool
from rlhf_launch.workers.train_group import TrainGroup
from rlhf_launch.workers.train_rank import TrainWorker
from rlhf_launch.workers.waits import Waits
from torch import nn

PATIENCE_S = 3.0
SIZES = (5, 700, 300, 64, 900)


class Engine:
    """As much of a TrainEngine as a sync needs."""

    def __init__(self, config):
        torch.manual_seed(0)
        self.model = nn.ParameterDict({f"w{i}": nn.Parameter(torch.randn(size)) for i, size in enumerate(SIZES)})

    def weights(self):
        return ModuleWeights(self.model)

    def close(self):
        pass


class Backend(ScriptedBackend):
    """Keeps weights in full, and dies or fails amid a sync on demand."""

    fate: Exception | None = None

    async def receive_weights(self, manifest):
        if self.fate is not None:
            fate, self.fate = self.fate, None
            if isinstance(fate, EngineDiedError):
                self.die(str(fate))
            raise fate
        before = self.weights
        await super().receive_weights(manifest)
        self.weights = {**(before if manifest.partial else {}), **self.weights}

    async def connect(self, link, rank):
        if isinstance(self._failure, EngineDiedError):
            raise self._failure
        await super().connect(link, rank)

    @property
    def capabilities(self):
        capabilities = super().capabilities
        object.__setattr__(capabilities, "partial_sync", "tensors")
        return capabilities


class Stack:
    def __init__(self, engines=3, **options):
        self.workers = [RolloutWorker(f"{__name__}:Backend", RolloutConfig(model="m"), {}) for _ in range(engines)]
        self.trainer = TrainWorker(f"{__name__}:Engine", EngineConfig(model="m", role="policy"), {})
        self.policy = TrainGroup("policy", [LocalHandle("policy-0", lambda: self.trainer)], waits=Waits(PATIENCE_S))
        self.policy.start()
        handles = [LocalHandle(f"rollout-{i}", lambda w=worker: w) for i, worker in enumerate(self.workers)]
        self.pool = RolloutPool(handles, waits=Waits(PATIENCE_S))
        self.pool.start()
        kinds = options.pop("transports", ("local",))
        self.sync = WeightSync(
            self.policy,
            self.pool,
            transports=kinds,
            options=WeightSyncSection(bucket_bytes=3000, **options),
        )

    @property
    def backends(self):
        return [worker._backend for worker in self.workers]

    @property
    def model(self):
        return self.trainer.engine.model

    def up_to_date(self, engine):
        found = self.backends[engine].weights
        return set(found) == set(self.model) and all(torch.equal(found[n], p) for n, p in self.model.items())

    def change(self, name="w1"):
        with torch.no_grad():
            self.model[name] += 1

    def close(self):
        self.policy.close()
        self.pool.close()


@pytest.fixture
def start():
    stacks = []

    def start(*args, **kwargs):
        stacks.append(Stack(*args, **kwargs))
        return stacks[-1]

    yield start
    for stack in stacks:
        stack.close()


class OnDevices:
    """Two ranks and three engines, each on a device; `shm` stands for the link between two ends on one GPU."""

    def __init__(self, start, monkeypatch, ranks, engines):
        self.opened = []
        monkeypatch.setattr(sync_module, "ON_ONE_DEVICE", frozenset({"shm"}))
        stack = start(transports=("local",))
        second = TrainWorker(f"{__name__}:Engine", EngineConfig(model="m", role="policy"), {})
        second.start(0, 1, ("", 0))
        trainers = [stack.trainer, second]
        for trainer, device in zip(trainers, ranks, strict=True):
            trainer.device_names = lambda device=device: [device] if device else []
            trainer.open_link = self.noting(device, trainer.open_link)
        for worker, device in zip(stack.workers, engines, strict=True):

            async def names(device=device):
                return [device]

            worker.device_names = names
        self.stack = stack
        self.policy = TrainGroup(
            "policy", [LocalHandle("policy", lambda t=trainer: t) for trainer in trainers], waits=Waits(PATIENCE_S)
        )

    def noting(self, device, open_link):
        def opening(kind, receivers, timeout_s):
            self.opened.append((device, kind, receivers))
            return open_link(kind, receivers, timeout_s)

        return opening

    def sync(self, *kinds):
        options = WeightSyncSection(bucket_bytes=3000)
        return WeightSync(self.policy, self.stack.pool, transports=kinds, options=options)


def test_each_rank_sends_to_the_engines_on_its_own_device(start, monkeypatch):
    parts = OnDevices(start, monkeypatch, ["a/0", "a/1"], ["a/1", "a/0", "a/1"])
    sync = parts.sync("shm", "gloo")
    assert sync.transport == "shm"
    for version in (1, 2):
        assert sync(version).bytes == 4 * sum(SIZES)
        assert all(parts.stack.up_to_date(engine) for engine in range(3))
    assert sorted(parts.opened) == [("a/0", "shm", 1), ("a/1", "shm", 2)]
    # A replacement is served by the rank on its device.
    sync.bring_up(0)
    assert parts.opened[2:] == [("a/1", "shm", 1)]
    assert parts.stack.up_to_date(0)
    parts.policy.close()


def test_devices_apart_or_shared_rule_out_kinds_of_links(start, monkeypatch):
    parts = OnDevices(start, monkeypatch, ["a/0", "a/1"], ["a/1", "a/0", "b/1"])
    kinds = ["shm", "nccl", "gloo"]
    choose = parts.sync("gloo")._by_devices
    assert choose(kinds, [0]) == ["shm", "nccl", "gloo"]
    assert choose(kinds, [0, 1]) == ["shm", "gloo"]  # NCCL takes no two processes on one device
    assert choose(kinds, [0, 2]) == ["nccl", "gloo"]
    with pytest.raises(ConfigError, match=r"policy's ranks \(a/0, a/1\); engine 2 is on b/1"):
        parts.sync("shm")(1)
    parts.policy.close()


@pytest.mark.parametrize("kind", ["local", "shm", "gloo", "disk"])
@pytest.mark.parametrize("checksums", [False, True])
def test_every_engine_gets_all_weights_over_one_link(start, kind, checksums):
    stack = start(transports=(kind,), checksums=checksums)
    for version in (1, 2):
        report = stack.sync(version)
        assert (report.version, report.bytes, report.partial, report.lost) == (version, 4 * sum(SIZES), False, ())
        assert all(stack.up_to_date(engine) for engine in range(3))
        stack.change()
    assert stack.pool.weight_versions() == [2, 2, 2]


def test_an_engine_that_was_lost_since_the_last_sync_is_not_waited_for(start):
    stack = start()
    stack.sync(1)
    stack.pool.drop(1, "its host is gone")
    stack.change()
    assert stack.sync(2).version == 2
    assert [stack.up_to_date(engine) for engine in range(3)] == [True, False, True]


@pytest.mark.stack
@pytest.mark.parametrize("kind", ["local", "gloo"])
def test_without_a_dead_engine_the_others_get_the_weights(start, kind):
    stack = start(transports=(kind,))
    stack.sync(1)
    stack.change()
    stack.backends[1].fate = EngineDiedError("out of memory")
    report = stack.sync(2)
    assert report.lost == ("engine 1: out of memory",)
    assert [stack.up_to_date(engine) for engine in range(3)] == [True, False, True]
    assert stack.pool.live == [0, 2]
    assert stack.sync(3).lost == ()
    request = GenerationRequest(request_id="r", prompt_token_ids=(1, 2), sampling=SamplingConfig(max_tokens=4))

    async def four() -> None:
        await asyncio.gather(*(stack.pool.generate(request) for _ in range(4)))

    asyncio.run(four())
    assert [len(backend.requests) for backend in stack.backends] == [2, 0, 2]


@pytest.mark.stack
def test_when_all_are_dead_the_cause_is_named(start):
    stack = start(2)
    for backend in stack.backends:
        backend.fate = EngineDiedError("power cut")
    with pytest.raises(EngineDiedError, match=r"no rollout engine is left.*power cut"):
        stack.sync(1)


def test_a_rank_of_the_policy_that_dies_is_named_at_once(start):
    stack = start(2)
    stack.sync(1)
    stack.sync._timeout_s = 300.0
    dead, waiting, sends = Future(), Future(), []
    dead.set_exception(EngineDiedError("policy-1 died during send"))

    def send(manifest):
        sends.append(manifest)
        return [waiting, dead]

    stack.policy.send = send
    begin = time.monotonic()
    with pytest.raises(EngineDiedError, match="policy-1 died during send"):
        stack.sync(2)
    assert time.monotonic() - begin < 300
    assert len(sends) == 1
    assert stack.pool.live == [0, 1]


@pytest.mark.stack
def test_a_new_engine_is_brought_to_the_version_of_the_others(start):
    stack = start()
    with pytest.raises(WeightSyncError, match="no engine has weights"):
        stack.sync.bring_up(1)
    stack.backends[1].fate = EngineDiedError("killed")
    stack.sync(4)
    stack.workers[1] = RolloutWorker(f"{__name__}:Backend", RolloutConfig(model="m"), {})
    stack.pool.replace(1, LocalHandle("rollout-1", lambda: stack.workers[1]))
    assert stack.pool.live == [0, 2]
    stack.sync.bring_up(1)
    assert stack.pool.live == [0, 1, 2]
    assert stack.pool.weight_versions() == [4, 4, 4]
    assert stack.up_to_date(1)
    stack.change()
    stack.sync(5)
    assert all(stack.up_to_date(engine) for engine in range(3))


@pytest.mark.stack
def test_a_failed_transfer_is_tried_again_and_then_given_up(start):
    stack = start()
    stack.backends[2].fate = WeightSyncError("a hiccup")
    assert stack.sync(1).lost == ()
    assert all(stack.up_to_date(engine) for engine in range(3))

    class Always(Backend):
        async def receive_weights(self, manifest):
            raise WeightSyncError("never")

    stack.workers[0]._built = Always()
    with pytest.raises(WeightSyncError, match=r"version 2 could not be sent: never; over a new link: never"):
        stack.sync(2)
    assert stack.sync.version is None


@pytest.mark.stack
def test_delta_syncs_start_full_and_are_full_again_after_a_failure(start):
    stack = start(delta="tensors")
    assert not stack.sync(1).partial
    stack.change("w4")
    report = stack.sync(2)
    assert (report.partial, report.bytes) == (True, 4 * SIZES[4])
    assert all(stack.up_to_date(engine) for engine in range(3))
    stack.change("w0")
    stack.backends[1].fate = WeightSyncError("a hiccup")
    report = stack.sync(3)
    assert not report.partial
    assert all(stack.up_to_date(engine) for engine in range(3))
    stack.change("w0")
    assert stack.sync(4).bytes == 4 * SIZES[0]


BEST = ("shm", "gloo")


def test_workers_on_one_host_share_memory(start):
    stack = start(transports=BEST)
    assert stack.sync.transport == "shm"
    assert stack.sync(1).version == 1
    assert all(stack.up_to_date(engine) for engine in range(3))


@pytest.mark.parametrize("answer", ["another host", None])
def test_workers_that_share_no_memory_take_the_next_transport(start, monkeypatch, answer):
    async def elsewhere(worker):
        return answer

    monkeypatch.setattr(RolloutWorker, "shared_memory", elsewhere)
    stack = start(2, transports=BEST)
    stack.sync(1)
    assert stack.sync.transport == "gloo"
    assert stack.up_to_date(0)


def test_after_a_failure_of_shared_memory_the_next_transport_is_taken(start, monkeypatch):
    def no_room(nbytes):
        raise WeightSyncError("64 MiB of shared memory cannot be had")

    monkeypatch.setattr("rlhf_core.weight_sync.transports.mapped.file_segment", no_room)
    stack = start(2, transports=BEST)
    for version in (1, 2):
        stack.sync(version)
        assert stack.sync.transport == "gloo"
    assert stack.up_to_date(1)


def test_an_engine_that_dies_before_the_link_is_opened_is_left_out(start):
    stack = start(transports=BEST)
    stack.pool._handles[1].close = lambda: None
    stack.pool._handles[1].call = lambda *_: failed(EngineDiedError("unplugged"))
    assert stack.sync(1).lost == ("engine 1: unplugged",)
    assert [stack.up_to_date(engine) for engine in (0, 2)] == [True, True]


def failed(error):
    future = Future()
    future.set_exception(error)
    return future


def test_the_configuration_can_name_the_transport(start):
    stack = start(2, transports=BEST, transport="disk")
    stack.sync(1)
    assert stack.sync.transport == "disk"
    assert stack.up_to_date(1)
    with pytest.raises(ConfigError, match="can join disk, gloo, local, shm"):
        start(1, transport="nccl")


def test_options_are_checked(start):
    with pytest.raises(ConfigError, match="bucket_bytes"):
        WeightSyncSection(bucket_bytes=0)
    with pytest.raises(ConfigError, match="'some'"):
        WeightSyncSection(delta="some")
    with pytest.raises(ConfigError, match=r"partial_sync='tensors'"):
        start(delta="values")
