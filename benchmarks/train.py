"""One PPO update of rlhf-train on rows of unequal length: packed and balanced against padded, in one run.

    python benchmarks/train.py                                # built-in lengths
    python benchmarks/train.py --data pairs.jsonl             # lengths of the columns prompt and chosen
    python benchmarks/train.py --samples-per-prompt 8         # groups that share their prompt

An update scores old log-probs and values, then takes a step of the policy (clipped objective) and of the critic.
Every case runs in a process of its own, one rank, one thread, float32, on the same weights and rows:

- `padded`: micro-batches of a fixed number of rows in the order they arrive, each padded to its longest row.
- `sorted`: padded too, but rows of like length together, as many as a budget of padded tokens allows.
- `packed`: the default. Rows run unpadded and prompts that rows share run once.

Times are CPU seconds, so that other work on the machine counts less, and the first update is left out. Tokens are
those of the data, padding not counted. `fixed` is what no cut changes: the seconds of both steps on a single row of
two tokens, so the optimizers and the calls around them. Peak memory is the highest resident memory during an
update, above that of the process before its engines. The last table needs no model: how much longer the slowest of
several ranks has to work than their mean, rows dealt as they arrive and as rlhf-launch deals them. The exit code is
1 if `packed` is not `--target` times as fast as `padded`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CASES = ("padded", "sorted", "packed")
QUANTILES = (0, 5, 10, 25, 50, 75, 90, 95, 99, 100)
PROMPT = (7, 11, 14, 26, 83, 149, 249, 310, 500, 791)
RESPONSE = (1, 6, 8, 14, 26, 50, 84, 112, 181, 257)
"""Words and punctuation marks of prompts and answers in the test split of hh-rlhf's harmless-base, at QUANTILES."""


def drawn(quantiles: tuple[int, ...], rng: random.Random) -> int:
    """A length between two neighbouring quantiles."""
    at = rng.uniform(0, 100)
    place = next(i for i in range(1, len(QUANTILES)) if at <= QUANTILES[i])
    share = (at - QUANTILES[place - 1]) / (QUANTILES[place] - QUANTILES[place - 1])
    return max(1, round(quantiles[place - 1] + share * (quantiles[place] - quantiles[place - 1])))


def read_lengths(path: Path | None, count: int, seed: int) -> list[tuple[int, int]]:
    """(prompt, response) lengths of `count` rows."""
    rng = random.Random(seed)
    if path is None:
        return [(drawn(PROMPT, rng), drawn(RESPONSE, rng)) for _ in range(count)]
    words = re.compile(r"\w+|[^\w\s]")
    with path.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    picked = rng.sample(rows, min(count, len(rows)))
    return [tuple(max(1, len(words.findall(row[name]))) for name in ("prompt", "chosen")) for row in picked]  # type: ignore


def make_batch(lengths: list[tuple[int, int]], samples: int, vocab: int, seed: int) -> Any:
    """Random tokens; every `samples` consecutive rows have the same prompt and their own response length."""
    import torch
    from rlhf_core import Batch, pad_rows

    rng = random.Random(seed)
    ids, answers = [], []
    prompt: list[int] = []
    for row, (before, after) in enumerate(lengths):
        if row % samples == 0:
            prompt = [rng.randrange(5, vocab) for _ in range(before)]
        ids.append([*prompt, *(rng.randrange(5, vocab) for _ in range(after))])
        answers.append([False] * len(prompt) + [True] * after)
    tokens = pad_rows(ids, value=0, dtype=torch.long)
    noise = torch.Generator().manual_seed(seed)
    return Batch(
        token_ids=tokens,
        attention_mask=pad_rows([[True] * len(row) for row in ids], value=False, dtype=torch.bool),
        response_mask=pad_rows(answers, value=False, dtype=torch.bool),
        columns={
            "advantages": torch.randn(tokens.shape, generator=noise),
            "returns": torch.randn(tokens.shape, generator=noise),
        },
    )


def policy_loss(outputs: Any, batch: Any, config: Any) -> Any:
    """The clipped objective of PPO."""
    import torch
    from rlhf_core import LossTerms

    ratio = (outputs.log_probs - batch["old_log_probs"]).exp()
    gain = torch.minimum(ratio * batch["advantages"], ratio.clamp(0.8, 1.2) * batch["advantages"])
    return LossTerms(
        total=-gain.masked_fill(~batch.response_mask, 0).sum(), weight=batch.response_mask.sum().float()
    )


def value_loss(outputs: Any, batch: Any, config: Any) -> Any:
    """Squared error of the values."""
    from rlhf_core import LossTerms

    error = (outputs.values - batch["returns"]).square()
    return LossTerms(
        total=error.masked_fill(~batch.response_mask, 0).sum(), weight=batch.response_mask.sum().float()
    )


def run_case(args: argparse.Namespace) -> dict[str, Any]:
    """Updates of one case in this process."""
    from dataclasses import replace

    from rlhf_core import EngineConfig, Loss, OptimizerConfig
    from rlhf_train import DeepSpeedEngine

    batch = make_batch(args.lengths, args.samples_per_prompt, args.vocab, args.seed)
    by_rows = args.case == "padded"
    if by_rows:
        batch = replace(batch, rows_per_unit=args.micro_rows)
    start = resident("VmRSS")
    engines = {
        role: DeepSpeedEngine(
            EngineConfig(
                model=str(args.model),
                role=role,
                optimizer=OptimizerConfig(),
                max_tokens_per_micro_batch=1 if by_rows else args.max_tokens,
                seed=args.seed,
                packing=args.case == "packed",
                options={"stage": args.stage},
            )
        )
        for role in ("policy", "critic")
    }
    if engines["policy"].packing != (args.case == "packed"):
        raise SystemExit("the model cannot run packed rows")
    seconds, losses = [], []
    for _ in range(args.updates + 1):
        begin = time.process_time()
        ready = batch.with_columns(old_log_probs=engines["policy"].score(batch).log_probs)
        engines["critic"].score(ready, ("values",))
        losses.append(engines["policy"].step(ready, Loss(function=policy_loss)).loss)
        engines["critic"].step(ready, Loss(function=value_loss, outputs=("values",)))
        seconds.append(time.process_time() - begin)
    fixed = [fixed_seconds(engines, ready) for _ in range(3)]
    peaks = [peak for engine in engines.values() for peak in engine.memory_report().peaks.values()]
    return {
        "seconds": statistics.median(seconds[1:]),
        "fixed": statistics.median(fixed),
        "tokens": batch.tokens,
        "peak_bytes": max(peaks) - start,
        "first_loss": losses[0],
    }


def fixed_seconds(engines: dict[str, Any], batch: Any) -> float:
    """CPU seconds of a step of both engines on two tokens."""
    from dataclasses import replace

    import torch
    from rlhf_core import Loss

    begin = time.process_time()
    tiny = replace(
        batch,
        token_ids=batch.token_ids[:1, :2],
        attention_mask=torch.ones(1, 2, dtype=torch.bool),
        response_mask=torch.tensor([[False, True]]),
        columns={name: column[:1, :2] for name, column in batch.columns.items()},
        rows_per_unit=1,
    )
    engines["policy"].step(tiny, Loss(function=policy_loss))
    engines["critic"].step(tiny, Loss(function=value_loss, outputs=("values",)))
    return time.process_time() - begin


def resident(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def save_model(path: Path, args: argparse.Namespace) -> None:
    """A random Qwen2 of the size asked for."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(args.seed)
    config = Qwen2Config(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        pad_token_id=0,
    )
    Qwen2ForCausalLM(config).save_pretrained(path)


def measure(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """All cases, each in a process of its own."""
    found = {}
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), args)
        for case in CASES:
            command = [sys.executable, __file__, *sys.argv[1:], "--case", case, "--model", folder]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{case} failed:\n{done.stderr[-3000:]}")
            found[case] = json.loads(done.stdout.splitlines()[-1])
    return found


def print_balance(lengths: list[tuple[int, int]]) -> None:
    """Longest over mean load of several ranks."""
    from rlhf_core import deal

    totals = [before + after for before, after in lengths]
    print(f"\n{'ranks':>6} {'as they come':>14} {'dealt':>8}   slowest rank over mean, in tokens")
    for ranks in (2, 4, 8, 16):
        if len(totals) < ranks:
            continue
        even = [len(totals) * rank // ranks for rank in range(ranks + 1)]
        arrival = [range(first, last) for first, last in itertools.pairwise(even)]
        loads = [
            max(sum(totals[unit] for unit in units) for units in dealt) * ranks / sum(totals)
            for dealt in (arrival, deal(totals, ranks, even=True))
        ]
        print(f"{ranks:>6} {loads[0]:>14.3f} {loads[1]:>8.3f}")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="JSONL file with the text columns prompt and chosen")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--samples-per-prompt", type=int, default=1)
    parser.add_argument("--micro-rows", type=int, default=8, help="rows per micro-batch of `padded`")
    parser.add_argument("--max-tokens", type=int, default=4096, help="tokens per micro-batch of the other cases")
    parser.add_argument("--updates", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", type=float, default=2.0)
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rows % args.micro_rows or args.rows % args.samples_per_prompt:
        parser.error("--rows must be a multiple of --micro-rows and of --samples-per-prompt")
    args.lengths = read_lengths(args.data, args.rows, args.seed)
    if len(args.lengths) < args.rows:
        parser.error(f"--data has only {len(args.lengths)} rows, --rows asks for {args.rows}")
    return args


def main() -> None:
    """Print the cases and their ratios."""
    args = parse()
    if args.case is not None:
        print(json.dumps(run_case(args)))
        return
    found = measure(args)
    print(f"{'case':>8} {'seconds':>9} {'tokens/s':>9} {'fixed':>7} {'peak MiB':>9} {'speed':>7} {'memory':>7}")
    padded = found["padded"]
    for case, one in found.items():
        print(
            f"{case:>8} {one['seconds']:>9.2f} {one['tokens'] / one['seconds']:>9.0f} {one['fixed']:>7.2f} "
            f"{one['peak_bytes'] / 2**20:>9.0f} {padded['seconds'] / one['seconds']:>6.2f}x "
            f"{one['peak_bytes'] / padded['peak_bytes']:>6.2f}x"
        )
    losses = [one["first_loss"] for one in found.values()]
    print(f"first policy losses differ by {max(losses) - min(losses):.1e}; {padded['tokens']} tokens per update")
    print_balance(args.lengths)
    speed = padded["seconds"] / found["packed"]["seconds"]
    print(f"\npacked is {speed:.2f}x as fast as padded (target {args.target:g}x)")
    sys.exit(0 if speed >= args.target else 1)


if __name__ == "__main__":
    main()
