"""Offline training against TRL: CPU seconds per step, peak memory and losses on the same rows and weights.

    python benchmarks/offline.py --data pairs.jsonl                       # DPO, small shape
    python benchmarks/offline.py --data pairs.jsonl --shape large --methods dpo kto sft rm

`pairs.jsonl` has the columns prompt, chosen, rejected (or, preferred, prompt_messages, chosen_messages and
rejected_messages). Every trainer runs in a process of its own: one thread, float32, rows in the order of the file.
A line per trainer, then one table of ratios with the targets and which were met (exit code 1 if one was not);
`--json` writes all numbers to a file.

- `ours`: rlhf-algos as it is. `padded`: rlhf-algos with packing switched off.
- `trl`: TRL as shipped. `trl-compact`: TRL with its label compaction forced, which it uses on Triton devices only.
- SFT only, TRL's ways to avoid padding: `trl-padding-free` (the same rows per step), and its packing of several
  examples into rows of full length, `trl-bfd` (best fit, examples kept apart), `trl-bfd-compact` (with label
  compaction) and `trl-wrapped` (one stream of tokens; examples attend to each other). Packed steps hold other and
  more rows, so times are compared per token of the data.

The first step is left out of the time (allocator, caches). Peak memory is that of the process above its level after
the imports: weights, gradients, optimizer, activations, and TRL's second model. Our reference log-probs, computed
once before the first step, are timed apart (`reference_s`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from offline_table import print_table

SHAPES = {
    "small": {"hidden": 128, "layers": 4, "vocab": 4096},
    "medium": {"hidden": 512, "layers": 8, "vocab": 32768},
    "large": {"hidden": 512, "layers": 8, "vocab": 151936},
}
TRAINERS = ("ours", "padded", "trl", "trl-compact")
UNPADDED = {
    "trl-padding-free": {"padding_free": True, "max_length": None},
    "trl-bfd": {"packing": True, "packing_strategy": "bfd"},
    "trl-bfd-compact": {"packing": True, "packing_strategy": "bfd"},
    "trl-wrapped": {"packing": True, "packing_strategy": "wrapped"},
}
"""TRL's own ways to train SFT without padding."""
LEARNING_RATE = 1e-5
TOKENIZER_VOCAB = 4096


def read_pairs(path: Path, count: int) -> list[dict[str, Any]]:
    """The first `count` pairs under TRL's column names, conversations if there are any."""
    rows = []
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            suffix = "_messages" if "prompt_messages" in row else ""
            rows.append({name: row[name + suffix] for name in ("prompt", "chosen", "rejected")})
            if len(rows) == count:
                break
    return rows


def method_rows(pairs: list[dict[str, Any]], method: str) -> list[dict[str, Any]]:
    """Rows as the method's trainers read them."""
    if method == "kto":
        return [
            {
                "prompt": pair["prompt"],
                "completion": pair["chosen" if i % 2 == 0 else "rejected"],
                "label": i % 2 == 0,
            }
            for i, pair in enumerate(pairs)
        ]
    if method == "sft":
        return [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in pairs]
    return pairs


def make_model(directory: Path, pairs: list[dict[str, Any]], shape: str, method: str) -> None:
    """A random Qwen2 of the shape, and a byte-pair tokenizer trained on the rows."""
    import torch
    from rlhf_core.testing.tiny import CHAT_TEMPLATE, SPECIAL_TOKENS
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen2ForSequenceClassification,
    )

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_VOCAB,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((json.dumps(pair, ensure_ascii=False) for pair in pairs), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|im_end|>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)
    size = SHAPES[shape]
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=size["vocab"],
        hidden_size=size["hidden"],
        intermediate_size=3 * size["hidden"],
        num_hidden_layers=size["layers"],
        num_attention_heads=max(4, size["hidden"] // 64),
        num_key_value_heads=max(4, size["hidden"] // 64) // 2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
        **({"num_labels": 1} if method == "rm" else {}),
    )
    kind = Qwen2ForSequenceClassification if method == "rm" else Qwen2ForCausalLM
    kind(config).save_pretrained(directory)


def run_ours(arguments: argparse.Namespace, work: Path, *, packing: bool) -> dict[str, Any]:
    """Train with rlhf-algos."""
    from rlhf_algos import OfflineConfig, from_mapping, train

    settings = {
        "model": {"path": str(work / "model"), "dtype": "float32"},
        "data": {"train": str(work / "rows.jsonl"), "shuffle": False},
        "algorithm": {"name": arguments.methods[0]},
        "lengths": {"max_length": arguments.length, "long_prompts": "drop"},
        "train": {
            "batch_size": arguments.batch,
            "steps": arguments.steps,
            "optimizer": {
                "learning_rate": LEARNING_RATE,
                "schedule": "constant",
                "warmup": 0.0,
                "betas": [0.9, 0.999],
            },
            "packing": packing,
            # One micro-batch per step, as TRL, and as much at once when the reference is scored.
            "max_tokens_per_micro_batch": 2 * arguments.batch * arguments.length,
        },
        "placement": {"device": "cpu"},
        "output": str(work / ("ours" if packing else "padded")),
        "reference_cache": str(work / ("references" if packing else "references-padded")),
        "tensorboard": False,
    }
    config = from_mapping(OfflineConfig, settings, source="benchmark")
    clock: list[float] = []
    losses: list[float] = []
    tokens: list[float] = []

    def on_event(kind: str, step: int, values: Any) -> None:
        clock.append(time.process_time())
        if kind == "train":
            losses.append(values["loss"])
            tokens.append(values["tokens"])

    base, begin = peak_mib(), time.process_time()
    train(config, on_event=on_event)
    return {
        "losses": losses,
        "tokens": tokens,
        "step_s": [b - a for a, b in itertools.pairwise(clock)],
        "peak_mib": peak_mib() - base,
        "reference_s": clock[0] - begin,
    }


def run_trl(arguments: argparse.Namespace, work: Path, *, name: str) -> dict[str, Any]:
    """Train with TRL; `name` is that of the trainer."""
    import datasets
    import transformers
    import trl
    import trl.trainer.utils

    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    if name.endswith("compact"):
        trl.trainer.utils._use_triton = lambda device: True
    method = arguments.methods[0]
    names = {"dpo": "DPO", "kto": "KTO", "sft": "SFT", "rm": "Reward"}
    trainer_class = getattr(trl, names[method] + "Trainer")
    rows = [json.loads(line) for line in (work / "rows.jsonl").read_text().splitlines()]
    settings = getattr(trl, names[method] + "Config")(
        output_dir=str(work / "trl"),
        per_device_train_batch_size=arguments.batch,
        max_steps=arguments.steps,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        **{"max_length": arguments.length, **UNPADDED.get(name, {})},
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        train_sampling_strategy="sequential",
    )
    clock: list[tuple[float, float]] = []

    class Clock(transformers.TrainerCallback):
        begin = 0.0

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.begin = time.process_time()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            clock.append((self.begin, time.process_time()))

    base = peak_mib()
    trainer = trainer_class(
        model=str(work / "model"),
        args=settings,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(work / "model"),
        callbacks=[Clock()],
    )
    trainer.train()
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    totals = [0.0, *(entry.get("num_tokens", 0.0) for entry in history)]
    return {
        "losses": [entry["loss"] for entry in history],
        "tokens": [b - a for a, b in itertools.pairwise(totals)],
        "step_s": [end - begin for begin, end in clock],
        "peak_mib": peak_mib() - base,
        "reference_s": 0.0,
    }


def peak_mib() -> float:
    """Highest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def worker(arguments: argparse.Namespace, work: Path) -> None:
    """In a process of its own: run one trainer and print its numbers as the last line."""
    import torch

    torch.set_num_threads(1)
    name = arguments.trainers[0]
    if name in ("ours", "padded"):
        import rlhf_algos

        assert rlhf_algos  # imported before the memory level is taken
        result = run_ours(arguments, work, packing=name == "ours")
    else:
        result = run_trl(arguments, work, name=name)
    print(json.dumps(result))


def measure(arguments: argparse.Namespace, method: str, trainer: str, work: Path) -> dict[str, Any]:
    """Start a worker and read its numbers."""
    command = [sys.executable, __file__, "--worker", str(work), "--methods", method, "--trainers", trainer]
    for name in ("shape", "batch", "length", "steps", "data"):
        command += [f"--{name}", str(getattr(arguments, name))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{trainer} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def chosen_trainers(arguments: argparse.Namespace, method: str) -> list[str]:
    """The trainers that know the method; without --trainers all of them."""
    known = [*TRAINERS, *(UNPADDED if method == "sft" else ())]
    if method == "rm":
        known.remove("trl-compact")  # there is no language head whose labels could be compacted
    return [name for name in arguments.trainers or known if name in known]


def ms_per_token(results: dict[str, Any], trainer: str) -> float:
    """Time per token of the data: the median of the steps where these hold our rows, else of all steps together."""
    result = results[trainer]
    if result["packs"]:
        return 1000 * sum(result["step_s"][1:]) / sum(result["tokens"][1:])
    rows = results.get("ours", result)["tokens"][1:]
    per_step = [1000 * s / n for s, n in zip(result["step_s"][1:], rows, strict=True) if n]
    return statistics.median(per_step) if per_step else float("nan")


def compare(arguments: argparse.Namespace, method: str) -> dict[str, Any]:
    """All trainers on one method."""
    pairs = read_pairs(arguments.data, arguments.rows)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        make_model(work / "model", pairs, arguments.shape, method)
        with (work / "rows.jsonl").open("w") as file:
            for row in method_rows(pairs, method):
                file.write(json.dumps(row) + "\n")
        print(f"{method}, {arguments.shape} {SHAPES[arguments.shape]}, batch {arguments.batch}, {len(pairs)} rows")
        for trainer in chosen_trainers(arguments, method):
            result = measure(arguments, method, trainer, work)
            result["packs"] = "packing" in UNPADDED.get(trainer, {})
            result["median_s"] = statistics.median(result["step_s"][1:])
            results[trainer] = result
            result["ms_per_token"] = ms_per_token(results, trainer)
            print(
                f"  {trainer:16} {result['median_s']:8.3f} s/step  {result['ms_per_token']:7.4f} ms/token  "
                f"{result['peak_mib']:8.0f} MiB  "
                f"first loss {result['losses'][0]:.6f}  last {result['losses'][-1]:.6f}  "
                f"before {result['reference_s']:.2f} s",
                flush=True,
            )
    return results


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--methods", nargs="+", default=["dpo"], choices=["dpo", "kto", "sft", "rm"])
    parser.add_argument("--trainers", nargs="+", choices=[*TRAINERS, *UNPADDED], help="all by default")
    parser.add_argument("--shape", default="small", choices=SHAPES)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rows", type=int, default=400, help="pairs read from the file")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        worker(arguments, arguments.worker)
        return
    results = {method: compare(arguments, method) for method in arguments.methods}
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    if not print_table(results, arguments.shape):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
