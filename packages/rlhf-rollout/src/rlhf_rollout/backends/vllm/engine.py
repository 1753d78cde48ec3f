"""The life of a vLLM engine in a process that others share: build, first token, steps in flight, release."""

from __future__ import annotations

import contextlib
import gc
import random
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rlhf_core import ConfigError, EngineDiedError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

_lock = threading.Lock()
_alive = 0
_group_is_ours = False
"""Whether torch's default process group was made by vLLM (every engine of this process shares it)."""


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    """Restore the random state of the process, whose generators vLLM seeds and a training engine may share."""
    import numpy
    import torch

    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])


def build_engine(arguments: dict[str, Any], prepare: Callable[[LLMEngine], None]) -> LLMEngine:
    """Load a model, prepare its workers and sample one token. Run it on the thread that will step the engine.

    Raises:
        ConfigError: vLLM refuses the model or a setting.
        EngineDiedError: the engine cannot run, for instance for lack of memory or of a kernel.
    """
    global _alive, _group_is_ours
    import torch.distributed
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor.abstract import Executor

    with _lock:
        if _alive == 0:
            _group_is_ours = not torch.distributed.is_initialized()
        _alive += 1
    engine = None
    try:
        with _random_state_kept():
            settings = EngineArgs(**arguments)
            _leave_states_uncached(settings)
            # Without a context vLLM takes 2,048 tokens to a step on every device.
            config = settings.create_engine_config(UsageContext.LLM_CLASS)
            with _classes_undecorated(settings), _asked_overlap(settings, config):
                engine = LLMEngine(
                    vllm_config=config,
                    executor_class=Executor.get_class(config),
                    log_stats=False,
                    usage_context=UsageContext.LLM_CLASS,
                    multiprocess_mode=False,
                )
            engine.set_weight_version("0")
            prepare(engine)
            _sample_one_token(engine)
            if config.parallel_config.distributed_executor_backend == "uni":
                _keep_kernels()  # else the worker processes have them, and this one nothing yet
    except Exception as error:
        if engine is not None:
            shut_down_engine(engine)
        else:
            with _lock:
                _alive -= 1
        if isinstance(error, (ValueError, OSError)):
            raise ConfigError(f"vLLM refuses the rollout configuration: {error}") from error
        raise EngineDiedError(f"the vLLM engine did not start: {type(error).__name__}: {error}") from error
    return engine


def _keep_kernels() -> None:
    """Leave the CPU's kernels in the place of Triton's, where the first engine of this process put them.

    vLLM puts them there anew for each engine, by a scan of all modules, which fails on what numba loads for n-gram
    speculation: no second engine would start.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        platform: Any = type(current_platform)
        platform.register_triton_kernel_overrides = classmethod(lambda cls: None)


def _leave_states_uncached(settings: EngineArgs) -> None:
    """Switch the prefix cache off for models that carry a state (Mamba, Jamba), where prompts go through whole.

    vLLM keeps their states at the ends of chunks only, and whole prompts have none.
    """
    if settings.enable_prefix_caching and settings.enable_chunked_prefill is False:
        settings.enable_prefix_caching = not settings.create_model_config().has_inner_state


@contextlib.contextmanager
def _classes_undecorated(settings: EngineArgs) -> Iterator[None]:
    """Keep vLLM from decorating a class of Transformers that it runs (OLMo 2), where it compiles nothing.

    It decorates the class itself, so that no other model of that class could be built or called in this process.
    """
    from vllm.model_executor.models.transformers.base import Base

    name = "_decorate_cls_for_torch_compile"
    decorate = getattr(Base, name)
    if settings.enforce_eager:
        setattr(Base, name, lambda *args, **kwargs: None)
    try:
        yield
    finally:
        setattr(Base, name, decorate)


def _asked_overlap(settings: EngineArgs, config: VllmConfig) -> contextlib.AbstractContextManager[None]:
    """Asynchronous scheduling where it is asked for on a CPU, where vLLM drops it from its configuration."""
    if not settings.async_scheduling or config.scheduler_config.async_scheduling:
        return contextlib.nullcontext()
    from rlhf_rollout.backends.vllm.worker.cpu_steps import steps_overlap

    return steps_overlap(config)


def _sample_one_token(engine: LLMEngine) -> None:
    """Sample one token, since some unsupported models (head sizes without a kernel) fail only when they run."""
    from vllm import SamplingParams

    prompt: Any = {"type": "token", "prompt_token_ids": [0]}
    engine.add_request("warm-up", prompt, SamplingParams(max_tokens=1, logprobs=0, detokenize=False))
    while engine.has_unfinished_requests():
        engine.step()


def steps_in_flight(engine: LLMEngine) -> Iterator[list[Any]]:
    """Finish the steps under way, and begin none; yields their outputs.

    vLLM hands out a step before it has read the last one with asynchronous scheduling, and one for each stage of a
    pipeline.
    """
    core: Any = engine.engine_core
    core = core.engine_core
    if not core.batch_queue:
        return
    from vllm.v1.core.sched.interface import PauseState

    before = core.scheduler.pause_state
    core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    while core.batch_queue:
        yield engine.step()
    core.scheduler.set_pause_state(before)


def chosen_settings(engine: LLMEngine) -> dict[str, Any]:
    """What decides the speed, as vLLM has settled it."""
    scheduler, model = engine.vllm_config.scheduler_config, engine.model_config
    graphs = engine.vllm_config.compilation_config.cudagraph_mode
    return {
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "async_scheduling": bool(scheduler.async_scheduling),
        "enforce_eager": model.enforce_eager,
        "cudagraph_mode": "none" if graphs is None else graphs.name.lower(),
    }


def shut_down_engine(engine: LLMEngine) -> None:
    """Release workers and memory.

    vLLM's own shutdown also destroys torch's default process group, which other engines of this process still
    need and which a training engine may own; it is left to the last engine, and only if vLLM made the group.
    """
    global _alive
    with _lock:
        _alive -= 1
        last = _alive == 0
    client: Any = engine.engine_core
    core = client.engine_core
    if last and _group_is_ours:
        client.shutdown()
    else:
        client._finalizer.detach()
        core.structured_output_manager.clear_backend()
        core.model_executor.shutdown()
        core.scheduler.shutdown()
        if last:
            from vllm.distributed.parallel_state import destroy_model_parallel

            # vLLM's groups within the process group fit this model alone: a dense one has none for experts.
            destroy_model_parallel()
        gc.unfreeze()
    engine.renderer.shutdown()
