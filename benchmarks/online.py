"""A GRPO step against TRL's: seconds, phases, idle time of each role, and the share of what the machine could do.

    python benchmarks/online.py                                  # a small random model
    python benchmarks/online.py --model DIR --steps 2            # a real one, float32
    python benchmarks/online.py --model DIR --data prompts.jsonl --peer none

Both have the same model, prompts, reward, samples and lengths (every response has `--new-tokens` tokens), one
optimizer step per batch, no KL, float32, and all cores of this machine. Each runs in processes of its own, in turns
(`--rounds`); the first step of a turn is left out. `ours` is the whole stack: Ray, a vLLM engine, ZeRO-3 ranks,
weights by the run's own link, verified. `trl` is TRL's GRPOTrainer with generation by Transformers, as it comes for
a CPU.

The bound is the time of the step's matrix products alone, at the speed of such products measured here in the same
run: prompts run once for all samples of theirs, in generation and in the update, nothing computed twice, no
attention scores, nothing element-wise. `--json` writes all numbers to a file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PHASES = ("rollout", "reward", "score", "train", "sync")
LEARNING_RATE = 1e-6
NAMES = ("Ann", "Ben", "Carla", "Deniz", "Emil", "Fatima", "Goran", "Hana")
THINGS = ("apples", "books", "coins", "marbles", "pencils", "stamps")


def share_of_digits(completions: list[Any], **_: object) -> list[float]:
    """A reward that costs nothing and differs between samples."""
    return [sum(c.isdigit() for c in str(text)) / max(1, len(str(text))) for text in completions]


def made_prompts(count: int) -> list[str]:
    """Sums in words, of about the length of those of a school book."""
    made = []
    for number in range(count):
        name, other = NAMES[number % 8], NAMES[(number * 3 + 1) % 8]
        thing, many, more = THINGS[number % 6], 3 + number * 7 % 60, 2 + number * 11 % 40
        made.append(
            f"{name} has {many} {thing}. On Monday {other} gives {name} {more} more, and on Tuesday {name} finds "
            f"as many {thing} on the way home as {other} gave on Monday. Half of all {thing} are put into a box "
            f"that stays closed. How many {thing} are not in the box? Think step by step, then give the number. "
        )
    return made


# ------------------------------------------------------------ ours


def run_ours(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Some steps of `rlhf train`."""
    from rlhf_algos import from_mapping
    from rlhf_launch import OnlineConfig, train

    settings = {
        "model": {"path": str(work / "model"), "dtype": "float32"},
        "data": {"train": str(work / "prompts.jsonl"), "shuffle": False},
        "lengths": {"max_prompt_tokens": options.prompt_tokens},
        "reward": {"function": "online:share_of_digits"},
        "algorithm": {"name": "grpo", "kl_coef": 0.0, "report_entropy": options.entropy},
        "rollout": {
            "samples_per_prompt": options.samples,
            "max_num_seqs": options.prompts * options.samples,
            "sampling": {"max_tokens": options.new_tokens, "min_tokens": options.new_tokens},
        },
        "train": {
            "prompts_per_step": options.prompts,
            "steps": options.steps + 1,
            "ranks": options.ranks,
            "optimizer": {"learning_rate": LEARNING_RATE},
            **({"max_tokens_per_micro_batch": options.micro_batch} if options.micro_batch else {}),
        },
        "checkpoint": {"every": 0},
        "placement": {"executor": "ray", "device": "cpu"},
        "output": str(work / "run"),
        "tensorboard": False,
    }
    if options.threads:
        settings["rollout"]["options"] = {"cpu_threads": options.threads}
    train(from_mapping(OnlineConfig, settings, source="benchmark"), overwrite=True)
    lines = (work / "run" / "metrics.jsonl").read_text().splitlines()
    return {"rows": [row for row in map(json.loads, lines) if "seconds/step" in row][1:]}


# ------------------------------------------------------------ TRL


def run_trl(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Some steps of TRL's GRPOTrainer."""
    import datasets
    import transformers
    import trl

    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    clock: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            clock.append(time.perf_counter())

        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            clock.append(time.perf_counter())

    rows = [json.loads(line) for line in (work / "prompts.jsonl").read_text().splitlines()]
    settings = trl.GRPOConfig(
        output_dir=str(work / "trl"),
        per_device_train_batch_size=options.samples,
        gradient_accumulation_steps=options.prompts,
        num_generations=options.samples,
        max_completion_length=options.new_tokens,
        generation_kwargs={"min_new_tokens": options.new_tokens},
        max_steps=options.steps + 1,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        beta=0.0,
        shuffle_dataset=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(work / "model", padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    trainer = trl.GRPOTrainer(
        model=str(work / "model"),
        reward_funcs=share_of_digits,
        args=settings,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    trainer.train()
    lengths = [entry["completions/mean_length"] for entry in trainer.state.log_history if "loss" in entry]
    steps = [end - begin for begin, end in itertools.pairwise(clock)]
    pairs = list(zip(steps, lengths, strict=True))[1:]
    return {"rows": [{"seconds/step": seconds, "response_length": length} for seconds, length in pairs]}


# ------------------------------------------------------------ the bound


def matrix_speed(_: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Float32 operations per second of products of the model's shapes, on all cores; the best of a few."""
    import torch

    shapes = model_shapes(work / "model")
    size, inner = shapes["hidden"], shapes["inner"]
    left, right = torch.randn(1024, size), torch.randn(size, inner)
    best = 0.0
    for _turn in range(5):
        begin, count = time.perf_counter(), 0
        while time.perf_counter() - begin < 0.5:
            torch.mm(left, right)
            count += 1
        best = max(best, count * 2 * 1024 * size * inner / (time.perf_counter() - begin))
    return {"flops_per_second": best, "threads": torch.get_num_threads(), **shapes}


def model_shapes(model: Path) -> dict[str, int]:
    """Weights in matrix products by what they are for."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model)
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config)
    head = config.vocab_size * config.hidden_size
    layers = sum(
        module.weight.numel() for name, module in made.named_modules() if isinstance(module, torch.nn.Linear)
    )
    if made.get_output_embeddings() is not None:
        layers -= head
    return {"layers": layers, "head": head, "hidden": config.hidden_size, "inner": config.intermediate_size}


def step_operations(options: argparse.Namespace, shapes: dict[str, int], prompt_tokens: float) -> dict[str, float]:
    """Floating-point operations of the matrix products of one step, by phase."""
    prompts = options.prompts * prompt_tokens
    sampled = options.prompts * options.samples * options.new_tokens
    return {
        "rollout": 2.0 * shapes["layers"] * (prompts + sampled) + 2.0 * shapes["head"] * sampled,
        "train": 6.0 * shapes["layers"] * (prompts + sampled) + 6.0 * shapes["head"] * sampled,
    }


# ------------------------------------------------------------ the run


PARTS = {"ours": run_ours, "trl": run_trl, "speed": matrix_speed}


def in_its_own_process(name: str, options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """What a part measured, in a process with all cores."""
    result = work / f"{name}.json"
    result.unlink(missing_ok=True)
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command = [sys.executable, __file__, *sys.argv[1:], "--part", name, "--work", str(work)]
    log = (work / f"{name}.log").open("w")
    done = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False)
    if done.returncode or not result.exists():
        sys.exit(f"{name} failed:\n" + "\n".join((work / f"{name}.log").read_text().splitlines()[-30:]))
    return json.loads(result.read_text())


def prepare(options: argparse.Namespace, work: Path) -> float:
    """Put the model and the prompts into the work folder; returns the mean tokens of a prompt."""
    from rlhf_core.testing.tiny import save_tiny_model
    from transformers import AutoTokenizer

    if options.model is None:
        save_tiny_model(work / "model", hidden_size=256, layers=6)
    else:
        (work / "model").symlink_to(options.model.resolve())
    if options.data is None:
        texts = made_prompts(max(64, options.prompts * (options.steps + 1)))
    else:
        texts = [json.loads(line)["prompt"] for line in options.data.read_text().splitlines() if line]
    (work / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    tokenizer = AutoTokenizer.from_pretrained(work / "model")
    lengths = [len(tokenizer(text)["input_ids"]) for text in texts]
    options.prompt_tokens = max(lengths)
    return statistics.fmean(lengths[: options.prompts * (options.steps + 1)])


def mean_of(rows: list[dict[str, float]], name: str) -> float:
    """Mean over all measured steps; 0 for what was not measured."""
    return statistics.fmean(row.get(name, 0.0) for row in rows)


def print_tables(found: dict[str, list[dict[str, float]]], bound: dict[str, float], speed: float) -> None:
    """Seconds by phase beside the bound, the ratio of the trainers, idle seconds by role."""
    print(f"\nmatrix products of the model's shapes: {speed / 1e9:.0f} GFLOP/s on all cores")
    print(f"{'':<8}" + "".join(f"{name:>10}" for name in ("step", *PHASES)) + f"{'tokens':>9}")
    for name, rows in found.items():
        seconds = [mean_of(rows, f"seconds/{phase}") for phase in ("step", *PHASES)]
        shown = "".join(f"{value:>10.2f}" if value else f"{'-':>10}" for value in seconds)
        print(f"{name:<8}{shown}{mean_of(rows, 'response_length'):>9.1f}")
    limits = [sum(bound.values()), *(bound.get(phase, 0.0) for phase in PHASES)]
    print(f"{'bound':<8}" + "".join(f"{value:>10.2f}" if value else f"{'-':>10}" for value in limits))
    ours = found["ours"]
    shares = {phase: bound[phase] / mean_of(ours, f"seconds/{phase}") for phase in bound}
    whole = sum(bound.values()) / mean_of(ours, "seconds/step")
    print(f"ours reaches {whole:.0%} of the bound: " + ", ".join(f"{name} {s:.0%}" for name, s in shares.items()))
    if "trl" in found:
        ratio = mean_of(found["trl"], "seconds/step") / mean_of(ours, "seconds/step")
        print(f"ours against trl: {ratio:.2f} times as fast")
    idle = sorted({name for row in ours for name in row if name.startswith("idle_seconds/")})
    shown = ", ".join(f"{name.removeprefix('idle_seconds/')} {mean_of(ours, name):.2f}" for name in idle)
    print(f"idle seconds per step: {shown}")


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a Transformers directory; a small random model if not given")
    parser.add_argument("--data", type=Path, help="JSON lines with `prompt`; made sums in words if not given")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each turn")
    parser.add_argument("--rounds", type=int, default=1, help="turns of each trainer")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=1, help="ZeRO-3 ranks of our policy")
    parser.add_argument("--threads", type=int, help="of our generation; by default what the stack chooses")
    parser.add_argument("--micro-batch", type=int, help="train.max_tokens_per_micro_batch of ours")
    parser.add_argument("--entropy", action=argparse.BooleanOptionalAction, default=True, help="ours reports it")
    parser.add_argument("--peer", choices=("trl", "none"), default="trl")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--part", choices=sorted(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measure in turns, then print."""
    options = parsed()
    if options.part:
        options.prompt_tokens = int((options.work / "prompt_tokens").read_text())
        found = PARTS[options.part](options, options.work)
        (options.work / f"{options.part}.json").write_text(json.dumps(found))
        return
    with tempfile.TemporaryDirectory(prefix="rlhf-benchmark-") as name:
        work = Path(name)
        prompt_tokens = prepare(options, work)
        (work / "prompt_tokens").write_text(str(options.prompt_tokens))
        print(
            f"{options.prompts} prompts of {prompt_tokens:.0f} tokens on average, {options.samples} samples of "
            f"{options.new_tokens} tokens each",
            flush=True,
        )
        measured = in_its_own_process("speed", options, work)
        found: dict[str, list[dict[str, float]]] = {}
        for turn in range(options.rounds):
            for part in ("ours", *([options.peer] if options.peer != "none" else [])):
                rows = in_its_own_process(part, options, work)["rows"]
                found.setdefault(part, []).extend(rows)
                print(f"turn {turn} {part}: {mean_of(rows, 'seconds/step'):.2f} s per step", flush=True)
        speed = max(measured["flops_per_second"], in_its_own_process("speed", options, work)["flops_per_second"])
    operations = step_operations(options, measured, prompt_tokens)
    bound = {phase: amount / speed for phase, amount in operations.items()}
    print_tables(found, bound, speed)
    if options.json:
        options.json.write_text(json.dumps({"speed": speed, "bound": bound, "steps": found}, indent=1))


if __name__ == "__main__":
    main()
