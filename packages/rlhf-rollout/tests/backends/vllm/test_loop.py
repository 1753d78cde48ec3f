"""The engine thread, with an engine made of a few lines."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass, field
from typing import Any

import pytest
from rlhf_core import CapabilityError, EngineDiedError, StaleWeightsError
from rlhf_rollout.backends.vllm.loop import VLLMLoop


@dataclass
class Output:
    request_id: str
    tokens: list[int] = field(default_factory=list)
    finished: bool = False
    queue: Any = None


class FakeProcessor:
    """Where vLLM keeps its requests; an aborted one is put into the request's queue."""

    def __init__(self) -> None:
        self.request_states: dict[str, Output] = {}
        self.external_req_ids: defaultdict[str, list[str]] = defaultdict(list)


class FakeEngine:
    """Each step gives every request one token; `params` is the number of tokens it wants."""

    def __init__(self) -> None:
        self.output_processor = FakeProcessor()
        self.wanted: dict[str, int] = {}
        self.threads: set[int] = set()
        self.largest_batch = 0
        self.gate = threading.Semaphore(0)
        self.closed = False

    def add_request(self, request_id: str, prompt: Any, params: Any, lora_request: Any = None) -> None:
        if prompt["prompt_token_ids"] == [-1]:
            raise ValueError("token -1 is out of vocabulary")
        internal = request_id + "-internal"
        self.output_processor.request_states[internal] = Output(request_id)
        self.output_processor.external_req_ids[request_id].append(internal)
        self.wanted[internal] = params

    def step(self) -> list[Output]:
        self.gate.acquire()
        self.threads.add(threading.get_ident())
        states = self.output_processor.request_states
        self.largest_batch = max(self.largest_batch, len(states))
        finished = []
        for internal, state in list(states.items()):
            state.tokens.append(len(state.tokens))
            if len(state.tokens) == self.wanted[internal]:
                state.finished = True
                finished.append(states.pop(internal))
                del self.output_processor.external_req_ids[state.request_id]
        return finished

    def abort_request(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            for internal in self.output_processor.external_req_ids.pop(request_id, []):
                state = self.output_processor.request_states.pop(internal)
                state.queue.put(state)

    def shut_down(self) -> None:
        self.closed = True


class Rig:
    """A loop and its engine. `steps(n)` lets it make n steps."""

    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.loop = VLLMLoop(lambda: self.engine, lambda engine: engine.shut_down())  # type: ignore

    def ask(self, tokens: int, prompt: tuple[int, ...] = (1, 2)) -> Future[Any]:
        return self.loop.generate({"prompt_token_ids": list(prompt)}, tokens)  # type: ignore[arg-type]

    def steps(self, n: int) -> None:
        self.engine.gate.release(n)

    def call(self, run: Callable[[Any], Any]) -> Any:
        return self.loop.call(run).result(10)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.engine.gate.release(10_000)
    rig.loop.stop()


def test_requests_share_steps_and_all_steps_run_on_one_thread(rig: Rig) -> None:
    # The first request occupies the engine in a step that waits at the gate; the others come in before the next.
    futures = [rig.ask(tokens) for tokens in (3, 1, 2)]
    rig.steps(10)
    assert [future.result(10).tokens for future in futures] == [[0, 1, 2], [0], [0, 1]]
    assert rig.engine.largest_batch >= 2
    assert len(rig.engine.threads) == 1
    assert rig.engine.threads != {threading.get_ident()}


def test_several_event_loops_may_wait_at_once(rig: Rig) -> None:
    results: list[int] = []

    async def ask(tokens: int) -> None:
        results.append(len((await asyncio.wrap_future(rig.ask(tokens))).tokens))

    threads = [threading.Thread(target=lambda n=n: asyncio.run(ask(n))) for n in (1, 2, 3)]
    for thread in threads:
        thread.start()
    rig.steps(10)
    for thread in threads:
        thread.join(10)
    assert sorted(results) == [1, 2, 3]


def test_hold_freezes_and_release_goes_on(rig: Rig) -> None:
    rig.call(lambda engine: rig.loop.pause(engine, abort=False))
    future = rig.ask(2)
    rig.steps(10)
    assert not wait([future], timeout=0.05).done
    rig.call(rig.loop.resume)
    assert future.result(10).tokens == [0, 1]


def test_hold_with_abort_ends_requests_with_what_they_have(rig: Rig) -> None:
    rig.call(lambda engine: rig.loop.pause(engine, abort=False))
    short, long = rig.ask(2), rig.ask(9)
    rig.call(lambda engine: None)  # both have been added
    rig.steps(3)
    rig.loop.call(rig.loop.resume)
    assert short.result(10).tokens == [0, 1]
    aborting = rig.loop.call(lambda engine: rig.loop.pause(engine, abort=True))
    rig.steps(1)  # if a step is waiting at the gate, it may end
    aborting.result(10)
    assert long.result(10).tokens in ([0, 1, 2], [0, 1, 2, 3])
    waiting = rig.ask(1)
    assert not wait([waiting], timeout=0.05).done
    rig.call(rig.loop.resume)
    rig.steps(2)
    assert waiting.result(10).tokens == [0]


def test_a_cancelled_request_leaves_the_engine(rig: Rig) -> None:
    rig.call(lambda engine: rig.loop.pause(engine, abort=False))
    future = rig.ask(5)
    assert rig.call(lambda engine: len(engine.output_processor.request_states)) == 1
    future.cancel()
    assert rig.call(lambda engine: len(engine.output_processor.request_states)) == 0
    with pytest.raises(CancelledError):
        future.result()


def test_a_refused_request_harms_nobody(rig: Rig) -> None:
    with pytest.raises(CapabilityError, match="out of vocabulary"):
        rig.ask(1, (-1,)).result(10)
    future = rig.ask(1)
    rig.steps(1)
    assert future.result(10).tokens == [0]


def test_refuse_fails_waiting_and_later_requests_until_accept(rig: Rig) -> None:
    rig.call(lambda engine: rig.loop.pause(engine, abort=False))
    waiting = rig.ask(1)
    rig.call(lambda engine: rig.loop.refuse(engine, StaleWeightsError("sync first")))
    errors = [future.exception(10) for future in (waiting, rig.ask(1))]
    assert all(isinstance(error, StaleWeightsError) and str(error) == "sync first" for error in errors)
    assert errors[0] is not errors[1]
    rig.call(lambda engine: rig.loop.accept())
    rig.call(rig.loop.resume)
    future = rig.ask(1)
    rig.steps(1)
    assert future.result(10).tokens == [0]


def test_an_error_of_a_command_belongs_to_its_caller(rig: Rig) -> None:
    def fail(engine: Any) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        rig.call(fail)
    assert rig.call(lambda engine: 3) == 3


def test_death_reaches_everyone_with_the_first_cause(rig: Rig) -> None:
    rig.call(lambda engine: rig.loop.pause(engine, abort=False))
    futures = [rig.ask(1), rig.ask(2)]

    def sabotage(engine: Any) -> None:
        engine.step = lambda: 1 / 0

    rig.call(sabotage)
    rig.loop.call(rig.loop.resume)
    for future in futures:
        error = future.exception(10)
        assert isinstance(error, EngineDiedError)
        assert isinstance(error.__cause__, ZeroDivisionError)
    with pytest.raises(EngineDiedError, match="ZeroDivisionError: division by zero"):
        rig.ask(1)
    rig.loop.stop()
    assert rig.engine.closed


def test_a_command_may_declare_the_engine_dead(rig: Rig) -> None:
    def lost(engine: Any) -> None:
        raise EngineDiedError("worker 3 is gone")

    with pytest.raises(EngineDiedError, match="worker 3"):
        rig.call(lost)
    rig.loop.stop()
    with pytest.raises(EngineDiedError, match="worker 3 is gone"):
        rig.ask(1)


def test_stop_fails_what_waits_and_may_be_called_twice(rig: Rig) -> None:
    rig.call(lambda engine: rig.loop.pause(engine, abort=False))
    future = rig.ask(1)
    rig.loop.stop()
    rig.loop.stop()
    with pytest.raises(EngineDiedError, match="was closed"):
        future.result(10)
    assert rig.engine.closed


def test_an_engine_that_does_not_start_raises_in_the_constructor() -> None:
    def build() -> Any:
        raise MemoryError("too large")

    with pytest.raises(MemoryError, match="too large"):
        VLLMLoop(build, lambda engine: None)
