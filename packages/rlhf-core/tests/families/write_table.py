"""Every model type that Transformers builds from a tiny config, tried here; writes docs/families.md.

    python packages/rlhf-core/tests/families/write_table.py docs/families.md [type ...]

Exits with 1 if the numbers of a type are wrong, in words and with the type's name. With types named, nothing is
written.
"""

from __future__ import annotations

import logging
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import transformers
from family_models import NotBuiltError, model_types, tiny_model
from family_verdicts import Verdict, judge

INTRODUCTION = """# Model families

Written by `nox -s families`, which makes a tiny random float32 model of every type that Transformers {version}
builds from a config, runs rows of unequal length through it, padded and packed with shared prompts, and compares
log-probs, entropies and gradients with the full logits of the model itself, one row at a time, with `eager`
attention. Where the type has a sliding window it is 4 tokens and the rows are longer; soft caps are 2.

- `equal`: the largest difference of log-probs and entropies in nats (of scores and values as they are), and that of
  gradients relative to the largest entry, are below {tolerance:g}; the table gives both.
- `declined`: rows run padded, and the engine says why when it loads the model.
- `refused`: the engine refuses the model by name when it loads it.

`own head`: the model's own code makes logits or scores of the hidden states, as it does more than a linear layer, a
factor and a soft cap. No type gives numbers other than its own without a word.

"""
ENGINES = "## vLLM: weights after a sync"
"""Where the part of the page begins that rlhf-rollout's suite writes; it is kept."""


def judged(kind: str, role: str) -> tuple[Verdict, Verdict] | str:
    """Padded and packed; or why there is no model of that type."""
    try:
        model = tiny_model(kind, scalar=role in ("critic", "reward"))
    except NotBuiltError as error:
        return str(error)
    try:
        return judge(model, role, packing=False), judge(model, role, packing=True)
    except Exception as error:
        crash = Verdict(outcome="wrong", reason=f"{type(error).__name__}: {error}")
        return crash, crash


def cell(verdict: Verdict) -> str:
    """The outcome in the table."""
    reason = verdict.reason.split(" cannot be used as ")[-1].split(". Its numbers here")[0].replace("|", "/")
    reason = reason.split(": ", 1)[-1] if verdict.outcome == "refused" else reason
    reason = " ".join(reason.split())
    if verdict.outcome != "equal":
        return f"{verdict.outcome}: {reason}"
    gradient = verdict.differences.get("gradient")
    outputs = max(value for name, value in verdict.differences.items() if name != "gradient")
    own = ", own head" if verdict.own_head else ""
    return f"equal ({outputs:.0e}, {'no gradient' if gradient is None else f'{gradient:.0e}'}){own}"


def section(title: str, role: str, kinds: Iterable[str], wrong: list[str]) -> list[str]:
    """A heading, counts and a table for one role."""
    counts = {"padded": Counter[str](), "packed": Counter[str]()}
    lines, missing = [], []
    for kind in kinds:
        start = time.monotonic()
        found = judged(kind, role)
        if isinstance(found, str):
            missing.append(f"`{kind}` ({' '.join(found.split())})")
            continue
        for name, verdict in zip(counts, found, strict=True):
            counts[name][verdict.outcome] += 1
            if verdict.outcome == "wrong":
                wrong.append(f"{kind} as {role}, {name}: {verdict.reason}")
        lines.append(f"| {kind} | {cell(found[0])} | {cell(found[1])} |")
        print(f"{role:9} {lines[-1]} {time.monotonic() - start:.1f} s", flush=True)
    table = [f"## {title}", "", "| rows | equal | declined | refused | wrong |", "|---|---|---|---|---|"]
    for name, outcomes in counts.items():
        of = [str(outcomes[outcome]) for outcome in ("equal", "declined", "refused", "wrong")]
        table.append(f"| {name} | {' | '.join(of)} |")
    table += ["", "| type | padded | packed |", "|---|---|---|", *lines, ""]
    if missing:
        table += [f"Not built from a config alone ({len(missing)}): {', '.join(missing)}.", ""]
    return table


def main(file: str, *kinds: str) -> int:
    """Run all types, or those named; the exit code."""
    from family_verdicts import TOLERANCE

    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)
    transformers.logging.set_verbosity_error()
    wrong: list[str] = []
    scalar = model_types(scalar=True)
    lines = [
        *section("Policies, references and teachers", "policy", kinds or model_types(), wrong),
        *section("Critics", "critic", [kind for kind in scalar if not kinds or kind in kinds], wrong),
        *section("Reward models", "reward", [kind for kind in scalar if not kinds or kind in kinds], wrong),
    ]
    if not kinds:
        text = INTRODUCTION.format(version=transformers.__version__, tolerance=TOLERANCE) + "\n".join(lines)
        kept = "".join(Path(file).read_text().partition(ENGINES)[1:])
        Path(file).write_text(f"{text.rstrip()}\n\n{kept}".rstrip() + "\n")
    print("\n".join(wrong) or "none wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
