"""Rows that a judge is trained on: what it will be asked in a run, with the right answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf_algos import LengthSection, naming_full_disk, read_rows
from rlhf_core import ConfigError, DataError
from rlhf_rollout import GenerativeRewardConfig, PairwiseRewardConfig

from rlhf_launch.config.generate import GenerateConfig
from rlhf_launch.samples.prompts import PromptFormat, make_prompts, policy_tokenizer

_NO_LIMIT = LengthSection(max_prompt_tokens=1 << 31)
_RESPONSES = ("chosen", "rejected", "completion")


def judge_rows(config: GenerateConfig, output: Path, *, part: str | None = None) -> int:
    """Write rows for `rlhf offline sft` by which a judge of `reward.parts` is trained; returns how many.

    The prompts stand in the questions as they will in a run with the same `data` and `model` sections, so that the
    judge is asked what it has learnt.

    Args:
        config: `data.train` are pairs (`prompt`, `chosen`, `rejected`), or for a judge of single responses labelled
            answers (`prompt`, `completion`, `label`); the judge's own model need not be there yet.
        output: JSONL file.
        part: name of the judge; None if there is one only.

    Raises:
        ConfigError: there is no such judge.
        DataError: a row is neither a pair nor a labelled answer.
    """
    judge, tokenizer = _judge(config, part), policy_tokenizer(config.model)
    form = replace(PromptFormat.of(config.data, _NO_LIMIT), lengths=_NO_LIMIT)
    written = 0
    with naming_full_disk(output.parent), output.open("w", encoding="utf-8") as file:
        for source in config.data.train:
            rows = read_rows(source)
            prompts, _ = make_prompts(rows, tokenizer, form)
            for row, prompt in zip(rows, prompts, strict=True):
                values = {**row.values, "prompt": prompt.text}
                given = {name: _text(values[name], row.place) for name in _RESPONSES if name in values}
                for made in judge.rows({**values, **given}, row.place):
                    file.write(json.dumps(made, ensure_ascii=False) + "\n")
                    written += 1
    return written


def _judge(config: GenerateConfig, part: str | None) -> GenerativeRewardConfig | PairwiseRewardConfig:
    parts: Mapping[str, Any] = {} if config.reward is None else config.reward.parts
    judges = {
        name: found
        for name, found in parts.items()
        if isinstance(found, GenerativeRewardConfig | PairwiseRewardConfig)
    }
    there = ", ".join(judges) or "none"
    if part is not None and part not in judges:
        raise ConfigError(f"reward.parts has no judge {part!r} (kind: generative or pairwise); there are: {there}")
    if part is None and len(judges) != 1:
        raise ConfigError(
            f"reward.parts has {len(judges)} judges (kind: generative or pairwise): {there}; name one"
        )
    return judges[part] if part is not None else next(iter(judges.values()))


def _text(value: Any, place: str) -> str:
    """A response as text; of messages, what the last one says."""
    if isinstance(value, list) and value and isinstance(value[-1], Mapping):
        value = value[-1].get("content")
    if not isinstance(value, str):
        raise DataError(f"{place}: a response must be text or messages that end with one, found {value!r:.60}")
    return value
