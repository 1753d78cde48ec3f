"""The model card: README.md in the hub's format, from what the run has written of itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import yaml

from rlhf_launch.export.record import TrainedRun
from rlhf_launch.export.shareable import (
    hub_name,
    last_part,
    shareable_settings,
    shareable_text,
    without_secrets,
)

Form = Literal["model", "adapter", "gguf"]

CARD = "README.md"
PLOT = "plot.png"
_RELATIONS: Mapping[Form, str] = {"model": "finetune", "adapter": "adapter", "gguf": "quantized"}
_LIBRARIES: Mapping[Form, str] = {"model": "transformers", "adapter": "peft", "gguf": "gguf"}


@dataclass(frozen=True, kw_only=True, slots=True)
class CardFacts:
    """What a card is written from."""

    title: str
    form: Form
    dtype: str
    scalar: bool
    """A reward model."""
    base: str | None = None
    """The base model: a hub name or a path, of which only the last part is told."""
    license: str | None = None
    repo: str | None = None
    """Where it will be on the hub."""
    run: TrainedRun | None = None
    best: bool = False
    """The run's best model by its evaluations, not its last."""


def write_card(facts: CardFacts, folder: Path) -> None:
    """Write README.md."""
    from huggingface_hub import ModelCard

    text = f"---\n{_front_matter(facts)}\n---\n\n{_body(facts)}"
    ModelCard(without_secrets(text)).save(folder / CARD)


def base_license(base: str | None) -> str | None:
    """The license in the card of the base model, where that can be had; never asks twice, never fails."""
    from huggingface_hub import ModelCard, hf_hub_download

    if base is None:
        return None
    try:
        path = Path(base) / CARD
        if not Path(base).is_dir():
            name = hub_name(base)
            if name is None:
                return None
            path = Path(hf_hub_download(name, CARD, etag_timeout=5))
        found = ModelCard.load(path, ignore_metadata_errors=True).data.get("license")
    except Exception:  # of whatever kind: without network, without a card, a card that is not readable
        return None
    return found if isinstance(found, str) else None


def _front_matter(facts: CardFacts) -> str:
    from huggingface_hub import ModelCardData

    base = None if facts.base is None else hub_name(facts.base)
    hub_data = [each.path for each in facts.run.data if each.hub] if facts.run else []
    tags = ["rlhf", *(["reward-model"] if facts.scalar else [])]
    if facts.run is not None:
        tags.append(str(facts.run.settings["algorithm"]["name"]))
    card = ModelCardData(
        base_model=base,
        base_model_relation=None if base is None else _RELATIONS[facts.form],
        library_name=_LIBRARIES[facts.form],
        pipeline_tag="text-classification" if facts.scalar else "text-generation",
        license=facts.license,
        tags=list(dict.fromkeys(tags)),
        datasets=hub_data or None,
    )
    return card.to_yaml()


def _body(facts: CardFacts) -> str:
    parts = [f"# {facts.title}\n\n{_opening(facts)}", _usage(facts)]
    if facts.run is None:
        parts.append("## Training\n\nThis directory came without the record of a run.")
    else:
        parts += [_data(facts.run), _method(facts.run), _curves(facts.run), _versions(facts.run), _again(facts.run)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _opening(facts: CardFacts) -> str:
    kind = "reward model" if facts.scalar else "language model"
    what = {"model": f"A {kind}", "adapter": f"Low-rank adapters of a {kind}", "gguf": f"A {kind} in GGUF"}[
        facts.form
    ]
    base = "" if facts.base is None else f", trained from {last_part(facts.base)}"
    by = "" if facts.run is None else f" by `{facts.run.settings['algorithm']['name']}`"
    by += " (the best model of the run's evaluations, not the last)" if facts.best else ""
    return f"{what}{base}{by}, in {facts.dtype}. Written by `rlhf export` of rlhf-launch {version('rlhf-launch')}."


def _usage(facts: CardFacts) -> str:
    name = facts.repo or "PATH"
    if facts.form == "gguf":
        return f"## Use\n\n```\nllama-cli -m {facts.title}.gguf\n```"
    kind = "AutoModelForSequenceClassification" if facts.scalar else "AutoModelForCausalLM"
    if facts.form == "adapter":
        base = last_part(facts.base) if facts.base else "BASE"
        lines = [
            "from peft import PeftModel",
            f"from transformers import {kind}",
            "",
            f'base = {kind}.from_pretrained("{base}"{", num_labels=1" if facts.scalar else ""})',
            f'model = PeftModel.from_pretrained(base, "{name}")',
        ]
    else:
        lines = [
            f"from transformers import {kind}, AutoTokenizer",
            "",
            f'model = {kind}.from_pretrained("{name}")',
            f'tokenizer = AutoTokenizer.from_pretrained("{name}")',
        ]
    code = "\n".join(lines)
    return f"## Use\n\n```python\n{code}\n```"


def _data(run: TrainedRun) -> str:
    lines = ["| file | rows | SHA-256 |", "|---|---|---|"]
    for each in run.data:
        name = each.path if each.hub else last_part(each.path)
        rows = "" if each.rows is None else f"{each.rows:,}"
        content = each.sha256 or (f"of the files' SHA-256: {each.fingerprint}" if each.fingerprint else "")
        lines.append(f"| {name}{f' ({each.split})' if each.hub else ''} | {rows} | {content} |")
    return "## Data\n\n" + "\n".join(lines)


def _method(run: TrainedRun) -> str:
    rows = "\n".join(f"| {name} | {value} |" for name, value in _main_settings(run.settings))
    steps = f"| steps | {run.steps} |\n" if run.steps else ""
    return f"## Method\n\n| | |\n|---|---|\n{steps}{rows}"


def _main_settings(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The settings that a reader looks for first, under their dotted keys."""
    keys = (
        *("algorithm.name", "algorithm.loss", "algorithm.loss_options", "algorithm.advantage", "algorithm.kl_coef"),
        *("algorithm.beta", "lengths.max_length", "lengths.max_prompt_tokens"),
        *("rollout.samples_per_prompt", "rollout.sampling.max_tokens", "rollout.sampling.temperature"),
        *("train.prompts_per_step", "train.batch_size", "train.epochs", "train.minibatches"),
        *("train.optimizer.kind", "train.optimizer.learning_rate", "train.optimizer.schedule"),
        *("train.optimizer.warmup", "train.optimizer.weight_decay", "train.optimizer.max_grad_norm"),
        *("model.dtype", "model.lora.rank", "model.lora.alpha", "model.lora.quantize", "seed"),
    )
    for key in keys:
        value: Any = settings
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is None or value in ({}, []):
            continue
        shown = ", ".join(f"{k}: {v}" for k, v in value.items()) if isinstance(value, Mapping) else str(value)
        yield f"`{key}`", shareable_text(shown).replace("|", "\\|").replace("\n", " ")


def _curves(run: TrainedRun) -> str:
    parts = []
    if run.changes:
        what = "Evaluations on held-out data" if run.evaluated else "Numbers of training (there was no evaluation)"
        lines = [f"{what}:", "", "| | first | last |", "|---|---|---|"]
        for each in run.changes:
            lines.append(
                f"| {each.name} | {each.first:.4g} (step {each.first_step}) | "
                f"{each.last:.4g} (step {each.last_step}) |"
            )
        parts.append("\n".join(lines))
    if run.plot is not None:
        parts.append(f"![curves of the run]({PLOT})")
    return "## Results\n\n" + "\n\n".join(parts) if parts else ""


def _versions(run: TrainedRun) -> str:
    shown = ", ".join(f"{name} {number}" for name, number in run.versions.items())
    resumed = f" The run was resumed {run.resumed} time(s)." if run.resumed else ""
    return f"## Versions\n\n{shown}.{resumed}"


def _again(run: TrainedRun) -> str:
    shown = {**shareable_settings(run.settings), "output": "run"}
    settings = yaml.safe_dump(shown, sort_keys=False, allow_unicode=True).rstrip()
    return (
        f"## To repeat it\n\n```\n{run.command}\n```\n\nwith this config.yaml, and the files that it names beside "
        f"it:\n\n<details><summary>config.yaml</summary>\n\n```yaml\n{settings}\n```\n\n</details>"
    )
