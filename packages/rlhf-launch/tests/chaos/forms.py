"""The runs that are killed: small ones of every kind, each with the phases that it has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from rlhf_core.testing.tiny import save_tiny_model

_ONLINE = ("start", "restore", "generation", "rewards", "scoring", "stepping", "syncing", "saving", "publishing")
_OFFLINE = ("start", "restore", "stepping", "saving", "publishing", "export")


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """A kind of run."""

    name: str
    command: tuple[str, ...]
    """Before the configuration file: `rlhf train`."""
    settings: Mapping[str, Any]
    phases: tuple[str, ...]
    """Where it is killed."""
    steps: int
    exact: bool = True
    """Whether a run that was killed gives the bits of one that was not; else its account is looked at."""
    stack: bool = False
    """Whether Ray and its workers are part of it."""
    account: Mapping[str, int] = field(default_factory=dict)
    """What the account of prompts must come to."""

    def write(self, folder: Path, output: Path) -> list[str]:
        """Write the configuration; returns the command."""
        file = folder / f"{self.name}.yaml"
        file.write_text(yaml.safe_dump(dict(self.settings)))
        return [*self.command, str(file), f"output={output}"]


def write_inputs(folder: Path) -> None:
    """Two tiny models, prompts, and pairs of answers."""
    if (folder / "pairs.jsonl").exists():
        return
    save_tiny_model(folder / "policy")
    save_tiny_model(folder / "reward", head="scalar", seed=1)
    prompts = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(24)]
    pairs = [{"prompt": f"{n}: say ", "chosen": "yes" * (1 + n % 3), "rejected": "no"} for n in range(13)]
    for name, rows in (("prompts", prompts), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def forms(folder: Path) -> dict[str, Form]:
    """Every form, by its name; `folder` has the inputs."""
    made = [
        _alternation(folder),
        *(_overlapping(folder, name) for name in ("asynchronous", "partial")),
        _offline(folder, "dpo", ("rlhf-algos", "dpo")),
        _offline(folder, "offline-ranks", ("rlhf", "offline", "dpo"), engine="deepspeed", ranks=2),
        _stack(folder),
        _stack(folder, overlap={"max_staleness": 2}),
    ]
    return {form.name: form for form in made}


def _online(folder: Path, **sections: Mapping[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "model": {"path": str(folder / "policy")},
        "data": {"train": str(folder / "prompts.jsonl"), "hold_out": 4},
        "lengths": {"max_prompt_tokens": 16},
        "reward": {"function": "launch_rewards:share_of_alphanumerics"},
        "algorithm": {"name": "grpo", "kl_coef": 0.05},
        "rollout": {"backend": "transformers", "samples_per_prompt": 4, "sampling": {"max_tokens": 8}},
        "train": {
            "engine": "torch",
            "max_tokens_per_micro_batch": 512,
            "prompts_per_step": 4,
            "optimizer": {"learning_rate": 1e-3},
        },
        "evaluation": {"every": 3},
        "checkpoint": {"every": 1},
        "placement": {"executor": "local", "device": "cpu", "timeout_s": 300},
        "tensorboard": False,
    }
    for name, section in sections.items():
        settings[name] = settings.get(name, {}) | section
    return settings


def _alternation(folder: Path) -> Form:
    # Without it the last bits of the generator's own log-probs follow from time, as docs/numbers.md says.
    rollout = {"options": {"separate_requests": True}}
    return Form(
        name="alternation",
        command=("rlhf", "train"),
        settings=_online(folder, rollout=rollout, train={"steps": 6, "minibatches": 2}, checkpoint={"every": 2}),
        phases=(*_ONLINE, "evaluation", "export", "closing"),
        steps=6,
        account={"steps": 6, "per_step": 4, "max_staleness": 0},
    )


def _overlapping(folder: Path, name: str) -> Form:
    overlap = {"max_staleness": 2, "pause_while_training": name == "partial"}
    rollout = {"overlap": overlap, "dynamic_sampling": {"max_rounds": 20}, "sampling": {"max_tokens": 24}}
    on_failure = {"attempts": 1, "backoff_s": 0, "then": "drop", "max_dropped_in_a_row": 10_000}
    reward = {"function": "launch_rewards:uneven", "on_failure": on_failure}
    return Form(
        name=name,
        command=("rlhf", "train"),
        settings=_online(folder, rollout=_online(folder)["rollout"] | rollout, train={"steps": 8}, reward=reward),
        phases=_ONLINE,
        steps=8,
        exact=False,
        account={"steps": 8, "per_step": 4, "max_staleness": 2},
    )


def _offline(folder: Path, name: str, command: tuple[str, ...], **train: Any) -> Form:
    settings = {
        "model": str(folder / "policy"),
        "data": {"train": str(folder / "pairs.jsonl")},
        "reference_cache": str(folder / f"references-{name}"),
        "train": {"batch_size": 4, "epochs": 2, "optimizer": {"learning_rate": 1e-3}, **train},
        "evaluation": {"data": str(folder / "pairs.jsonl"), "batch_size": 6, "every": 3},
        "checkpoint": {"every": 2},
        "tensorboard": False,
    }
    stack = train.get("ranks", 1) > 1
    phases = (*_OFFLINE, "evaluation", "reference")
    return Form(name=name, command=command, settings=settings, phases=phases, steps=8, stack=stack)


def _stack(folder: Path, overlap: Mapping[str, Any] | None = None) -> Form:
    rollout = {"samples_per_prompt": 2, "sampling": {"max_tokens": 12}, "max_num_seqs": 32, "engines": 1}
    settings = _online(
        folder,
        lengths={"max_prompt_tokens": 16, "max_length": 64},
        reward={"model": str(folder / "reward"), "function": "launch_rewards:share_of_alphanumerics"},
        rollout={"backend": "vllm", **rollout, **({"overlap": dict(overlap)} if overlap else {})},
        train={"engine": "deepspeed", "ranks": 2, "prompts_per_step": 6, "minibatches": 2, "steps": 8},
        placement={"executor": "ray", "device": "cpu", "timeout_s": 300},
        evaluation={"every": 4},
    )
    return Form(
        name="stack-asynchronous" if overlap else "stack",
        command=("rlhf", "train"),
        settings=settings,
        phases=_ONLINE if overlap else (*_ONLINE, "evaluation", "export"),
        steps=8,
        stack=True,
        exact=overlap is None,
        account={"steps": 8, "per_step": 6, "max_staleness": 2 if overlap else 0},
    )
