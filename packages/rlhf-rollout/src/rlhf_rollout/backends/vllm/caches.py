"""What vLLM keeps of weights that are gone: keys, values, encoder outputs. On the engine's thread, between steps.

Two ways to take new weights. The exact one drops all, and running requests are computed again from their tokens.
The other one (`RolloutConfig.keep_kv_cache`) lets running requests go on with keys and values of older weights.
Then no other request may take these: cached blocks are told apart by a salt, which changes with the weights.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine


def drop_caches(engine: LLMEngine) -> None:
    """Drop all; requests that run start again from their tokens."""
    engine.reset_encoder_cache()
    engine.reset_prefix_cache(reset_running_requests=True)


def keep_running(engine: LLMEngine, salt: str) -> None:
    """Let requests go on whose prompt is complete; all others will be computed with the new weights alone.

    Args:
        engine: with no step in flight.
        salt: that of requests which are added from now on, new with each version of the weights.
    """
    scheduler = _scheduler(engine)
    for request in [request for request in scheduler.running if request.is_prefill_chunk]:
        _start_again(scheduler, request)
    for request in scheduler.waiting:
        # Not begun, or to be computed again from its tokens: none of it needs the old weights.
        request.cache_salt = salt
        request.block_hashes.clear()
        request.update_block_hashes()
    engine.reset_encoder_cache()
    if not scheduler.running:
        engine.reset_prefix_cache()


@contextlib.contextmanager
def others_set_aside(engine: LLMEngine, rows: Sequence[Sequence[int]], *, keep: bool) -> Iterator[None]:
    """Let the engine compute what is added inside this block, and nothing of the requests that it has.

    Args:
        engine: with no step in flight.
        rows: what will be added, each with one token more.
        keep: whether those that run keep their keys and values, as far as the rows leave room for them. Otherwise
            these are computed again.
    """
    from vllm.v1.core.sched.request_queue import create_request_queue

    scheduler = _scheduler(engine)
    if keep:
        while scheduler.running and not _fit_beside(engine, rows):
            _start_again(scheduler, scheduler.running[-1])
    else:
        engine.reset_prefix_cache(reset_running_requests=True)
    waiting, scheduler.waiting = scheduler.waiting, create_request_queue(scheduler.policy)
    running, scheduler.running = scheduler.running, []
    try:
        yield
    finally:
        scheduler.waiting, scheduler.running = waiting, running


def _fit_beside(engine: LLMEngine, rows: Sequence[Sequence[int]]) -> bool:
    """Whether the rows have places in the batch and blocks of the cache besides the requests that run."""
    scheduler = _scheduler(engine)
    groups = scheduler.kv_cache_config.kv_cache_groups
    needed = sum(-(-(len(row) + 1) // group.kv_cache_spec.block_size) for row in rows for group in groups)
    places = scheduler.max_num_running_reqs - len(scheduler.running)
    return len(rows) <= places and needed <= scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


def _start_again(scheduler: Any, request: Any) -> None:
    """Have a running request computed again from its tokens, as vLLM does when memory runs out."""
    scheduler.running.remove(request)
    scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
    # Else it would pass for one that ran in the step before, whose states the workers have.
    scheduler.prev_step_scheduled_req_ids.discard(request.request_id)


def _scheduler(engine: LLMEngine) -> Any:
    client: Any = engine.engine_core
    return client.engine_core.scheduler
