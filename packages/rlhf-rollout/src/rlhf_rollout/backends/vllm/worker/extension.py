"""The class that vLLM adds to its workers; imported by vLLM, never by this package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlhf_core import WeightManifest, shared_memory_id
from vllm.distributed.parallel_state import get_pp_group

from rlhf_rollout.backends.vllm.worker import adapters, cache
from rlhf_rollout.backends.vllm.worker.cpu_layers import (
    activate_by_kernel,
    normalize_by_kernel,
    rotate_heads_by_torch,
)
from rlhf_rollout.backends.vllm.worker.parent import end_with_parent
from rlhf_rollout.backends.vllm.worker.transfer import LinkTransfer

Failure = tuple[str, str]
"""Type name and message of an exception."""


class RolloutExtension:
    """Methods added to vLLM's worker class: weights, adapters, and what vLLM leaves undone.

    Failures are returned, not raised: an exception from one worker would leave the answers of the others unread in
    the executor's queues.
    """

    def rlhf_shared_memory(self) -> str | None:
        """See shared_memory_id."""
        return shared_memory_id()

    def rlhf_connect(self, init_info: dict[str, Any]) -> Failure | None:
        """Join a weight link; blocks until the sender accepts."""
        worker: Any = self
        return _failure_of(lambda: worker.init_weight_transfer_engine(init_info))

    def rlhf_receive_weights(self, manifest: dict[str, Any]) -> Failure | None:
        """Carry out one complete sync through the native start / update / finish calls."""
        worker: Any = self

        def receive() -> None:
            worker.start_weight_update()
            worker.update_weights(manifest)
            worker.finish_weight_update()

        return _failure_of(receive)

    def rlhf_empty_adapter(self) -> Failure | None:
        """Put an adapter of zeros in the place of the policy's."""
        worker: Any = self
        return _failure_of(lambda: adapters.empty(worker.model_runner.lora_manager))

    def rlhf_receive_adapter(self, manifest: dict[str, Any]) -> Failure | None:
        """Receive an adapter over the weight link and put it in the place of the policy's."""
        worker: Any = self

        def receive() -> None:
            transfer: LinkTransfer = worker.weight_transfer_engine
            manager = worker.model_runner.lora_manager
            adapters.install(manager, WeightManifest.from_dict(manifest), transfer.receiver)

        return _failure_of(receive)

    def rlhf_release_cache(self) -> Failure | None:
        """Give the memory of keys and values back, on a CPU."""
        worker: Any = self
        return _failure_of(lambda: cache.release(worker.model_runner))

    def rlhf_restore_cache(self) -> Failure | None:
        """Take the memory of keys and values again, on a CPU."""
        worker: Any = self
        return _failure_of(lambda: cache.restore(worker.model_runner))

    def rlhf_prepare_cpu_layers(self) -> Failure | None:
        """Choose the kernels of a CPU: none where vLLM's is wrong, and its own where it leaves them unused."""
        worker: Any = self

        def prepare() -> None:
            rotate_heads_by_torch(worker.model_runner.model)
            if worker.model_config.enforce_eager:  # compiled layers are fused without them
                normalize_by_kernel(worker.model_runner.model)
                activate_by_kernel(worker.model_runner.model)

        return _failure_of(prepare)

    def rlhf_prepare_stage(self) -> Failure | None:
        """Make room for what comes from the stage before.

        vLLM does so when it profiles memory, which it leaves out in eager mode on a CPU.
        """
        worker: Any = self
        runner = worker.model_runner

        def prepare() -> None:
            if not get_pp_group().is_first_rank and getattr(runner, "intermediate_tensors", True) is None:
                runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                    batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
                )

        return _failure_of(prepare)


end_with_parent()


def _failure_of(run: Callable[[], None]) -> Failure | None:
    try:
        run()
    except Exception as error:
        return type(error).__name__, str(error)
    return None
