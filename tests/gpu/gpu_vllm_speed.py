"""Tokens/s of vLLM under one setting, in a process of its own.

python gpu_vllm_speed.py engine MODEL REQUESTS '{"async_scheduling": true}'     # vLLM alone
python gpu_vllm_speed.py backend MODEL REQUESTS '{}'                            # our backend
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
    """Seconds of `generate` of our backend for all requests at once, the second time."""
    from rlhf_core import GenerationRequest, RolloutConfig, SamplingConfig
    from rlhf_rollout import VLLMBackend

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
        GenerationRequest(request_id=str(index), prompt_token_ids=row, sampling=sampling, seed=index)
        for index, row in enumerate(prompts(requests))
    ]

    async def everything() -> None:
        await asyncio.gather(*map(backend.generate, asked))

    try:
        return _second(lambda: asyncio.run(everything()))
    finally:
        backend.close()


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
