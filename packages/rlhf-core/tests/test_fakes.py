"""The scripted backend behaves like a real one where loops can tell."""

import asyncio

import pytest
import torch
from rlhf_core import (
    EngineDiedError,
    GenerationRequest,
    ModuleWeights,
    RolloutBackend,
    SamplingConfig,
    StaleWeightsError,
    WeightSyncError,
    send_weights,
)
from rlhf_core.testing.fakes import ScriptedBackend
from rlhf_core.testing.weight_sync import connect


def request(n=1, max_tokens=50) -> GenerationRequest:
    return GenerationRequest(
        request_id="r", prompt_token_ids=tuple(range(20)), sampling=SamplingConfig(max_tokens=max_tokens), n=n
    )


def test_it_follows_its_script():
    backend = ScriptedBackend(script=lambda request, index: [index, 9])
    assert isinstance(backend, RolloutBackend)
    result = asyncio.run(backend.generate(request(n=2)))
    assert [sample.token_ids for sample in result.samples] == [(0, 9), (1, 9)]
    assert result.samples[0].finish_reason == "stop"
    (cut,) = asyncio.run(backend.generate(request(max_tokens=1))).samples
    assert (cut.token_ids, cut.finish_reason) == ((0,), "length")
    assert len(backend.requests) == 2


def test_pausing_and_aborting():
    backend = ScriptedBackend(token_delay_s=0.001)

    async def run(mode):
        task = asyncio.create_task(backend.generate(request()))
        await asyncio.sleep(0.005)
        await backend.pause(mode)
        await asyncio.sleep(0.05)
        done = task.done()
        await backend.resume()
        return done, (await task).samples[0]

    done, kept = asyncio.run(run("keep"))
    assert not done
    assert kept.length == 20
    done, aborted = asyncio.run(run("abort"))
    assert done
    assert aborted.finish_reason == "abort"
    assert aborted.length < 20


def test_weights_versions_and_failures():
    backend, model = ScriptedBackend(token_delay_s=0.002), torch.nn.Linear(2, 2)

    async def run():
        running = asyncio.create_task(backend.generate(request()))
        await asyncio.sleep(0.01)
        sender = await connect(backend, "local", timeout_s=5)
        manifest = ModuleWeights(model).manifest(4)
        receiving = asyncio.create_task(backend.receive_weights(manifest))
        await asyncio.to_thread(send_weights, ModuleWeights(model), manifest, sender)
        await receiving
        (sample,) = (await running).samples
        sender.close()
        with pytest.raises(WeightSyncError):
            await backend.receive_weights(manifest)
        with pytest.raises(StaleWeightsError):
            await backend.generate(request())
        return sample

    sample = asyncio.run(run())
    assert set(sample.weight_versions) == {0, 4}
    assert torch.equal(backend.weights["weight"], model.weight)
    backend.close()
    with pytest.raises(EngineDiedError):
        asyncio.run(backend.generate(request()))
