"""Tokens/s of vLLM under one setting, in a process of its own.

python gpu_vllm_speed.py engine MODEL REQUESTS '{"async_scheduling": true}'     # vLLM alone
python gpu_vllm_speed.py backend MODEL REQUESTS '{}'                            # our backend
python gpu_vllm_speed.py backend MODEL REQUESTS '{"seeds": false}'              # without seeds of requests
python gpu_vllm_speed.py backend MODEL REQUESTS '{"syncs": 4, "keep": true}'    # four times all weights are new
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

PROMPT_TOKENS, NEW_TOKENS = 256, 256
LENGTH = PROMPT_TOKENS + NEW_TOKENS


def prompts(count: int) -> list[list[int]]:
    """Prompts that share no block."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randint(5, 150_000, (count, PROMPT_TOKENS), generator=generator).tolist()


def by_engine(model: str, requests: int, options: dict[str, Any]) -> float:
    """Seconds of vLLM's own `generate`, the second time."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        model,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        load_format="dummy",
        max_model_len=LENGTH,
        max_num_seqs=requests,
        enable_prefix_caching=False,
        **options,
    )
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    given: Any = [{"prompt_token_ids": row} for row in prompts(requests)]
    return _second(lambda: engine.generate(given, params, use_tqdm=False))


def by_backend(model: str, requests: int, options: dict[str, Any]) -> float:
    """Seconds of `generate` of our backend for all requests at once, the second time.

    Beside options of vLLM: `seeds` of requests, `syncs` amid them, in which running requests `keep` their states or
    not. No weights travel in these: what is measured is what becomes of the requests.
    """
    from rlhf_core import GenerationRequest, RolloutConfig, SamplingConfig
    from rlhf_rollout import VLLMBackend

    seeds, syncs, keep = options.pop("seeds", True), options.pop("syncs", 0), options.pop("keep", False)
    backend = VLLMBackend(
        RolloutConfig(
            model=model,
            device="cuda",
            dtype="bfloat16",
            max_model_len=LENGTH,
            max_num_seqs=requests,
            options={"load_format": "dummy", "enable_prefix_caching": False, **options},
        )
    )
    sampling = SamplingConfig(max_tokens=NEW_TOKENS, min_tokens=NEW_TOKENS)
    asked = [
        GenerationRequest(
            request_id=str(index), prompt_token_ids=row, sampling=sampling, seed=index if seeds else None
        )
        for index, row in enumerate(prompts(requests))
    ]

    between_s = 0.0

    async def everything() -> None:
        tasks = [asyncio.create_task(backend.generate(one)) for one in asked]
        for number in range(syncs if between_s else 0):
            await asyncio.sleep(between_s)
            await backend._call(lambda engine, salt=f"sync {number}": renewed(backend, engine, salt, keep=keep))
        await asyncio.gather(*tasks)

    try:
        if syncs:
            between_s = _second(lambda: asyncio.run(everything())) / (syncs + 1)
        return _second(lambda: asyncio.run(everything()))
    finally:
        backend.close()


def renewed(backend: Any, engine: Any, salt: str, *, keep: bool) -> None:
    """What a sync does to the requests of an engine, on its thread."""
    from rlhf_rollout.backends.vllm.caches import drop_caches, keep_running

    backend._loop.settle(engine)
    if keep:
        keep_running(engine, salt)
    else:
        drop_caches(engine)


def _second(run: Any) -> float:
    run()
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def main() -> None:
    """Print the new tokens per second."""
    kind, model, requests, options = sys.argv[1:]
    measured = {"engine": by_engine, "backend": by_backend}[kind]
    seconds = measured(model, int(requests), json.loads(options))
    print("result", json.dumps(int(requests) * NEW_TOKENS / seconds), flush=True)


if __name__ == "__main__":
    main()
