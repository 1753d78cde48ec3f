"""The Transformers backend: the conformance kit, and what is particular to it."""

import asyncio
import json
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
from rlhf_core import (
    CapabilityError,
    ConfigError,
    DeadlineExceeded,
    EngineDiedError,
    GenerationRequest,
    ModuleWeights,
    RolloutConfig,
    SamplingConfig,
    StaleWeightsError,
    WeightSyncError,
    open_sender,
    send_weights,
)
from rlhf_core.testing.rollout import RolloutBackendConformance
from rlhf_core.testing.tiny import save_tiny_model
from rlhf_core.testing.weight_sync import Trainer, broken_sync, sync
from rlhf_rollout import TransformersBackend

pytestmark = pytest.mark.stack


class TestConformance(RolloutBackendConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def backend_factory(cls):
        return TransformersBackend


class TestConformanceUntied(RolloutBackendConformance):
    tied = False

    @pytest.fixture(scope="class")
    @classmethod
    def backend_factory(cls):
        return TransformersBackend


# ------------------------------------------------------------ particular to this backend


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def start(path):
    started = []

    def start(**fields):
        started.append(TransformersBackend(RolloutConfig(model=path, max_model_len=256, **fields)))
        return started[-1]

    yield start
    for backend in started:
        backend.close()


def request(name="r", *, n=1, tokens=200, seed: int | None = 0, **sampling) -> GenerationRequest:
    settings = {"max_tokens": tokens, "min_tokens": tokens, **sampling}
    return GenerationRequest(
        request_id=name, prompt_token_ids=(7, 8, 9), sampling=SamplingConfig(**settings), n=n, seed=seed
    )


def test_more_samples_than_fit_at_once(start):
    few, many = (start(max_num_seqs=size) for size in (3, 64))
    wanted = request(n=8, tokens=10)
    assert [s.token_ids for s in asyncio.run(few.generate(wanted)).samples] == [
        s.token_ids for s in asyncio.run(many.generate(wanted)).samples
    ]


def test_a_prompt_is_computed_once_for_its_samples(start):
    backend, widths = start(), []
    forward = backend._decoder._forward
    backend._decoder._forward = lambda ids, positions: (widths.append(tuple(ids.shape)), forward(ids, positions))[1]
    asyncio.run(backend.generate(request(n=4, tokens=3)))
    assert widths == [(1, 3), (4, 1), (4, 1)]


def test_unseeded_requests_follow_the_backends_seed(start):
    async def draw(backend):
        return [(await backend.generate(request(seed=None, tokens=6))).samples[0].token_ids for _ in range(2)]

    first, again, other = (asyncio.run(draw(start(seed=seed))) for seed in (1, 1, 2))
    assert first == again
    assert first[0] != first[1]
    assert first != other


def test_samples_join_a_running_batch(start):
    """A sample is the same whether it starts with others, joins them late, or runs alone."""
    backend = start()
    alone = [asyncio.run(backend.generate(request(seed=seed, tokens=60))) for seed in (10, 20)]

    async def late():
        first = asyncio.create_task(backend.generate(request("a", seed=10, tokens=60)))
        await asyncio.sleep(0.02)
        second = await backend.generate(request("b", seed=20, tokens=60))
        return [await first, second]

    together = asyncio.run(late())
    assert [r.samples[0].token_ids for r in together] == [r.samples[0].token_ids for r in alone]


def test_requests_under_way_end_when_a_sync_fails(start, path):
    backend, trainer = start(), Trainer(path)

    async def run():
        running = asyncio.create_task(backend.generate(request()))
        await asyncio.sleep(0.02)
        with pytest.raises(WeightSyncError):
            await broken_sync(backend, trainer, "sender closes")
        with pytest.raises(StaleWeightsError, match="sync again"):
            await running
        await sync(backend, trainer)
        return await backend.generate(request(tokens=5))

    assert asyncio.run(run()).samples[0].length == 5


def test_receiving_without_a_connection(start, path):
    with pytest.raises(WeightSyncError, match="before connect"):
        asyncio.run(start().receive_weights(Trainer(path).manifest(1)))


def test_closing_ends_what_is_under_way(start):
    backend = start()

    async def run():
        running = asyncio.create_task(backend.generate(request()))
        await asyncio.sleep(0.02)
        await asyncio.to_thread(backend.close)
        with pytest.raises(EngineDiedError, match="closed"):
            await running
        for call in (backend.generate(request()), backend.pause(), backend.receive_weights(None)):
            with pytest.raises(EngineDiedError):
                await call

    asyncio.run(run())


def test_a_dead_worker_tells_its_cause(start):
    backend = start()

    def fail(*args, **kwargs):
        raise MemoryError("no room for the cache")

    backend._decoder.step = fail

    async def run():
        for _ in range(2):
            with pytest.raises(EngineDiedError, match="MemoryError: no room for the cache"):
                await backend.generate(request())
        with pytest.raises(EngineDiedError):
            await backend.pause()

    asyncio.run(run())


class TestConformanceSeparate(RolloutBackendConformance):
    """Each request decoded by itself."""

    @pytest.fixture(scope="class")
    @classmethod
    def backend_factory(cls):
        return lambda config: TransformersBackend(replace(config, options={"separate_requests": True}))


def bits(results):
    return [[(sample.token_ids, sample.log_probs) for sample in result.samples] for result in results]


@pytest.mark.parametrize("room", [64, 5])
def test_separate_requests_have_the_same_bits_whatever_runs_beside_them(start, room):
    backend = start(options={"separate_requests": True}, max_num_seqs=room)
    wanted = [request(f"r{seed}", n=3, tokens=12 + 5 * seed, min_tokens=1, seed=seed) for seed in range(5)]
    wanted = [replace(one, prompt_token_ids=tuple(range(7, 9 + 4 * place))) for place, one in enumerate(wanted)]

    async def alone():
        return [await backend.generate(one) for one in wanted]

    async def together(delay_s):
        async def later(place, one):
            await asyncio.sleep(delay_s * place)
            return await backend.generate(one)

        return await asyncio.gather(*(later(place, one) for place, one in enumerate(wanted)))

    expected = bits(asyncio.run(alone()))
    assert bits(asyncio.run(together(0.0))) == expected
    assert bits(asyncio.run(together(0.004))) == expected


def test_a_separate_request_with_more_samples_than_fit_gets_all_of_them(start):
    backend = start(options={"separate_requests": True}, max_num_seqs=3)

    async def run():
        return await asyncio.gather(*(backend.generate(request(f"r{n}", n=n, tokens=6)) for n in (8, 2, 5)))

    assert [len(result.samples) for result in asyncio.run(run())] == [8, 2, 5]


def test_what_it_cannot_do_is_refused(start):
    with pytest.raises(ConfigError, match="unknown key 'flash'; known are separate_requests"):
        start(options={"flash": True})
    with pytest.raises(CapabilityError, match="tensor_parallel_size=2"):
        start(tensor_parallel_size=2)
    backend = start()
    bad_token = GenerationRequest(request_id="r", prompt_token_ids=(600,), sampling=SamplingConfig(max_tokens=1))
    with pytest.raises(CapabilityError, match="token id 600 is outside the model's vocabulary of 512"):
        asyncio.run(backend.generate(bad_token))


# ------------------------------------------------------------ another engine dies amid a sync

DYING_ENGINE = """
import os, signal, sys
from rlhf_core import Link, WeightManifest, join_link
import json
link = Link(kind=sys.argv[1], address=sys.argv[2], receivers=2, timeout_s=120)
receiver = join_link(link, 1)
manifest = WeightManifest.from_dict(json.loads(sys.argv[3]))
for index, _ in enumerate(receiver.receive(manifest.buckets())):
    if index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("kind", ["gloo", "shm"])
def test_an_engine_killed_between_two_buckets_leaves_no_engine_serving_a_mixture(start, path, kind):
    backend, trainer = start(), Trainer(path)
    trainer.perturb()
    manifest = trainer.manifest(1)
    assert len(manifest.buckets()) > 4
    sender = open_sender(kind, receivers=2, timeout_s=60)  # a process starts meanwhile
    command = [sys.executable, "-c", DYING_ENGINE, kind, sender.link.address, json.dumps(manifest.to_dict())]

    async def both() -> None:
        joining = asyncio.create_task(backend.connect(sender.link, 0))
        await asyncio.to_thread(sender.accept)
        await joining
        sender.link = replace(sender.link, timeout_s=10)
        receiving = asyncio.create_task(backend.receive_weights(manifest))
        with pytest.raises((WeightSyncError, DeadlineExceeded)):
            await asyncio.to_thread(send_weights, ModuleWeights(trainer.model), manifest, sender)
        sender.close()
        with pytest.raises(WeightSyncError):
            await receiving

    with subprocess.Popen(command) as dying:
        asyncio.run(both())
        assert dying.wait(30) == -signal.SIGKILL
    assert backend.weight_version == 0
    with pytest.raises(StaleWeightsError):
        asyncio.run(backend.generate(request(tokens=4)))
    asyncio.run(sync(backend, trainer, version=1))
    result = asyncio.run(backend.generate(request(tokens=4)))
    assert set(result.samples[0].weight_versions) == {1}
