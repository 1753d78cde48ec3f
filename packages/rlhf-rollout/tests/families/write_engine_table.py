"""Every family that vLLM might run on a CPU, before and after weight syncs; writes its part of docs/families.md.

    python packages/rlhf-rollout/tests/families/write_engine_table.py docs/families.md [type ...]

Exits with 1 if log-probs of a family are wrong, in words and with the type's name. With types named, nothing is
written.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

from engine_families import FAMILIES, SYNCS, SYNCS_OF_EXPERTS, TOLERANCE, Verdict, judge

HEADING = "## vLLM: weights after a sync"
INTRODUCTION = """{heading}

vLLM {version} on a CPU serves a tiny random float32 model of each type. Its weights are changed in a Transformers
model and sent, {few} times for dense models and {many} for mixtures of experts. The table gives the largest
difference between the engine's log-probs of 96 tokens that it samples and those of the Transformers model (with
`eager` attention), in nats: as loaded, after the first sync, and the largest after any. Before each sync it is more
than {unsynced:g}.

- `equal`: all are at most {tolerance:g}.
- `declined`: vLLM does not start with the type on a CPU, and says why.
- `refused`: the sync ends with an error that names the weights.

"""


def row(kind: str, verdict: Verdict) -> str:
    """A line of the table."""
    reason = " ".join(verdict.reason.split()).replace("|", "/").removeprefix("the vLLM engine did not start: ")
    if verdict.outcome != "equal":
        return f"| {kind} | {verdict.outcome}: {reason} | | | | |"
    gaps = [verdict.before, verdict.after[0], max(verdict.after)]
    return f"| {kind} | equal | {' | '.join(f'{gap:.0e}' for gap in gaps)} | {len(verdict.after)} |"


def judged(kind: str) -> Verdict:
    """The verdict on a type; a crash of the test counts as wrong."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return judge(kind, Path(folder))
        except Exception as error:
            return Verdict(outcome="wrong", reason=f"{type(error).__name__}: {error}")


def section(rows: list[str], counts: Counter[str]) -> str:
    """This suite's part of the page."""
    import vllm

    introduction = INTRODUCTION.format(
        heading=HEADING,
        version=vllm.__version__,
        few=SYNCS,
        many=SYNCS_OF_EXPERTS,
        tolerance=TOLERANCE,
        unsynced=10 * TOLERANCE,
    )
    outcomes = ("equal", "declined", "refused", "wrong")
    lines = [f"| {' | '.join(outcomes)} |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(str(counts[outcome]) for outcome in outcomes)} |", ""]
    lines += ["| type | outcome | as loaded | first sync | any sync | syncs |", "|---|---|---|---|---|---|", *rows]
    return introduction + "\n".join(lines) + "\n"


def main(file: str, *kinds: str) -> int:
    """Run all types, or those named; the exit code."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    rows, counts, wrong = [], Counter[str](), []
    for kind in FAMILIES:
        if kinds and kind not in kinds:
            continue
        start = time.monotonic()
        verdict = judged(kind)
        counts[verdict.outcome] += 1
        if verdict.outcome == "wrong":
            wrong.append(f"{kind} in vLLM: {verdict.reason}")
        rows.append(row(kind, verdict))
        print(f"{rows[-1]} {time.monotonic() - start:.1f} s", flush=True)
    if not kinds:
        page = Path(file).read_text().partition(HEADING)[0].rstrip()
        Path(file).write_text(f"{page}\n\n{section(rows, counts)}")
    print("\n".join(wrong) or "none wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
