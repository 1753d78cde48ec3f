"""What the controller costs per group, from a thousand to a hundred thousand groups in a step: a constant, or more?

    python benchmarks/controller_growth.py                       # about a minute
    python benchmarks/controller_growth.py --sizes 1000 8000 --json growth.json

The ledger, the producer and the making of groups are the run's own, on the producer's own thread. Sampling costs
nothing: samples come back one after the other, in an order by chance, once all prompts that the ledger has room for
are under way. With `--staleness` further steps' worth of groups are in flight beside those of the step.

All times are processor time, so that other work on the machine does not count. `us/group` is what was spent from
the first start to the last step over the groups that were handed over; `us/save` the time for the producer's state
and its tensors over the groups that wait. Neither has the time of Python's garbage collector in it, which is
`us/gc` for each group: it looks through whatever is alive, again and again. `ratio` is the cost at the largest size
over the cost at the smallest: 1 for a controller that is linear in the number of groups.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import time
import types
from pathlib import Path

from rlhf_core import LogProbMeaning, Score, Trajectory
from rlhf_launch import (
    GroupMaker,
    Ledger,
    LedgerLimits,
    Producer,
    ProducerConfig,
    Prompt,
    PromptStream,
    Rewarder,
    pack_groups,
)

TOKENS = 16


class Sampler:
    """Holds what it was asked for until `held` prompts are there, then gives it back in an order by chance."""

    def __init__(self, held: int) -> None:
        self.chance = random.Random(held)
        self.held = held
        self._asked: list[asyncio.Future[None]] = []

    async def __call__(self, prompt: Prompt, label: str, samples: int) -> list[Trajectory]:
        turn = asyncio.get_running_loop().create_future()
        self._asked.append(turn)
        if len(self._asked) >= self.held:
            asked, self._asked = self._asked, []
            self.chance.shuffle(asked)
            for other in asked:
                other.set_result(None)
        await turn
        return [sample(prompt, f"{label}/{index}", label) for index in range(samples)]


def sample(prompt: Prompt, name: str, group: str) -> Trajectory:
    size = len(prompt.token_ids)
    return Trajectory(
        sample_id=name,
        group_id=group,
        token_ids=prompt.token_ids + (7,) * TOKENS,
        response_mask=(False,) * size + (True,) * TOKENS,
        rollout_log_probs=(0.0,) * size + (-1.0,) * TOKENS,
        weight_versions=(-1,) * size + (0,) * TOKENS,
        meaning=LogProbMeaning(temperature=1.0),
    )


class Reward:
    async def score(self, trajectories, texts):
        return [Score(value=float(index % 2)) for index in range(len(trajectories))]


class Engines:
    def pause(self) -> None:
        pass

    resume = pause


class CollectorTime:
    """Seconds of processor time that the garbage collector took."""

    def __init__(self) -> None:
        self.seconds, self._begin = 0.0, 0.0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, info: object) -> None:
        if phase == "start":
            self._begin = time.process_time()
        else:
            self.seconds += time.process_time() - self._begin


def measure(size: int, *, steps: int, staleness: int, samples: int, collector: CollectorTime) -> dict[str, float]:
    """Microseconds per group of `steps` steps of `size` groups, and of a save while a step's worth waits."""
    prompts = [Prompt(prompt_id=str(n), text=str(n), token_ids=(5, 6)) for n in range(4 * size)]
    tokenizer = types.SimpleNamespace(batch_decode=lambda rows, **_: ["" for _ in rows])
    ledger = Ledger(LedgerLimits(per_step=size, steps=steps, max_staleness=staleness))
    producer = Producer(
        GroupMaker(Sampler(held=size), Rewarder(Reward(), tokenizer)),
        PromptStream(prompts, seed=0),
        ledger,
        Engines(),
        ProducerConfig(samples=samples, during_training="run" if staleness else "rest"),
    )
    most, groups = 0, []
    try:
        collected, begin = collector.seconds, time.process_time()
        for step in range(steps):
            groups, _ = producer.collect()
            most = max(most, ledger.unfinished + ledger.waiting + len(groups))
            producer.resume(step + 1)
        spent = time.process_time() - begin
        collected = collector.seconds - collected
        for position, group in enumerate(groups):
            ledger.start(-1 - position)
            ledger.finish(-1 - position, group)
        while_saving, begin = collector.seconds, time.process_time()
        state, saved = producer.state()
        json.dumps(state)
        pack_groups(saved)
        save = time.process_time() - begin - (collector.seconds - while_saving)
    finally:
        producer.close()
    return {
        "groups": size,
        "in_flight": most,
        "us_group": (spent - collected) / steps / size * 1e6,
        "us_gc": collected / steps / size * 1e6,
        "us_save": save / size * 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--total", type=int, default=60_000, help="groups handed over at each size, about")
    parser.add_argument("--samples", type=int, default=2, help="samples of a group")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    collector = CollectorTime()
    measure(1000, steps=3, staleness=0, samples=options.samples, collector=collector)  # imports, first allocations
    gc.collect()
    gc.freeze()
    columns, tables = ("us_group", "us_gc", "us_save"), {}
    for staleness in options.staleness:
        print(f"max_staleness {staleness}")
        print(f"{'groups/step':>12} {'in flight':>10} {'us/group':>9} {'us/gc':>8} {'us/save':>8}")
        rows = tables[staleness] = []
        for size in options.sizes:
            steps = max(2, options.total // size)
            row = measure(size, steps=steps, staleness=staleness, samples=options.samples, collector=collector)
            rows.append(row)
            numbers = " ".join(f"{row[name]:>8.1f}" for name in columns)
            print(f"{size:>12,} {row['in_flight']:>10,}  {numbers}", flush=True)
            gc.collect()
        ratios = " ".join(f"{rows[-1][name] / rows[0][name]:>7.2f}x" for name in columns)
        print(f"{'ratio':>12} {'':>10}  {ratios}\n", flush=True)
    if options.json:
        options.json.write_text(json.dumps(tables, indent=1))


if __name__ == "__main__":
    main()
