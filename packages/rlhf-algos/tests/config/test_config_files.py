from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from rlhf_algos.config.loader import dump_config, load_config
from rlhf_core import ConfigError, EngineConfig, OptimizerConfig


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, kw_only=True, slots=True)
class Circle:
    kind: Literal["circle"] = "circle"
    radius: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Square:
    kind: Literal["square"] = "square"
    side: int = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    path: str
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    name: str
    steps: int = 3
    out: Path | None = None
    betas: tuple[float, float] = (0.9, 0.99)
    mode: Literal["sync", "async"] = "sync"
    color: Color = Color.RED
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    reference: EngineConfig | None = None
    shape: Circle | Square = field(default_factory=Circle)
    sources: tuple[Source, ...] = ()
    stages: Mapping[str, Source] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    verbose: bool = False


def load(tmp_path: Path, text: str, *overrides: str) -> Config:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return load_config(Config, path, overrides)


def test_nested_values_are_typed(tmp_path):
    config = load(
        tmp_path,
        """
name: a
out: runs/x
betas: [0.8, 1]
mode: async
color: blue
optimizer: {learning_rate: 3e-5, betas: [0.9, 0.95]}
reference: {model: m, role: reference}
shape: {kind: square, side: 4}
sources: [{path: p, weight: 2}]
stages: {first: {path: q}}
options: {anything: [1, {deep: 1e-3}]}
""",
        "optimizer.learning_rate=1e-4",
        "steps=7",
        "verbose=true",
        "stages.first.weight=0.5",
    )
    assert config.out == Path("runs/x")
    assert config.betas == (0.8, 1.0)
    assert config.color is Color.BLUE
    assert config.optimizer.learning_rate == 1e-4
    assert config.reference == EngineConfig(model="m", role="reference")
    assert config.shape == Square(side=4)
    assert config.sources == (Source(path="p", weight=2.0),)
    assert config.stages["first"].weight == 0.5
    assert config.options == {"anything": [1, {"deep": 0.001}]}
    assert (config.steps, config.verbose) == (7, True)


def test_dump_and_load_give_an_equal_config(tmp_path):
    config = load(tmp_path, "{name: a, out: x, color: blue, sources: [{path: p}], reference: {model: m}}")
    assert load(tmp_path, dump_config(config)) == config


def test_defaults_and_overrides_need_no_file():
    assert load_config(Config, None, ["name=x"]).name == "x"


@pytest.mark.parametrize(
    ("text", "overrides", "parts"),
    [
        ("{name: a, optimizer: {learning_rat: 1}}", (), ["run.yaml", "'optimizer.learning_rat'", "learning_rate'"]),
        ("{nam: a}", (), ["unknown key 'nam'", "did you mean 'name'"]),
        ("{steps: 1}", (), ["missing name", "name: <value>"]),
        ("{name: a, steps: many}", (), ["steps must be a whole number", "'many'"]),
        ("{name: a, steps: true}", (), ["steps must be a whole number", "True"]),
        ("{name: a, steps: 1.5}", (), ["steps must be a whole number", "1.5"]),
        ("{name: 3}", (), ["name must be text", "3 (int)"]),
        ("{name: a, mode: fast}", (), ["mode must be one of sync, async", "'fast'"]),
        ("{name: a, color: green}", (), ["color must be one of red, blue"]),
        ("{name: a, shape: {kind: oval}}", (), ["shape.kind must be one of circle, square"]),
        ("{name: a, optimizer: 3}", (), ["optimizer must be a group of keys"]),
        ("{name: a, sources: [{path: p}, {weight: 1}]}", (), ["missing sources[1].path"]),
        ("{name: a, betas: [1, x]}", (), ["betas[1] must be a list of a number, a number", "'x'"]),
        ("{name: a, optimizer: {learning_rate: -1}}", (), ["run.yaml: optimizer:", "at least 0"]),
        ("{name: a, name: b}", (), ["'name' is given twice", "line 1"]),
        ("name: [a", (), ["run.yaml", "not valid YAML"]),
        ("[1, 2]", (), ["must be a mapping", "list"]),
        ("{name: a}", ("steps",), ["'steps' is not of the form key=value"]),
        ("{name: a}", ("name.x=1",), ["'name' is 'a', not a group"]),
    ],
)
def test_errors_name_the_key_and_the_file(tmp_path, text, overrides, parts):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, *overrides)
    for part in parts:
        assert part in str(caught.value)


def test_missing_file():
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(Config, Path("nowhere.yaml"), [])
