"""The class that vLLM adds to its workers; imported by vLLM, never by this package."""

from __future__ import annotations

from typing import Any

from vllm.distributed.parallel_state import get_pp_group

from rlhf_rollout.backends.vllm.worker.adapters import AdapterExtension


class RolloutExtension(AdapterExtension):
    """Weights, adapters, and what a pipeline stage needs before its first step."""

    def rlhf_prepare_stage(self) -> tuple[str, str] | None:
        """Make room for what comes from the stage before. vLLM does so when it profiles memory, which it leaves out
        in eager mode on CPU."""
        worker: Any = self
        runner = worker.model_runner
        try:
            if not get_pp_group().is_first_rank and getattr(runner, "intermediate_tensors", True) is None:
                runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                    batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
                )
        except Exception as error:
            return type(error).__name__, str(error)
        return None
