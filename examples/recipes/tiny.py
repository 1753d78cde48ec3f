"""Every recipe of this folder on a tiny model that is made here: does it learn?

    python examples/recipes/tiny.py dpo grpo --seeds 3
    python examples/recipes/tiny.py --seeds 3

The task is the sum of two numbers below twenty, one token per character; the base model has seen each of the 400
sums twenty times, and is right in a fifth of its samples. The files are those of this folder; overridden are
models, data, lengths and sizes. Measures, over all sums: `right`, the probability that a sampled answer is right;
`ordered`, the share of sums whose answer is likelier than one that is off by one or two; reward models and process
reward models have those of their own, on held-out rows. Everything runs in this process, without Ray or vLLM.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import rlhf_algos
import torch
import transformers
from rlhf_algos import Example, OfflineConfig, TorchEngine, collate_examples, load_config, load_encoder
from rlhf_core import EngineConfig
from rlhf_core.testing.tiny import save_tiny_model
from rlhf_launch import OnlineConfig
from rlhf_launch import train as train_online

FOLDER = Path(__file__).parent
NUMBERS, SAMPLES, EPOCHS = 20, 8, 20
QUIET = ["tensorboard=false", "seed={seed}"]
SHORT = ["lengths.max_length=32"]


def exact_sum(completions: list[str], *, answer: list[str], **columns: Any) -> list[float]:
    """Reward 1 for the right sum and nothing else, 0 otherwise."""
    return [float(completion.strip() == gold) for completion, gold in zip(completions, answer, strict=True)]


def in_few_tokens(completions: list[str], **columns: Any) -> list[float]:
    """Reward 1 for at most three characters, 0 otherwise: a second goal."""
    return [float(len(completion) <= 3) for completion in completions]


class Task:
    """Data and models of one seed, each made when it is first needed."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed = folder, seed
        numbers = range(NUMBERS)
        self.sums = [(f"{left}+{right}=", str(left + right)) for left in numbers for right in numbers]
        random.Random(seed).shuffle(self.sums)
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, name: str, rows: Iterator[Mapping[str, Any]]) -> str:
        """A file of rows; returns its path."""
        path = self.folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(path)

    @cached_property
    def random(self) -> str:
        """A model that has learnt nothing."""
        return save_tiny_model(self.folder / "random", seed=self.seed)

    @cached_property
    def answers(self) -> str:
        """Prompts with the right answer, for supervised training and distillation."""
        return self.write("answers", ({"prompt": prompt, "completion": gold} for prompt, gold in self.sums))

    @cached_property
    def prompts(self) -> str:
        """Prompts with the answer in a column that only rewards see."""
        return self.write("prompts", ({"prompt": prompt, "answer": gold} for prompt, gold in self.sums))

    @cached_property
    def base(self) -> str:
        """Some supervised training: right now and then, with room to improve."""
        return self.supervised("base", epochs=EPOCHS)

    @cached_property
    def teacher(self) -> str:
        """Much more of it."""
        return self.supervised("teacher", epochs=2 * EPOCHS)

    def supervised(self, name: str, *, epochs: int) -> str:
        """The recipe for supervised training, from nothing."""
        sizes = ["train.batch_size=64", "train.optimizer.learning_rate=1e-3", f"train.epochs={epochs}"]
        data = [f"model={self.random}", f"data.train={self.answers}", "data.hold_out=0"]
        return str(self.train("sft", *data, *sizes, into=name).model)

    @cached_property
    def sampled(self) -> list[tuple[str, str, list[str]]]:
        """Prompt, right answer, and what the base model says: preferences are about one's own answers."""
        model = transformers.AutoModelForCausalLM.from_pretrained(self.base)
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.base)
        tokenizer.padding_side = "left"
        torch.manual_seed(self.seed)
        inputs = tokenizer([prompt for prompt, _ in self.sums], return_tensors="pt", padding=True)
        said = model.generate(**inputs, do_sample=True, num_return_sequences=SAMPLES, max_new_tokens=5, top_k=0)
        texts = tokenizer.batch_decode(said[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return [
            (prompt, gold, texts[place * SAMPLES : (place + 1) * SAMPLES])
            for place, (prompt, gold) in enumerate(self.sums)
        ]

    def pairs_of_own(self) -> Iterator[dict[str, str]]:
        """The right answer against a wrong one of the model's own."""
        for prompt, gold, texts in self.sampled:
            for wrong in sorted({text for text in texts if text.strip() not in ("", gold)}):
                yield {"prompt": prompt, "chosen": gold, "rejected": wrong}

    @cached_property
    def pairs(self) -> str:
        """Preference pairs."""
        return self.write("pairs", self.pairs_of_own())

    @cached_property
    def triples(self) -> str:
        """Two answers of the model's own, one of them nearer, and the right one."""

        def rows() -> Iterator[dict[str, str]]:
            for prompt, gold, texts in self.sampled:
                far = sorted(
                    {text for text in texts if text.isdigit()}, key=lambda text: abs(int(text) - int(gold))
                )
                if len(far) > 1:
                    yield {"prompt": prompt, "chosen": far[0], "rejected": far[-1], "reference": gold}

        return self.write("triples", rows())

    @cached_property
    def labelled(self) -> str:
        """Single answers, marked good or bad: as many of one as of the other."""

        def rows() -> Iterator[dict[str, Any]]:
            for pair in self.pairs_of_own():
                yield {"prompt": pair["prompt"], "completion": pair["chosen"], "label": True}
                yield {"prompt": pair["prompt"], "completion": pair["rejected"], "label": False}

        return self.write("labelled", rows())

    @cached_property
    def steps(self) -> str:
        """Sums of three numbers in two steps, each right or off by a little."""
        draw = random.Random(self.seed)

        def rows() -> Iterator[dict[str, Any]]:
            for _ in range(4000):
                numbers = [draw.randrange(10) for _ in range(3)]
                labels = [draw.random() < 0.5, draw.random() < 0.5]
                first = numbers[0] + numbers[1] + (0 if labels[0] else draw.choice((-10, -1, 1, 10)))
                second = first + numbers[2] + (0 if labels[1] else draw.choice((-10, -1, 1, 10)))
                completions = [f"{numbers[0]}+{numbers[1]}={first}", f"{first}+{numbers[2]}={second}"]
                yield {"prompt": "+".join(map(str, numbers)) + "=", "completions": completions, "labels": labels}

        return self.write("steps", rows())

    def train(self, recipe: str, *overrides: str, into: str) -> Any:
        """Run an offline recipe of this folder."""
        output = self.folder / into
        settings = [setting.format(seed=self.seed) for setting in QUIET + SHORT]
        config = load_config(
            OfflineConfig, FOLDER / f"{recipe}.yaml", [*settings, *overrides, "checkpoint={}", f"output={output}"]
        )
        return rlhf_algos.train(config)

    def right(self, model: str) -> float:
        """Mean probability that a sampled answer to a sum is right."""
        return float(self.log_probs(model, [[gold] for _, gold in self.sums]).exp().mean())

    def ordered(self, model: str) -> float:
        """Share of sums whose answer is likelier than one that is off by one or two."""
        draw = random.Random(self.seed)
        answers = [[gold, str(abs(int(gold) + draw.choice((-2, -1, 1, 2))))] for _, gold in self.sums]
        right, wrong = self.log_probs(model, answers).view(-1, 2).unbind(dim=1)
        return float((right > wrong).float().mean())

    def log_probs(self, model: str, answers: Sequence[Sequence[str]]) -> torch.Tensor:
        """Of whole answers to the sums, one after the other."""
        encoder = load_encoder(model)
        rows = [
            Example(name=prompt, rows=tuple(encoder.answers(prompt, given, prompt)))
            for (prompt, _), given in zip(self.sums, answers, strict=True)
        ]
        engine = TorchEngine(EngineConfig(model=model, role="reference", max_tokens_per_micro_batch=4096))
        found = engine.score(collate_examples(rows, pad_token_id=encoder.pad_token_id), ("log_probs",)).log_probs
        engine.close()
        return torch.zeros(0) if found is None else found.sum(dim=1)


# ------------------------------------------------------------ the recipes


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one run brought."""

    measure: str
    before: float
    after: float
    seconds: float


def offline(data: str, *overrides: str, measure: str = "ordered") -> Callable[[Task, str], Outcome]:
    """A method that trains the base model on a file of the task's."""

    def run(task: Task, name: str) -> Outcome:
        given = [f"model={task.base}", f"data.train={getattr(task, data)}", "data.hold_out=0"]
        if name == "distill":
            given.append(f"algorithm.teacher={task.teacher}")
        begin = time.perf_counter()
        result = task.train(name, *given, *overrides, into=name)
        seconds = time.perf_counter() - begin
        measured = getattr(task, measure)
        return Outcome(
            measure=measure, before=measured(task.base), after=measured(str(result.model)), seconds=seconds
        )

    return run


def supervised(task: Task, name: str) -> Outcome:
    """From nothing to the base model."""
    begin = time.perf_counter()
    model = task.supervised("sft", epochs=EPOCHS)
    seconds = time.perf_counter() - begin
    return Outcome(measure="right", before=task.right(task.random), after=task.right(model), seconds=seconds)


def judging(data: str, metric: str, *overrides: str) -> Callable[[Task, str], Outcome]:
    """A model that judges, by its own measure on held-out rows; before it is trained it guesses."""

    def run(task: Task, name: str) -> Outcome:
        given = [f"model={task.base}", f"data.train={getattr(task, data)}", "data.hold_out=0.1"]
        begin = time.perf_counter()
        result = task.train(name, *given, *overrides, into=name)
        seconds = time.perf_counter() - begin
        return Outcome(measure=metric, before=0.5, after=result.metrics[metric], seconds=seconds)

    return run


SIZES = (
    "lengths.max_prompt_tokens=8",
    "rollout.backend=transformers",
    "rollout.sampling.max_tokens=5",
    "rollout.samples_per_prompt=8",
    "train.engine=torch",
    "train.max_tokens_per_micro_batch=2048",
    "train.prompts_per_step=32",
    "train.minibatches=2",
    "train.steps=30",
    "train.optimizer.learning_rate=3e-4",
    "placement.executor=local",
    "placement.device=cpu",
    "evaluation={}",
    "data.hold_out=0",
    "checkpoint={}",
)


def online(*overrides: str, recipe: str = "grpo", taught: bool = False) -> Callable[[Task, str], Outcome]:
    """An algorithm of `rlhf train`: a file of its own, or that of GRPO with its name; `taught` by another model."""

    def run(task: Task, name: str) -> Outcome:
        given = [f"model={task.base}", f"data.train={task.prompts}", f"output={task.folder / name}"]
        given += [f"algorithm.name={name}", "reward={function: 'tiny:exact_sum'}"]
        if taught:
            given.append(f"model.teacher={task.teacher}")
        settings = [setting.format(seed=task.seed) for setting in QUIET]
        config = load_config(OnlineConfig, FOLDER / f"{recipe}.yaml", [*SIZES, *settings, *given, *overrides])
        begin = time.perf_counter()
        with redirect_stdout(io.StringIO()):
            train_online(config)
        seconds = time.perf_counter() - begin
        after = task.right(str(task.folder / name / "model"))
        return Outcome(measure="right", before=task.right(task.base), after=after, seconds=seconds)

    return run


CRITIC = ("train.critic_warmup_steps=2", "train.critic_optimizer.learning_rate=1e-3", "algorithm.kl_coef=0.01")
PARTS = (
    "{right: {kind: function, function: 'tiny:exact_sum'}, brief: {kind: function, function: 'tiny:in_few_tokens'}}"
)
GDPO = (f"reward={{parts: {PARTS}}}", "algorithm.advantage_options={parts: {right: 1.0, brief: 0.2}}")
RATE, EPOCHS_OF = "train.optimizer.learning_rate={}".format, "train.epochs={}".format

RECIPES: dict[str, Callable[[Task, str], Outcome]] = {
    "sft": supervised,
    "rm": judging("pairs", "accuracy", RATE(1e-3), EPOCHS_OF(8)),
    "prm": judging("steps", "step_accuracy", RATE(1e-3), EPOCHS_OF(8), "data.step_separator='+'"),
    **{name: offline("pairs", RATE(3e-4), EPOCHS_OF(4)) for name in ("dpo", "simpo", "orpo", "cpo")},
    "kto": offline("labelled", RATE(3e-4), EPOCHS_OF(4)),
    "tpo": offline("triples", RATE(3e-4), EPOCHS_OF(10)),
    "distill": offline("answers", RATE(1e-3), EPOCHS_OF(10), measure="right"),
    # The model of this task makes nothing of what it is shown; docs/distillation.md has one that does.
    **{name: online() for name in rlhf_algos.NAMED_RECIPES if name != "self_distillation"},
    **{name: online(*CRITIC, recipe="ppo") for name in ("ppo", "vapo")},
    "gdpo": online(*GDPO),
    "on_policy_distillation": online(taught=True),
}


def table(outcomes: Mapping[str, Sequence[Outcome]]) -> str:
    """Mean over the seeds, and the smallest and the largest, before and after."""

    def shown(values: Sequence[float]) -> str:
        spread = f" ({min(values):.2f}-{max(values):.2f})" if len(values) > 1 else ""
        return f"{statistics.mean(values):.2f}{spread}"

    rows = ["| recipe | measure | before | after | seconds |", "|---|---|---|---|---|"]
    for name, found in outcomes.items():
        before, after = shown([one.before for one in found]), shown([one.after for one in found])
        seconds = statistics.mean(one.seconds for one in found)
        rows.append(f"| `{name}` | {found[0].measure} | {before} | {after} | {seconds:.0f} |")
    return "\n".join(rows)


def run(names: Sequence[str], seeds: int, folder: Path) -> dict[str, list[Outcome]]:
    """Run recipes on tasks of as many seeds; tells each outcome when it is there."""
    sys.path.insert(0, str(FOLDER))  # rewards are named by module
    outcomes: dict[str, list[Outcome]] = {name: [] for name in names}
    for seed in range(seeds):
        task = Task(folder / str(seed), seed)
        for name in names:
            outcome = RECIPES[name](task, name)
            outcomes[name].append(outcome)
            print(
                f"{name}, seed {seed}: {outcome.before:.3f} -> {outcome.after:.3f}, {outcome.seconds:.0f} s",
                flush=True,
            )
    return outcomes


def main() -> None:
    """Run, and print the table."""
    transformers.utils.logging.disable_progress_bar()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="RECIPE", help=f"all if none is named: {', '.join(RECIPES)}")
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    if unknown := set(options.names) - set(RECIPES):
        parser.error(f"no recipe {', '.join(sorted(unknown))}; there are {', '.join(RECIPES)}")
    with tempfile.TemporaryDirectory() as folder:
        print(table(run(options.names or list(RECIPES), options.seeds, Path(folder))))


if __name__ == "__main__":
    main()
