"""Programs a second that a code reward judges in a sandbox, against a bound of 20.

    python benchmarks/sandbox.py --workers 2

Three forms of tests: calls (one process a program), texts (one for each), and Python that runs in a sandbox of its
own (two). Processor time is what a machine with other work can compare.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import time
from typing import Any

from rlhf_core import Trajectory
from rlhf_rollout import CodeReward, CodeRewardConfig

BOUND = 20.0
PROGRAM = "```python\ndef double(x):\n    return 2 * x\n{end}\n```"
FORMS: dict[str, tuple[Any, str]] = {
    "calls": ("assert double(2) == 4\nassert double('a') == 'aa'", ""),
    "texts": ([{"input": "2\n", "output": "4"}], "print(double(int(input())))"),
    "source": ("import math\nfor i in range(10):\n    assert math.isclose(double(i), i + i)", ""),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sandbox", default="bubblewrap")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--programs", type=int, default=60)
    arguments = parser.parse_args()
    reward = CodeReward(CodeRewardConfig(sandbox=arguments.sandbox, workers=arguments.workers))
    samples = [sample(number) for number in range(arguments.programs)]
    for form, (tests, end) in FORMS.items():
        rows = [one(tests) for one in samples]
        texts = [PROGRAM.format(end=end)] * len(rows)
        before, began = used(), time.monotonic()
        scores = asyncio.run(reward.score(rows, texts))
        seconds, processor = time.monotonic() - began, used() - before
        assert all(score.value == 1 for score in scores)
        rate = len(rows) / seconds
        print(
            f"{form}: {rate:.1f} programs/s with {arguments.workers} workers ({rate / BOUND:.1f} of the bound of "
            f"{BOUND:g}), {1000 * processor / len(rows):.0f} ms of processor time each: "
            f"{2 * len(rows) / processor:.0f} a second on two free cores"
        )
    reward.close()


def sample(number: int) -> Any:
    return lambda tests: Trajectory(
        sample_id=f"s{number}",
        group_id="g",
        token_ids=(0, 1),
        response_mask=(False, True),
        rollout_log_probs=(0.0, 0.0),
        weight_versions=(-1, 0),
        metadata={"tests": tests},
    )


def used() -> float:
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


if __name__ == "__main__":
    main()
