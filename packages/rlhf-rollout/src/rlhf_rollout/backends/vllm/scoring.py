"""Scoring given tokens on a vLLM engine; runs on the engine's thread, between two steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from rlhf_core import Precision, RolloutConfig

from rlhf_rollout.backends.vllm.caches import others_set_aside

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.llm_engine import LLMEngine


def score_precision(config: RolloutConfig) -> Precision:
    """The numbers that an engine of this configuration computes in; unquantised checkpoints only."""
    coarse = config.options.get("quantization") or config.options.get("kv_cache_dtype", "auto") not in (
        "auto",
        config.dtype,
    )
    return "quantized" if coarse else config.dtype


def score_rows(
    engine: LLMEngine, rows: Sequence[Sequence[int]], lora_request: Any, *, keep: bool = False
) -> list[list[float]]:
    """Log-probs of each row's tokens, from the second on; nothing else is computed meanwhile.

    `keep`: requests that run keep their keys and values, as far as there is room.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        max_tokens=1,
        prompt_logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        skip_reading_prefix_cache=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    names = {f"score-{index}": index for index in range(len(rows))}
    scores: list[list[float]] = [[] for _ in rows]
    with others_set_aside(engine, rows, keep=keep):
        for name, index in names.items():
            prompt: Any = {"type": "token", "prompt_token_ids": list(rows[index])}
            engine.add_request(name, prompt, params, lora_request=lora_request)
        while names:
            for output in engine.step():
                if output.finished and output.request_id in names:
                    scores[names.pop(output.request_id)] = _prompt_log_probs(cast("RequestOutput", output))
    return scores


def _prompt_log_probs(output: RequestOutput) -> list[float]:
    flat = cast(Any, output.prompt_logprobs)
    # The first token has none; of the others the row's own token comes first.
    places = list(zip(flat.start_indices, flat.end_indices, strict=True))[1:]
    return [flat.logprobs[start] for start, _ in places]
