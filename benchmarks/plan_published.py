"""The layouts of the OpenRLHF paper, planned: the fullest GPU of each role, and seconds beside the paper's.

    python benchmarks/plan_published.py            # the table of docs/plan.md, in half a minute
    python benchmarks/plan_published.py --write    # puts it there
    python benchmarks/plan_published.py --search   # what `rlhf plan --search` finds on the same GPUs, in minutes

Needs no weights and no accelerator: models are their configurations alone. PPO on A800s (70B in pairs: on A100s),
1,024 samples a step, prompts and responses of 1,024 tokens, bf16, ZeRO-3, Adam in host memory.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhf_algos import from_mapping
from rlhf_launch import OnlineConfig
from rlhf_launch.planning.command import imagined_hosts, planned
from rlhf_launch.planning.devices import DEVICES
from rlhf_launch.planning.published import PHASES, PROMPT, RESPONSE, RUNS, SAMPLES, PublishedRun
from rlhf_launch.planning.report import RunPlan
from rlhf_launch.planning.search import Searcher, search
from rlhf_launch.planning.search_report import gains

PAGE = Path(__file__).parents[1] / "docs" / "plan.md"
BEGIN, END = "<!-- benchmarks/plan_published.py -->", "<!-- end of the planned layouts -->"
SHAPES = {
    "7B": (4096, 11008, 32, 32, 32),
    "13B": (5120, 13824, 40, 40, 40),
    "34B": (8192, 22016, 48, 64, 8),
    "70B": (8192, 28672, 80, 64, 8),
}
"""Hidden and intermediate size, layers, heads, heads of keys and values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperLayout:
    """One layout: a published run, or the paper's example without seconds."""

    name: str
    run: PublishedRun
    hosts: int
    device: str = "a800"
    pairs: bool = False
    """Policy and reference on the same GPUs, critic and reward too; both frozen models in host memory."""


def layouts() -> list[PaperLayout]:
    """Those of the paper with vLLM beside ZeRO-3."""
    runs = {run.size: run for run in RUNS if run.system == "openrlhf"}
    hosts = {"7B": 2, "13B": 4, "34B": 4, "70B": 4}
    found = [PaperLayout(name=size, run=run, hosts=hosts[size]) for size, run in runs.items()]
    example = replace(runs["70B"], tensor_parallel=2)
    return [*found, PaperLayout(name="70B in pairs", run=example, hosts=2, device="a100", pairs=True)]


def settings(layout: PaperLayout, model: str) -> dict[str, Any]:
    """What a file would hold."""
    run = layout.run
    frozen = {"options": {"offload_parameters": True}} if layout.pairs else {}
    with_policy, with_critic = (
        {"colocate_with": partner} if layout.pairs else {} for partner in ("policy", "critic")
    )
    return {
        "model": model,
        "data": {"train": "prompts.jsonl"},
        "reward": {"model": model},
        "algorithm": {"name": "ppo", "kl_coef": 0.01},
        "lengths": {"max_prompt_tokens": PROMPT},
        "rollout": {
            "backend": "vllm",
            "engines": run.engines,
            "tensor_parallel_size": run.tensor_parallel,
            "samples_per_prompt": 1,
            "sampling": {"max_tokens": RESPONSE},
        },
        "train": {
            "engine": "deepspeed",
            "ranks": run.actor,
            "prompts_per_step": SAMPLES,
            "gradient_checkpointing": True,
            "max_tokens_per_micro_batch": run.micro_batch * (PROMPT + RESPONSE),
            "options": {"offload_optimizer": True},
        },
        "placement": {
            "device": "cuda",
            "executor": "ray",
            "layout": "written",
            "critic": {"ranks": run.critic},
            "reference": {"ranks": run.reference, **with_policy, **frozen},
            "reward": {"model": {"ranks": run.reward, **with_critic, **frozen}},
        },
    }


@contextlib.contextmanager
def configured(layout: PaperLayout) -> Iterator[tuple[OnlineConfig, list[Any]]]:
    """The run of a layout, and hosts for it; its model is a configuration alone."""
    import transformers

    hidden, inner, layers, heads, shared = SHAPES[layout.run.size]
    with tempfile.TemporaryDirectory() as folder:
        transformers.LlamaConfig(
            hidden_size=hidden,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=shared,
            vocab_size=32_000,
        ).save_pretrained(folder)
        config = from_mapping(OnlineConfig, settings(layout, folder), source=layout.name)
        yield config, imagined_hosts(layout.hosts, 8)


def plan(layout: PaperLayout) -> RunPlan:
    """The plan of a layout."""
    with configured(layout) as (config, hosts):
        return planned(config, hosts, device=layout.device)


def searched(layout: PaperLayout) -> list[str]:
    """Rows of a table: the paper's layout, and the best of each grouping on the same GPUs."""
    begin = time.perf_counter()
    with configured(layout) as (config, hosts):
        result = search(Searcher(config, hosts, DEVICES[layout.device]))
    spent = time.perf_counter() - begin
    found = []
    if result.written is not None:
        step = result.written.seconds["step"]
        found.append(f"| {layout.name} | {step.value:,.0f} | the paper's | | |")
    groupings = set()
    for one in result.found:
        if one.candidate.grouping in groupings:
            continue
        groupings.add(one.candidate.grouping)
        less = {} if result.written is None else gains(result.written.seconds, one.plan.seconds)
        reason = ", ".join(f"{name} {-seconds:+,.0f}" for name, seconds in less.items() if abs(seconds) >= 1)
        peak = max(members.peak for members in one.plan.fit.sets) / 2**30
        step = one.plan.seconds["step"].value
        found.append(f"| | {step:,.0f} | {one.candidate.summary} | {peak:.0f} | {reason} |")
    print(f"{layout.name}: {result.tried:,} layouts in {spent:.0f} s", file=sys.stderr)
    return found


def rows(layout: PaperLayout, found: RunPlan) -> tuple[str, str]:
    """A row of the table of memory, and one of that of seconds."""
    run, fit = layout.run, found.fit
    peaks = {role: members.peak for members in fit.sets for role in members.roles}
    ranks = {"policy": run.actor, "critic": run.critic, "reference": run.reference, "reward model": run.reward}
    cells = [f"{peaks[role] / 2**30:.0f} ({count})" for role, count in ranks.items()]
    ways = f" x {run.tensor_parallel}" if run.tensor_parallel > 1 else ""
    cells.append(f"{peaks['rollout'] / 2**30:.0f} ({run.engines}{ways})")
    verdict = "no" if fit.too_large else "perhaps" if fit.close else "yes"
    memory = f"| {layout.name} | {layout.hosts * 8} {layout.device.upper()} | {' | '.join(cells)} | {verdict} |"
    papers = dict(zip(PHASES, run.seconds, strict=True))
    times = []
    for phase in PHASES:
        paper = "-" if layout.pairs else f"{papers[phase]:,.0f}"
        times.append(f"{found.seconds[phase].value:,.0f} / {paper}")
    step = found.seconds["step"]
    paper = "-" if layout.pairs else f"{sum(run.seconds):,.0f}"
    times.append(f"{step.value:,.0f} ({step.low:,.0f} to {step.high:,.0f}) / {paper}")
    return memory, f"| {layout.name} | {' | '.join(times)} |"


def block() -> str:
    """Both tables, as they stand in the page."""
    pairs = [rows(layout, plan(layout)) for layout in layouts()]
    memory = [
        "| layout | GPUs | policy | critic | reference | reward | engines | fits |",
        "|---|---|---|---|---|---|---|---|",
        *(one for one, _ in pairs),
    ]
    seconds = [
        "| planned / paper (s) | generation | weight sync | scoring | training | step |",
        "|---|---|---|---|---|---|",
        *(one for _, one in pairs),
    ]
    return "\n".join([BEGIN, *memory, "", *seconds, END])


def main() -> int:
    """Print the tables, or put them into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put them into docs/plan.md")
    parser.add_argument("--search", action="store_true", help="search layouts instead")
    args = parser.parse_args()
    if args.search:
        print("| size | step (s) | layout | fullest GPU (GiB) | seconds of phases against the paper's |")
        print("|---|---|---|---|---|")
        for layout in layouts():
            print(*([] if layout.pairs else searched(layout)), sep="\n", flush=True)
        return 0
    found = block()
    if not args.write:
        print(found)
        return 0
    text = PAGE.read_text()
    begin, end = text.index(BEGIN), text.index(END) + len(END)
    PAGE.write_text(text[:begin] + found + text[end:])
    return 0


if __name__ == "__main__":
    sys.exit(main())
