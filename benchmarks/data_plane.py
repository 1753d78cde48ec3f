"""What the driver does for each token, from a rollout engine's answer to what each training rank is sent.

    python benchmarks/data_plane.py                                  # 1,000 and 10,000 samples of 4,096 tokens
    python benchmarks/data_plane.py --samples 100000                 # about 8 GiB
    python benchmarks/data_plane.py --parts sharing                  # prompts run once, at 1 to 64 ranks

- `driver`: a GRPO (or PPO) step with the run's own pool, producer, ledger, trainer, groups of ranks and workers.
  Engines answer at once, and what is said to workers and by them is pickled as Ray does it: protocol 5, arrays out
  of band, and read from the bytes without a copy. What happens in the workers is left out of all times; times are
  processor time of the driver's process, which other work on the same cores lengthens. PPO's
  critic answers with a value for each token, so that more arrays pass through than with GRPO.
- `sharing`: samples of one prompt dealt to ranks and minibatches. `tokens run` counts a prompt once for each rank
  and minibatch that has a sample of it, as a share of all tokens; `imbalance` is the costliest rank over the mean.

Memory is the peak of the process over what it had before, for each token: with the answers of the engines while
they are in flight, which in a run are in Ray's object store. Each size runs in a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import pickle
import random
import resource
import threading
import time
import types
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rlhf_algos import GRPO, PPO
from rlhf_core import (
    BackendCapabilities,
    Batch,
    EngineConfig,
    GenerationRequest,
    GenerationResult,
    ModelOutputs,
    Sample,
    SamplingConfig,
    Score,
    StepReport,
    deal_units,
    order_in_groups,
)
from rlhf_launch import (
    GroupMaker,
    Ledger,
    LedgerLimits,
    PhaseClock,
    Producer,
    ProducerConfig,
    Prompt,
    PromptStream,
    Pulse,
    Rewarder,
    RolloutPool,
    Trainer,
    TrainGroup,
    TrainWorker,
    UpdatePlan,
    Waits,
    pack_groups,
    response_sampler,
    spared_collector,
)

GROUP, PROMPT_TOKENS, TOKENS, RANKS, MINIBATCHES = 8, 256, 4096, 8, 2
GIB = 2**30


class Sidelines:
    """Processor time that is not the driver's: of the fakes, on whatever thread they run."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._lock = threading.Lock()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        begin = time.thread_time()
        try:
            yield
        finally:
            with self._lock:
                self.seconds += time.thread_time() - begin


class FakeHandle:
    """A worker behind what Ray does with arguments and results: the driver writes the ones and reads the others."""

    def __init__(self, name: str, worker: Any, aside: Sidelines) -> None:
        self.name, self._worker, self._aside = name, worker, aside

    def call(self, method: str, *args: Any) -> Future[Any]:
        """See rlhf_launch.Handle."""
        sent = _write(args)
        with self._aside():
            answer = _write(getattr(self._worker, method)(*_read(sent)))
        done: Future[Any] = Future()
        done.set_result(_read(answer))
        return done

    def pulse(self) -> Future[Pulse]:
        """See rlhf_launch.Handle."""
        done: Future[Pulse] = Future()
        done.set_result(Pulse())
        return done

    def begin_close(self) -> Future[Any]:
        """See rlhf_launch.Handle."""
        done: Future[Any] = Future()
        done.set_result(None)
        return done

    def end(self) -> None:
        """See rlhf_launch.Handle."""


def _write(value: Any) -> tuple[bytes, list[bytes]]:
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return head, [buffer.raw().tobytes() for buffer in buffers]


def _read(written: tuple[bytes, list[bytes]]) -> Any:
    head, buffers = written
    return pickle.loads(head, buffers=buffers)


class FakeEngine:
    """A rollout engine that answers at once, with samples of given lengths."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = lengths

    def start(self) -> float:
        """Nothing to build."""
        return 0.0

    def capabilities(self) -> BackendCapabilities:
        """See RolloutBackend."""
        return BackendCapabilities(transports=frozenset({"local"}))

    def generate(self, request: GenerationRequest) -> GenerationResult:
        """See RolloutBackend."""
        first = int(request.request_id) * request.n
        samples = tuple(self._sample(self._lengths[(first + i) % len(self._lengths)]) for i in range(request.n))
        return GenerationResult(request_id=request.request_id, samples=samples, meaning=request.sampling.meaning)

    def _sample(self, length: int) -> Sample:
        return Sample(
            token_ids=np.arange(1000, 1000 + length, dtype=np.int32),
            log_probs=np.full(length, -0.5, dtype=np.float32),
            weight_versions=np.zeros(length, dtype=np.int32),
            finish_reason="stop",
        )


class FakeTrainEngine:
    """A training engine whose log-probs and values are all -0.5."""

    def score(self, batch: Batch, outputs: Sequence[str]) -> ModelOutputs:
        """See TrainEngine."""
        return ModelOutputs(**{name: torch.where(batch.response_mask, -0.5, 0.0) for name in outputs})

    def step(self, batch: Batch, loss: Any) -> StepReport:
        """See TrainEngine."""
        return StepReport(loss=1.0, grad_norm=1.0, learning_rate=1e-6, tokens=batch.tokens)


class FakeRank(TrainWorker):
    """A training rank as runs have it, but for its engine."""

    def __init__(self) -> None:
        super().__init__("", EngineConfig(model="none", role="policy"), {})

    @property
    def engine(self) -> Any:
        """See TrainWorker."""
        return FakeTrainEngine()


class FirstBest:
    """The first sample of a group is right."""

    async def score(self, trajectories: Sequence[Any], texts: Sequence[str]) -> list[Score]:
        """See RewardFunction."""
        return [Score(value=float(index == 0)) for index in range(len(trajectories))]


def lengths_of(samples: int, tokens: int, *, tail: bool) -> list[int]:
    """Sampled tokens of each sample: all the same, or log-normal with this mean, at most 8 times it."""
    mean = tokens - PROMPT_TOKENS
    if not tail:
        return [mean]
    draw = random.Random(0)
    drawn = [draw.lognormvariate(0.0, 0.8) for _ in range(samples)]
    scale = mean * samples / sum(drawn)
    return [max(8, min(8 * tokens - PROMPT_TOKENS, int(scale * value))) for value in drawn]


def driver(samples: int, tokens: int, *, critic: bool, tail: bool) -> dict[str, float]:
    """One step of a run with this many samples; seconds and bytes for each of its tokens."""
    aside, waits = Sidelines(), Waits(3600)
    lengths = lengths_of(samples, tokens, tail=tail)
    total = sum(lengths[i % len(lengths)] + PROMPT_TOKENS for i in range(samples))
    engines = [FakeHandle(f"rollout-{i}", FakeEngine(lengths), aside) for i in range(4)]

    def ranks(role: str) -> TrainGroup:
        return TrainGroup(role, [FakeHandle(f"{role}-{i}", FakeRank(), aside) for i in range(RANKS)], waits=waits)

    def decode(rows: Sequence[Sequence[int]], **_: Any) -> list[str]:
        with aside():
            return ["" for _ in rows]

    recipe = PPO(kl_coef=0.01) if critic else GRPO(kl_coef=0.01)
    trainer = Trainer(
        policy=ranks("policy"),
        critic=ranks("critic") if critic else None,
        reference=ranks("reference"),
        recipe=recipe,
        kl=recipe.kl_controller(),
        plan=UpdatePlan(minibatches=MINIBATCHES),
    )
    prompts = [
        Prompt(prompt_id=str(n), text="", token_ids=tuple(range(n, n + PROMPT_TOKENS)))
        for n in range(samples // GROUP)
    ]
    pool = RolloutPool(engines, waits=waits)
    pool.start()
    ledger = Ledger(LedgerLimits(per_step=len(prompts), steps=1))
    sampling = SamplingConfig(max_tokens=8 * tokens)
    make = GroupMaker(
        response_sampler(pool, sampling, seed=0),
        Rewarder(FirstBest(), types.SimpleNamespace(batch_decode=decode)),
    )
    producer = Producer(
        make, PromptStream(prompts, seed=0, shuffle=False), ledger, pool, ProducerConfig(samples=GROUP), waits
    )
    stack = contextlib.ExitStack()
    stack.enter_context(spared_collector())  # as a run does when its workers are up
    before, found = _resident(), {}
    mark, aside.seconds = time.process_time(), 0.0

    def lap(name: str) -> None:
        nonlocal mark
        now = time.process_time()
        found[name] = 1e9 * (now - mark - aside.seconds) / total
        mark, aside.seconds = time.process_time(), 0.0

    groups, _ = producer.collect()
    lap("collect")
    found["held"] = (_resident() - before) / total
    trainer.step(groups, 0, PhaseClock())
    lap("train")
    found["peak"] = (1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / total
    begin = time.process_time()
    part = groups[: max(1, len(groups) // 10)]
    saved = sum(tensor.numel() * tensor.element_size() for tensor in pack_groups(part).values())
    share = sum(len(t.token_ids) for group in part for t in group.trajectories)
    found["save"], found["saved"] = 1e9 * (time.process_time() - begin) / share, saved / share
    found["samples"], found["tokens"] = samples, total
    producer.close()
    stack.close()
    return found


def _resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def sharing(ranks: int, *, prompts: int, prompt_tokens: int, minibatches: int) -> dict[str, float]:
    """How often shared prompts are run, and how even the ranks' work is, in tokens and in pairs that attend."""
    draw = random.Random(1)
    lengths = [min(2048, max(8, int(256 * draw.lognormvariate(0.0, 0.8)))) for _ in range(prompts * GROUP)]
    width = prompt_tokens + max(lengths)
    place = torch.arange(width)
    ends = torch.tensor(lengths)[:, None] + prompt_tokens
    owners = torch.arange(prompts).repeat_interleave(GROUP)
    mask = place < ends
    tokens = torch.where(mask, torch.where(place < prompt_tokens, owners[:, None] * 7 + place, 5), 0)
    batch = Batch(token_ids=tokens, attention_mask=mask, response_mask=mask & (place >= prompt_tokens))
    order = torch.randperm(batch.rows, generator=torch.Generator().manual_seed(0)).tolist()
    run, worst_tokens, worst_pairs, begin = 0, 0.0, 0.0, time.process_time()
    for rows in order_in_groups(owners.tolist(), minibatches, order):
        part = batch.select(rows)
        loads, pairs = [], []
        for units in deal_units(part, ranks):
            theirs = [rows[unit] for unit in units]
            shared = len({int(owners[row]) for row in theirs})
            loads.append(shared * prompt_tokens + sum(lengths[row] for row in theirs))
            pairs.append(
                shared * prompt_tokens**2 / 2
                + sum(lengths[row] * (prompt_tokens + lengths[row] / 2) for row in theirs)
            )
        run += sum(loads)
        worst_tokens = max(worst_tokens, ranks * max(loads) / sum(loads))
        worst_pairs = max(worst_pairs, ranks * max(pairs) / sum(pairs))
    return {
        "ranks": ranks,
        "tokens run": run / batch.tokens,
        "imbalance": worst_tokens,
        "imbalance of attention": worst_pairs,
        "seconds": time.process_time() - begin,
    }


def _alone(samples: int, options: dict[str, Any]) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(driver, (samples, options.pop("tokens")), options)


def main() -> None:
    """Measure what was asked for, and print it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=("driver", "sharing"), default=("driver", "sharing"))
    parser.add_argument("--samples", nargs="+", type=int, default=(1000, 10_000))
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a sample, its prompt among them")
    parser.add_argument("--critic", action="store_true", help="PPO in place of GRPO")
    parser.add_argument("--tail", action="store_true", help="samples of unequal lengths")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {"driver": [], "sharing": []}
    if "driver" in given.parts:
        print("samples   tokens      collect   train    save   ns/token   held    peak   saved  bytes/token")
        for samples in given.samples:
            row = _alone(samples, {"tokens": given.tokens, "critic": given.critic, "tail": given.tail})
            found["driver"].append(row)
            print(
                f"{samples:7d}   {row['tokens']:.2e}   {row['collect']:7.1f} {row['train']:7.1f} {row['save']:7.1f}"
                f"            {row['held']:6.1f}  {row['peak']:6.1f}  {row['saved']:6.1f}   "
                f"(peak {row['peak'] * row['tokens'] / GIB:.2f} GiB, "
                f"{(row['collect'] + row['train']) * row['tokens'] / 1e9:.2f} s)"
            )
    if "sharing" in given.parts:
        print("ranks   tokens run   against one rank   imbalance   of attention   seconds")
        for ranks in (1, 2, 8, 64):
            row = sharing(ranks, prompts=512, prompt_tokens=512, minibatches=4)
            found["sharing"].append(row)
            alone = found["sharing"][0]["tokens run"]
            print(
                f"{ranks:5d}   {row['tokens run']:10.3f}   {row['tokens run'] / alone:16.3f}"
                f"   {row['imbalance']:9.3f}   {row['imbalance of attention']:12.3f}   {row['seconds']:7.2f}"
            )
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
