"""The vLLM backend passes the conformance kit, and what is vLLM's own about it."""

from __future__ import annotations

import asyncio
import copy
import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from interruptions import paused_amid
from rlhf_core import (
    CapabilityError,
    ConfigError,
    DeadlineExceeded,
    EngineDiedError,
    GenerationRequest,
    GenerationResult,
    Link,
    ModuleWeights,
    RolloutBackend,
    RolloutConfig,
    SamplingConfig,
    StaleWeightsError,
    WeightSyncError,
)
from rlhf_core.testing.rollout import RolloutBackendConformance
from rlhf_core.testing.tiny import save_tiny_model
from rlhf_core.testing.weight_sync import Trainer, connect, send_and_receive, sync
from rlhf_rollout import VLLMBackend

pytestmark = pytest.mark.stack

# vLLM's attention on CPU has no kernel for heads smaller than 32.
HIDDEN = 128
PROMPT = tuple(range(40, 70))


class TestVLLMBackend(RolloutBackendConformance):
    @pytest.fixture(scope="class")
    def backend_factory(self) -> Callable[[RolloutConfig], RolloutBackend]:
        return VLLMBackend

    @pytest.fixture(scope="class")
    def model_path(self, tmp_path_factory: pytest.TempPathFactory) -> str:
        path = tmp_path_factory.mktemp("rollout-model")
        return save_tiny_model(path, tied=self.tied, vocab_size=self.vocab_size, hidden_size=HIDDEN)


class TestVLLMBackendUntied(TestVLLMBackend):
    tied = False


# ---------------------------------------------------------------- tools


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), hidden_size=HIDDEN)


@pytest.fixture(scope="module")
def no_tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), hidden_size=HIDDEN, tied=False, tokenizer=False)


@pytest.fixture(scope="module")
def backend(model_path: str) -> Iterator[VLLMBackend]:
    backend = VLLMBackend(config(model_path))
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def trainer(model_path: str) -> Trainer:
    """Holds the weights that `backend` has at the start and at the end of every test."""
    return Trainer(model_path)


def config(model: str, **options: object) -> RolloutConfig:
    return RolloutConfig(model=model, max_model_len=512, max_num_seqs=16, options=options)


def request(max_tokens: int = 12, *, n: int = 1, seed: int | None = 0, **sampling: object) -> GenerationRequest:
    settings = SamplingConfig(**{"max_tokens": max_tokens, **sampling})  # type: ignore[arg-type]
    return GenerationRequest(request_id="r", prompt_token_ids=PROMPT, sampling=settings, n=n, seed=seed)


def generate(backend: VLLMBackend, asked: GenerationRequest) -> GenerationResult:
    return asyncio.run(backend.generate(asked))


def gap(trainer: Trainer, asked: GenerationRequest, result: GenerationResult) -> float:
    return max(
        float((trainer.log_probs(asked, sample) - torch.tensor(sample.log_probs)).abs().max())
        for sample in result.samples
    )


# ---------------------------------------------------------------- weight sync

SENDER = """
import sys
import torch
from transformers import AutoModelForCausalLM
from rlhf_core import ModuleWeights, open_sender, send_weights

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
torch.manual_seed(3)
with torch.no_grad():
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.03)
model.save_pretrained(sys.argv[2])
source = ModuleWeights(model)
sender = open_sender("gloo", receivers=1, timeout_s=60)
print("address", sender.link.address, flush=True)
sender.accept()
sys.stdin.readline()
send_weights(source, source.manifest(7, bucket_bytes=100_000), sender)
sender.close()
"""


def test_weights_arrive_from_another_process(
    backend: VLLMBackend, trainer: Trainer, model_path: str, tmp_path: Path
) -> None:
    changed = str(tmp_path / "changed")
    command = [sys.executable, "-c", SENDER, model_path, changed]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        address = next(line.split()[1] for line in process.stdout if line.startswith("address "))
        link = Link(kind="gloo", address=address, receivers=1, timeout_s=60)
        manifest = ModuleWeights(trainer.model).manifest(7, bucket_bytes=100_000)
        asyncio.run(backend.connect(link, 0))
        process.stdin.write("go\n")
        process.stdin.flush()
        asyncio.run(backend.receive_weights(manifest))
        assert process.wait(60) == 0
    result = generate(backend, request(n=4))
    assert gap(Trainer(changed), request(n=4), result) < 1e-4
    assert gap(trainer, request(n=4), result) > 0.1
    assert set(result.samples[0].weight_versions) == {7}
    asyncio.run(sync(backend, trainer))


def test_kept_requests_go_on_under_the_new_weights_with_exact_log_probs(
    backend: VLLMBackend, trainer: Trainer
) -> None:
    """Every token's log-prob is that of a forward pass with the weights of its version: nothing is mixed."""
    asked = request(400, n=4)
    before, after = backend.weight_version, backend.weight_version + 5
    old = copy.deepcopy(trainer)
    trainer.perturb()

    async def interrupted() -> GenerationResult:
        task = await paused_amid(backend, asked)
        await sync(backend, trainer, version=after)
        await backend.resume()
        return await task

    result = asyncio.run(interrupted())
    assert {version for sample in result.samples for version in sample.weight_versions} == {before, after}
    for sample in result.samples:
        assert list(sample.weight_versions) == sorted(sample.weight_versions)
        new = torch.tensor(sample.weight_versions) == after
        log_probs = torch.tensor(sample.log_probs)
        expected = torch.where(new, trainer.log_probs(asked, sample), old.log_probs(asked, sample))
        assert (log_probs - expected).abs().max() < 1e-4


def resident(begin: int, size: int) -> int:
    """Bytes of these addresses that are in memory, without what the C library keeps of freed pieces."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    page = os.sysconf("SC_PAGE_SIZE")
    with open("/proc/self/pagemap", "rb") as pages:
        pages.seek(8 * (begin // page))
        entries = numpy.frombuffer(pages.read(8 * (size // page)), dtype=numpy.uint64)
    return page * int((entries >> numpy.uint64(63)).sum())


def test_asleep_it_needs_no_memory_for_its_cache_and_running_requests_go_on_after_it(
    backend: VLLMBackend, trainer: Trainer
) -> None:
    asyncio.run(sync(backend, trainer))
    asked = request(300, n=4)
    runner = backend._loop.call(lambda engine: engine.model_executor.driver_worker.worker.model_runner).result()
    caches = {cache.untyped_storage().data_ptr(): cache.untyped_storage() for cache in runner.kv_caches}
    for cache in runner.kv_caches:
        cache.fill_(1.0)  # every page is in use

    places = {begin: storage.nbytes() for begin, storage in caches.items()}

    async def with_a_nap() -> tuple[GenerationResult, int]:
        task = await paused_amid(backend, asked)
        awake = sum(resident(begin, size) for begin, size in places.items())
        await backend.sleep()
        await backend.sleep()
        asleep = sum(resident(begin, size) for begin, size in places.items())
        assert not any(storage.nbytes() for storage in caches.values())
        await backend.wake()
        await backend.resume()
        return await task, awake - asleep

    size = sum(storage.nbytes() for storage in caches.values())
    result, given_back = asyncio.run(with_a_nap())
    assert {sample.finish_reason for sample in result.samples} <= {"stop", "length"}
    assert gap(trainer, asked, result) < 1e-4  # nothing was read of what the cache held before
    assert given_back > 0.9 * size > 4 << 20
    assert sum(storage.nbytes() for storage in caches.values()) == size


def test_a_sync_that_breaks_off_in_the_middle_leaves_nothing_behind(backend: VLLMBackend, trainer: Trainer) -> None:
    """The next sync must not complete layers with what the broken one left in them."""
    version = backend.weight_version
    manifest = trainer.manifest(version + 1)
    half = replace(manifest, tensors=manifest.tensors[: len(manifest.tensors) // 2 + 1])

    async def break_off() -> None:
        sender = await connect(backend, "local", timeout_s=1)
        await send_and_receive(backend, trainer, sender, half)

    with pytest.raises(WeightSyncError, match=r"got no weights or only a part, among them model\."):
        asyncio.run(break_off())
    assert backend.weight_version == version
    with pytest.raises(StaleWeightsError, match="next complete sync"):
        generate(backend, request())
    trainer.perturb()
    asyncio.run(sync(backend, trainer))
    assert gap(trainer, request(), generate(backend, request())) < 1e-4


def test_requests_held_by_a_failed_sync_fail_as_stale(backend: VLLMBackend, trainer: Trainer) -> None:
    async def held() -> None:
        await backend.pause("keep")
        task = asyncio.create_task(backend.generate(request(100)))
        await asyncio.sleep(0.05)
        await connect(backend, "local", timeout_s=0.2)
        with pytest.raises(WeightSyncError, match="DeadlineExceeded"):
            await backend.receive_weights(trainer.manifest(1))
        with pytest.raises(StaleWeightsError):
            await task
        await backend.resume()
        await sync(backend, trainer)

    asyncio.run(held())


def test_a_link_without_a_sender_is_given_up_at_its_deadline(backend: VLLMBackend) -> None:
    link = Link(kind="gloo", address="127.0.0.1:1", receivers=1, timeout_s=0.5)
    with pytest.raises(DeadlineExceeded, match=r"127\.0\.0\.1:1"):
        asyncio.run(backend.connect(link, 0))
    assert generate(backend, request()).samples[0].length > 0


def test_a_link_of_a_kind_it_cannot_join_is_refused(backend: VLLMBackend) -> None:
    link = Link(kind="nccl", address="127.0.0.1:1", receivers=1, timeout_s=1)
    with pytest.raises(CapabilityError, match="use one of disk, gloo, local, shm"):
        asyncio.run(backend.connect(link, 0))


# ---------------------------------------------------------------- requests


def test_greedy_requests_may_ask_for_many_samples(backend: VLLMBackend) -> None:
    result = generate(backend, request(n=3, temperature=0.0))
    assert len({sample.token_ids for sample in result.samples}) == 1
    assert len(result.samples) == 3


def test_greedy_and_sampled_requests_in_one_batch_keep_their_meaning(
    backend: VLLMBackend, trainer: Trainer
) -> None:
    asked = [request(temperature=0.0, top_p=0.5), request(temperature=0.5, n=2), request(temperature=1.5)]

    async def together() -> list[GenerationResult]:
        return await asyncio.gather(*(backend.generate(one) for one in asked))

    for one, result in zip(asked, asyncio.run(together()), strict=True):
        assert not result.meaning.truncated
        assert gap(trainer, one, result) < 1e-4


def test_a_negative_seed_is_a_seed(backend: VLLMBackend) -> None:
    first, second = (generate(backend, request(seed=-1)) for _ in range(2))
    assert first == second


def test_requests_without_a_seed_draw_anew_each_time(backend: VLLMBackend, trainer: Trainer) -> None:
    first, second = (generate(backend, request(seed=None, n=4)) for _ in range(2))
    assert {sample.token_ids for sample in first.samples} != {sample.token_ids for sample in second.samples}
    assert max(gap(trainer, request(seed=None, n=4), result) for result in (first, second)) < 1e-4


def test_a_temperature_that_vllm_would_change_is_refused(backend: VLLMBackend) -> None:
    with pytest.raises(CapabilityError, match="use 0 for greedy"):
        generate(backend, request(temperature=0.001))


def test_a_token_outside_the_vocabulary_is_refused_and_harms_nobody(backend: VLLMBackend) -> None:
    wrong = GenerationRequest(
        request_id="r", prompt_token_ids=(5, 10_000), sampling=SamplingConfig(max_tokens=4), seed=0
    )
    with pytest.raises(CapabilityError, match="10000 is out of vocabulary"):
        generate(backend, wrong)
    assert generate(backend, request()).samples[0].length > 0


def test_without_tokenizer_and_connection(no_tokenizer_path: str) -> None:
    backend = VLLMBackend(config(no_tokenizer_path))
    trainer = Trainer(no_tokenizer_path)
    eos = int(trainer.model.config.eos_token_id)  # type: ignore[union-attr]
    prompt = trainer.prompt_continued_by(eos, vocab_size=512)
    sampling = SamplingConfig(max_tokens=8, temperature=0.0)
    asked = GenerationRequest(request_id="r", prompt_token_ids=prompt, sampling=sampling)
    (sample,) = generate(backend, asked).samples
    assert (sample.token_ids, sample.finish_reason) == ((eos,), "stop")
    with pytest.raises(CapabilityError, match="use stop_token_ids"):
        generate(backend, request(stop=("x",)))
    with pytest.raises(WeightSyncError, match="not connected"):
        asyncio.run(backend.receive_weights(trainer.manifest(1)))
    backend.close()


def test_samples_share_the_computation_of_their_prompt(backend: VLLMBackend) -> None:
    """Of a prompt of 230 tokens, 7 blocks of 32 are computed once, the other 6 tokens for each of the samples."""
    prompt = tuple(5 + i % 400 for i in range(230))
    asked = replace(request(1, n=4), prompt_token_ids=prompt)
    computed: list[int] = []

    def count(engine: Any) -> None:
        scheduler = engine.engine_core.engine_core.scheduler
        schedule = scheduler.schedule

        def counted(*args: object, **options: object) -> Any:
            plan = schedule(*args, **options)
            computed.append(plan.total_num_scheduled_tokens)
            return plan

        scheduler.schedule = counted

    asyncio.run(backend._call(count))
    generate(backend, asked)
    asyncio.run(backend._call(lambda engine: vars(engine.engine_core.engine_core.scheduler).pop("schedule")))
    assert sum(computed) == 230 + 3 * (230 - 7 * 32)


def test_a_cancelled_request_leaves_the_engine(backend: VLLMBackend) -> None:
    async def cancel() -> int:
        task = asyncio.create_task(backend.generate(request(400, n=4)))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await asyncio.wrap_future(backend._loop.call(lambda engine: engine.get_num_unfinished_requests()))

    assert asyncio.run(cancel()) == 0


# ---------------------------------------------------------------- life and death


def test_the_death_of_the_engine_reaches_every_request(model_path: str) -> None:
    backend = VLLMBackend(config(model_path))

    def break_step(engine: object) -> None:
        def step() -> None:
            raise RuntimeError("out of device memory")

        engine.step = step  # type: ignore[attr-defined]

    async def die() -> list[object]:
        await backend.pause()
        tasks = [asyncio.create_task(backend.generate(request(100))) for _ in range(3)]
        await asyncio.sleep(0.05)
        await asyncio.wrap_future(backend._loop.call(break_step))
        await backend.resume()
        return await asyncio.gather(*tasks, return_exceptions=True)

    for error in asyncio.run(die()):
        assert isinstance(error, EngineDiedError)
        assert "RuntimeError: out of device memory" in str(error)
    for call in (backend.generate(request()), backend.pause(), backend.resume()):
        with pytest.raises(EngineDiedError, match="out of device memory"):
            asyncio.run(call)
    backend.close()


def test_a_closed_backend_says_so_and_others_live_on(backend: VLLMBackend, model_path: str) -> None:
    other = VLLMBackend(config(model_path))
    other.close()
    with pytest.raises(EngineDiedError, match="was closed"):
        generate(other, request())
    assert generate(backend, request()).samples[0].length > 0


def test_starting_an_engine_leaves_the_random_state_of_the_process_alone(model_path: str) -> None:
    before = torch.get_rng_state()
    VLLMBackend(config(model_path)).close()
    assert torch.equal(before, torch.get_rng_state())


# ---------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_sise": 32}, "did you mean 'block_size'"),
        ({"max_model_len": 32}, "a field of RolloutConfig"),
        ({"logprobs_mode": "raw_logprobs"}, "set by the vllm backend"),
        ({"sleep_level": 3}, "must be 1"),
    ],
)
def test_options_are_checked_before_anything_is_loaded(
    model_path: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        VLLMBackend(config(model_path, **options))


def test_a_model_that_vllm_cannot_run_is_refused_at_the_start(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, hidden_size=64, tokenizer=False)
    with pytest.raises(EngineDiedError, match=r"did not start: RuntimeError: .*head_dim=16"):
        VLLMBackend(config(path))
    with pytest.raises(ConfigError, match="refuses the rollout configuration"):
        VLLMBackend(config(str(tmp_path / "nowhere")))


def test_a_device_of_the_other_build_is_refused(model_path: str) -> None:
    with pytest.raises(ConfigError, match="does not fit the installed vLLM"):
        VLLMBackend(RolloutConfig(model=model_path, device="cuda"))
