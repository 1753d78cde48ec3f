"""`rlhf init`, `--print-config` and the reference pages: configurations as files that explain themselves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rlhf_algos import (
    METHODS,
    NAMED_RECIPES,
    LearnsFromTeacher,
    OfflineConfig,
    ShowsTeacherMore,
    commented_yaml,
    from_mapping,
    make_recipe,
    reference,
    schema_text,
)
from rlhf_core import ConfigError, did_you_mean

from rlhf_launch.cli.errors import run_command
from rlhf_launch.config.printing import option_groups

_ONLINE_KEYS = (
    *("model.path", "model.lora", "data.train", "data.hold_out", "data.chat", "data.system_prompt"),
    *("lengths.max_prompt_tokens", "lengths.long_prompts", "reward.function", "algorithm"),
    *("rollout.samples_per_prompt", "rollout.sampling.max_tokens", "rollout.sampling.temperature"),
    *("train.ranks", "train.steps", "train.prompts_per_step", "train.minibatches"),
    *("train.optimizer.learning_rate", "train.max_tokens_per_micro_batch", "train.gradient_checkpointing"),
    *("evaluation.every", "checkpoint.every", "output", "seed"),
)
_OFFLINE_KEYS = (
    *("model.path", "model.lora", "data.train", "data.hold_out", "data.chat", "algorithm", "lengths.max_length"),
    *("lengths.long_prompts", "train.ranks", "train.batch_size", "train.epochs", "train.optimizer.learning_rate"),
    *("train.optimizer.schedule", "train.optimizer.warmup", "train.max_tokens_per_micro_batch"),
    *("train.gradient_checkpointing", "evaluation.every", "checkpoint.every", "output", "seed"),
)
_ROUND_KEYS = (
    *("model.path", "model.lora", "data.train", "data.chat", "reward.function", "rounds", "scoring"),
    *("rollout.samples_per_prompt", "rollout.sampling.max_tokens", "rollout.sampling.temperature", "select"),
    *("algorithm", "reference", "lengths.max_prompt_tokens", "train.ranks", "train.batch_size", "train.epochs"),
    *("train.optimizer.learning_rate", "train.max_tokens_per_micro_batch", "evaluation.data"),
    *("evaluation.samples", "checkpoint.every", "output", "seed"),
)
_ROUNDS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "raft": ("sft", {"kind": "best_of_n"}),
    "iterative_dpo": ("dpo", {"kind": "pairs"}),
    "conditional_sft": ("sft", {"kind": "conditional"}),
}
"""Ways to go in rounds: the method, and what it trains on."""
_NEEDED: Mapping[str, Mapping[str, Any]] = {
    "distill": {"teacher": "path/of/the/teacher"},
    "gdpo": {"advantage_options": {"parts": {"correct": 1.0, "format": 0.5}}},
}
"""Settings without a default."""
_ROWS = {
    "sft": '{"messages": [...]}, or {"prompt": ..., "completion": ...}',
    "distill": '{"messages": [...]}, or {"prompt": ..., "completion": ...}',
    "kto": '{"prompt": ..., "completion": ..., "label": true}, or pairs',
    "prm": '{"prompt": ..., "completions": [...], "labels": [...]}',
}
_PAIRS = '{"prompt": ..., "chosen": ..., "rejected": ...}'
_PROMPTS = '{"prompt": ...} and the columns that the reward takes, for instance "answer"'


def init(
    method: Annotated[
        str, typer.Argument(help="grpo, ppo, dapo, rloo, ...; or dpo, sft, rm, ...; or raft, iterative_dpo, ...")
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write; printed if not given.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Every key, not only those that are usually set.")] = False,
) -> None:
    """Write a commented configuration to start from."""

    def work() -> None:
        text = starting_file(method, full=full)
        if output is None:
            typer.echo(text, nl=False)
            return
        if output.exists():
            raise ConfigError(f"{str(output)!r} exists; give another name, or remove it")
        try:
            output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{str(output)!r} cannot be written: {error}") from error
        typer.echo(f"wrote {output}")

    run_command(work)


def starting_file(method: str, *, full: bool = False) -> str:
    """The text of a configuration to start from.

    Raises:
        ConfigError: there is no such method.
    """
    from rlhf_launch.config.run import OnlineConfig
    from rlhf_launch.rounds.config import RoundsConfig

    name = method.replace("-", "_")
    common: dict[str, Any] = {
        "model": "path/or/hub-name",
        "data": {"train": "data.jsonl"},
        "output": f"runs/{name}",
    }
    if name in NAMED_RECIPES:
        algorithm = {"name": name, **_NEEDED.get(name, {})}
        settings = common | {"algorithm": algorithm, "reward": {"function": "rlhf_rollout:math_answer"}}
        recipe = make_recipe(name, _NEEDED.get(name))
        command, rows, keys = f"rlhf train {name}.yaml", _PROMPTS, _ONLINE_KEYS
        if recipe.min_samples_per_prompt < 2:
            settings["rollout"] = {"samples_per_prompt": 1}
        if isinstance(recipe, ShowsTeacherMore):
            settings |= {"reward": {}}
            rows = '{"prompt": ..., "teacher_prompt": ...}'
        elif isinstance(recipe, LearnsFromTeacher):
            settings |= {"model": {"path": settings["model"], "teacher": "path/of/the/teacher"}, "reward": {}}
            rows, keys = '{"prompt": ...}', ("model.teacher", *keys)
        config: Any = from_mapping(OnlineConfig, settings, source="rlhf init")
    elif name in METHODS:
        algorithm = {"name": name, **_NEEDED.get(name, {})}
        config = from_mapping(OfflineConfig, common | {"algorithm": algorithm}, source="rlhf init")
        command, rows, keys = f"rlhf offline {name} {name}.yaml", _ROWS.get(name, _PAIRS), _OFFLINE_KEYS
        command += f"`, or alone, without Ray and DeepSpeed: `rlhf-algos {name} {name}.yaml"
    elif name in _ROUNDS:
        chosen, rule = _ROUNDS[name]
        settings = common | {"algorithm": {"name": chosen}, "select": rule}
        settings["reward"] = {"function": "rlhf_rollout:math_answer"}
        config = from_mapping(RoundsConfig, settings, source="rlhf init")
        command, rows, keys = f"rlhf iterate {name}.yaml", _PROMPTS, _ROUND_KEYS
    else:
        known = [*NAMED_RECIPES, *METHODS, *_ROUNDS]
        raise ConfigError(
            f"{method!r} is no method; {did_you_mean(name, known)}there are {', '.join(sorted(known))}"
        )
    head = f"# `{command}`\n# Rows of data.jsonl: {rows}\n\n"
    return head + commented_yaml(config, options=option_groups(config), only=None if full else keys)


def reference_pages() -> dict[str, str]:
    """The generated files of docs/ by name: a reference and a schema for each kind of configuration."""
    from rlhf_launch.config.generate import GenerateConfig
    from rlhf_launch.config.run import OnlineConfig
    from rlhf_launch.rounds.config import RoundsConfig

    kinds = {
        "train": (OnlineConfig, "Configuration of `rlhf train`"),
        "offline": (OfflineConfig, "Configuration of `rlhf offline` and `rlhf-algos`"),
        "generate": (GenerateConfig, "Configuration of `rlhf generate` and `rlhf score`"),
        "iterate": (RoundsConfig, "Configuration of `rlhf iterate`"),
    }
    pages: dict[str, str] = {}
    for name, (cls, title) in kinds.items():
        pages[f"configuration-{name}.md"] = reference(cls, heading=title)
        pages[f"schema/{name}.json"] = schema_text(cls, title=title.replace("`", ""))
    return pages


def write_reference(folder: Path) -> None:
    """Write the generated pages below `folder`."""
    for name, text in reference_pages().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_reference(Path("docs"))
