"""Rollout speed, as ratios measured in one run on one CPU thread.

    python benchmarks/rollout.py                        # everything, two to four minutes
    python benchmarks/rollout.py --parts controller     # no engine: half a minute

- `engines`: the same samples of unequal length (a long tail, as responses have) by our backend over vLLM, by the
  bare vLLM engine (same engine, same requests, its own `add_request` and `step`), by our Transformers backend, and
  by one `model.generate` over the left-padded batch, which is what TRL's trainers do without a server.
- `rewards`: generation with a slow reward function that scores each group as soon as it is finished, against
  generation alone.
- `controller`: CPU time of the dispatch per request, from 10 to 10,000 requests in flight, over up to 1,000 fake
  engines.

Every comparison is repeated in turns, and the fastest of each is taken; `--json` writes all numbers to a file.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from rlhf_core import GenerationRequest, GenerationResult, RolloutConfig, Sample, SamplingConfig

PROMPTS, GROUP, PROMPT_TOKENS = 16, 8, 64
Seconds = dict[str, float]


def make_model(directory: str, *, hidden: int, layers: int, vocab: int) -> str:
    """A random Qwen2 without end-of-text: samples end at the length that they are given."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 128),
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)
    return directory


def unequal_lengths(count: int, longest: int) -> list[int]:
    """Log-normal lengths with a long tail: the median is a seventh of the longest."""
    draw = random.Random(0)
    lengths = [min(longest, max(8, int(longest / 7 * draw.lognormvariate(0.0, 0.8)))) for _ in range(count)]
    lengths[draw.randrange(count)] = longest
    return lengths


def make_requests(vocab: int, longest: int) -> list[GenerationRequest]:
    """One request per sample, so that each has a length of its own; samples of a prompt are neighbours."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(5, vocab, (PROMPTS, PROMPT_TOKENS), generator=generator).tolist()
    return [
        GenerationRequest(
            request_id=str(index),
            prompt_token_ids=tuple(prompts[index // GROUP]),
            sampling=SamplingConfig(max_tokens=length),
            seed=index,
        )
        for index, length in enumerate(unequal_lengths(PROMPTS * GROUP, longest))
    ]


def timed(run: Callable[[], Any]) -> Seconds:
    """Wall and CPU seconds of this process."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


def fastest(runs: Sequence[Seconds]) -> Seconds:
    return {name: min(run[name] for run in runs) for name in runs[0]}


def in_turns(candidates: dict[str, Callable[[], Any]], repeats: int) -> dict[str, Seconds]:
    """Each candidate once to warm up, then all of them in turns: noise of the machine hits all alike."""
    for run in candidates.values():
        run()
    taken: dict[str, list[Seconds]] = {name: [] for name in candidates}
    for _ in range(repeats):
        for name, run in candidates.items():
            taken[name].append(timed(run))
    return {name: fastest(runs) for name, runs in taken.items()}


# ---------------------------------------------------------------- engines


def run_backend(backend: Any, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
    async def everything() -> list[GenerationResult]:
        return await asyncio.gather(*(backend.generate(request) for request in requests))

    results = asyncio.run(everything())
    assert [r.samples[0].length for r in results] == [r.sampling.max_tokens for r in requests]
    return results


def run_bare_vllm(backend: Any, requests: Sequence[GenerationRequest]) -> None:
    """The same engine with the same sampling parameters, stepped by nothing but this loop, on its own thread."""
    from rlhf_rollout.backends.vllm.requests import sampling_params

    params = [sampling_params(request, backend._config, backend.capabilities) for request in requests]

    def run(engine: Any) -> int:
        for index, (request, param) in enumerate(zip(requests, params, strict=True)):
            prompt = {"type": "token", "prompt_token_ids": list(request.prompt_token_ids)}
            engine.add_request(f"bare-{index}", prompt, param)
        tokens = 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    tokens += len(output.outputs[0].token_ids)
        return tokens

    assert backend._loop.call(run).result() == sum(request.sampling.max_tokens for request in requests)


def make_trl_generation(model_path: str, requests: Sequence[GenerationRequest]) -> Callable[[], None]:
    """What TRL's GRPOTrainer does without vLLM: one `generate` over the whole left-padded batch.

    A finished row goes on as padding until the longest one ends. A stopping criterion stands in for end-of-text at
    the given lengths.
    """
    from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria, StoppingCriteriaList

    model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    lengths = torch.tensor([request.sampling.max_tokens for request in requests])
    longest = int(lengths.max())
    ids = torch.tensor([request.prompt_token_ids for request in requests])

    class AtLength(StoppingCriteria):
        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
            return input_ids.shape[1] - ids.shape[1] >= lengths

    def run() -> None:
        config = GenerationConfig(max_new_tokens=longest, do_sample=True, top_k=0, pad_token_id=0)
        with torch.no_grad():
            out = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                generation_config=config,
                stopping_criteria=StoppingCriteriaList([AtLength()]),
            )
        assert out.shape[1] == ids.shape[1] + longest

    return run


def rollout_config(model: str, requests: Sequence[GenerationRequest]) -> RolloutConfig:
    """Every sample runs at the same time."""
    longest = max(request.sampling.max_tokens for request in requests)
    return RolloutConfig(model=model, max_model_len=PROMPT_TOKENS + longest + 64, max_num_seqs=len(requests))


def bench_engines(
    vllm: Any, model: str, requests: Sequence[GenerationRequest], options: argparse.Namespace
) -> dict[str, Any]:
    from rlhf_rollout import TransformersBackend

    seconds = in_turns(
        {"vllm backend": lambda: run_backend(vllm, requests), "bare vllm": lambda: run_bare_vllm(vllm, requests)},
        repeats=2 * options.repeats,
    )
    embedded = TransformersBackend(rollout_config(model, requests))
    others: dict[str, Callable[[], Any]] = {"transformers backend": lambda: run_backend(embedded, requests)}
    if not options.no_trl:
        others["trl generation"] = make_trl_generation(model, requests)
    for name, run in others.items():
        seconds[name] = fastest([timed(run) for _ in range(max(1, options.repeats - 1))])
    embedded.close()
    tokens = sum(request.sampling.max_tokens for request in requests)
    longest = max(request.sampling.max_tokens for request in requests)
    print(f"{len(requests)} samples, {tokens} tokens, longest {longest}, mean {tokens / len(requests):.0f}")
    for name, second in seconds.items():
        print(
            f"  {name:22s} {second['wall']:7.2f} s wall {second['cpu']:7.2f} s CPU "
            f"{tokens / second['wall']:8.0f} tok/s"
        )
    ours = seconds["vllm backend"]
    ratios = {
        f"{name} / vllm backend ({kind})": seconds[name][kind] / ours[kind] for name in seconds for kind in ours
    }
    overhead = {kind: ours[kind] / seconds["bare vllm"][kind] - 1 for kind in ours}
    print(f"  overhead over the bare engine: {overhead['wall']:+.1%} wall, {overhead['cpu']:+.1%} CPU (at most 5%)")
    for name in others:
        ratio = {kind: seconds[name][kind] / ours[kind] for kind in ours}
        print(f"  faster than {name}: {ratio['wall']:.1f}x wall, {ratio['cpu']:.1f}x CPU")
    return {"seconds": seconds, "overhead": overhead, "ratios": ratios}


# ---------------------------------------------------------------- rewards


def bench_rewards(vllm: Any, requests: Sequence[GenerationRequest], repeats: int) -> dict[str, Any]:
    """Each group is one request of eight samples, which is scored while the others are still being generated."""
    from rlhf_launch import Prompt, trajectories_of
    from rlhf_rollout import PythonReward

    groups = [replace(request, request_id=f"g{index}", n=GROUP) for index, request in enumerate(requests[::GROUP])]
    asyncio.run(gather(vllm, groups))  # warm-up
    delay = 0.04 * timed(lambda: asyncio.run(gather(vllm, groups)))["wall"]

    def slow(completions: list[str]) -> list[float]:
        time.sleep(delay)
        return [0.0] * len(completions)

    reward = PythonReward(slow)
    scored: list[int] = []

    async def one(request: GenerationRequest) -> None:
        result = await vllm.generate(request)
        prompt = Prompt(prompt_id=request.request_id, text="", token_ids=request.prompt_token_ids)
        scored.append(len(await reward.score(trajectories_of(prompt, result), [""] * GROUP)))

    async def everything() -> None:
        await asyncio.gather(*(one(request) for request in groups))

    seconds = in_turns(
        {
            "alone": lambda: asyncio.run(gather(vllm, groups)),
            "with rewards": lambda: asyncio.run(everything()),
        },
        repeats=repeats + 1,
    )
    alone, together = seconds["alone"], seconds["with rewards"]
    assert sum(scored) == GROUP * len(groups) * (repeats + 2)
    ratio = together["wall"] / alone["wall"]
    print(f"rewards of {delay:.2f} s for each of {len(groups)} groups, {delay * len(groups):.2f} s in all")
    print(
        f"  generation alone {alone['wall']:.2f} s, with rewards {together['wall']:.2f} s: "
        f"{ratio:.3f}x (at most 1.1x)"
    )
    return {"alone": alone, "with rewards": together, "reward seconds": delay * len(groups), "ratio": ratio}


async def gather(backend: Any, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
    return await asyncio.gather(*(backend.generate(request) for request in requests))


# ---------------------------------------------------------------- controller


class FakeEngines:
    """Any number of engines that take requests until all are in flight, and then answer them, as others' processes
    would: their answers cost the controller a wake-up each, and nothing else."""

    def __init__(self, expected: int) -> None:
        self._waiting: list[tuple[Future[Any], GenerationRequest]] = []
        self._expected = expected
        self._sample = Sample(token_ids=(7,), log_probs=(-1.0,), weight_versions=(0,), finish_reason="stop")

    def take(self, request: GenerationRequest) -> Future[Any]:
        future: Future[Any] = Future()
        self._waiting.append((future, request))
        if len(self._waiting) == self._expected:
            threading.Thread(target=self._answer).start()
        return future

    def _answer(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future, request in waiting:
            future.set_result(GenerationResult(request_id=request.request_id, samples=(self._sample,)))


class FakeHandle:
    def __init__(self, name: str, engines: FakeEngines) -> None:
        self.name = name
        self._engines = engines

    def call(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        return self._engines.take(args[0])

    def pulse(self) -> Future[Any]:
        return Future()

    def close(self) -> None:
        pass


def dispatch(engines: int, in_flight: int) -> None:
    """All requests through a pool, every one in flight before the first is answered."""
    from rlhf_launch import RolloutPool

    fakes = FakeEngines(in_flight)
    pool = RolloutPool([FakeHandle(str(index), fakes) for index in range(engines)])
    sampling = SamplingConfig(max_tokens=1)
    requests = [
        GenerationRequest(request_id=str(index), prompt_token_ids=(5,), sampling=sampling)
        for index in range(in_flight)
    ]
    assert len(asyncio.run(gather(pool, requests))) == in_flight


def bench_controller(repeats: int) -> dict[str, Any]:
    """Python's garbage collector looks at all objects in flight again and again; its share is told apart."""
    cost: dict[str, float] = {}
    print("controller: CPU microseconds per request, and without the garbage collector")
    for engines in (1, 100, 1000):
        line = []
        for in_flight in (10, 100, 1000, 10_000):
            for collector in ("", ", no collector"):
                (gc.disable if collector else gc.enable)()
                cost[f"{engines} engines, {in_flight} in flight{collector}"] = _cost(engines, in_flight, repeats)
            gc.enable()
            name = f"{engines} engines, {in_flight} in flight"
            line.append(f"{in_flight}: {cost[name]:4.0f} /{cost[name + ', no collector']:4.0f}")
        print(f"  {engines:5d} engines   " + "   ".join(line))
    result: dict[str, Any] = {"microseconds": cost}
    for collector in ("", ", no collector"):
        most = cost[f"1000 engines, 10000 in flight{collector}"]
        growth = most / cost[f"1000 engines, 100 in flight{collector}"]
        width = most / cost[f"1 engines, 10000 in flight{collector}"]
        print(f"  10,000 in flight against 100{collector}: {growth:.2f}x per request (1 is linear)")
        print(f"  1,000 engines against 1{collector}: {width:.2f}x per request")
        result |= {f"growth{collector}": growth, f"engines{collector}": width}
    return result


def _cost(engines: int, in_flight: int, repeats: int) -> float:
    """Microseconds per request, without what a pool and an event loop cost by themselves."""
    # Small numbers several times over, so that each measurement is long enough.
    rounds = max(1, 2000 // in_flight)
    empty = fastest([timed(partial(repeat_dispatch, engines, 1, rounds)) for _ in range(repeats)])
    full = fastest([timed(partial(repeat_dispatch, engines, in_flight, rounds)) for _ in range(repeats)])
    return max(0.0, full["cpu"] - empty["cpu"]) / rounds / in_flight * 1e6


def repeat_dispatch(engines: int, in_flight: int, rounds: int) -> None:
    for _ in range(rounds):
        dispatch(engines, in_flight)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=["engines", "rewards", "controller"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--longest", type=int, default=384, help="tokens of the longest response")
    parser.add_argument("--no-trl", action="store_true", help="leave out the generation of TRL's kind, the slowest")
    parser.add_argument("--json", help="write all numbers here")
    options = parser.parse_args()
    numbers: dict[str, Any] = {}
    if {"engines", "rewards"} & set(options.parts):
        numbers |= with_vllm(options)
    if "controller" in options.parts:
        numbers["controller"] = bench_controller(options.repeats)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(numbers, file, indent=1)


def millions(model: str) -> float:
    """Millions of parameters in a directory's (float32) safetensors files."""
    return sum(file.stat().st_size for file in Path(model).glob("*.safetensors")) / 4e6


def with_vllm(options: argparse.Namespace) -> dict[str, Any]:
    from rlhf_rollout import VLLMBackend

    numbers: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        model = make_model(directory, hidden=options.hidden, layers=options.layers, vocab=options.vocab)
        requests = make_requests(options.vocab, options.longest)
        config = rollout_config(model, requests)
        os.environ.update(VLLMBackend.env_vars(config))
        torch.set_num_threads(1)
        backend = VLLMBackend(config)
        print(f"Qwen2 of width {options.hidden}, {options.layers} layers, {millions(model):.0f} M parameters")
        if "engines" in options.parts:
            numbers["engines"] = bench_engines(backend, model, requests, options)
        if "rewards" in options.parts:
            numbers["rewards"] = bench_rewards(backend, requests, options.repeats)
        backend.close()
    return numbers


if __name__ == "__main__":
    main()
