"""Every example command of the other frameworks, whose imports our own reader takes (`finish` asks it)."""

import collections
import dataclasses
import sys
from pathlib import Path

import pytest
import yaml
from rlhf_algos import OfflineConfig, from_mapping
from rlhf_core import TRAIN_ENGINES, ConfigError, load_plugin
from rlhf_launch import OnlineConfig
from rlhf_launch.config.generate import GenerateConfig
from rlhf_launch.importing.engine import Outcome
from rlhf_launch.importing.report import account, as_yaml

sys.path.insert(0, str(Path(__file__).parent))

from import_page import GROUPS, PAGE, commands, imports, page

MADE = list(imports())


@pytest.mark.parametrize(("group", "name", "made"), MADE, ids=[f"{group}: {name}" for group, name, _ in MADE])
def test_the_written_file_is_a_configuration_of_ours(group, name, made):
    if isinstance(made, ConfigError):
        assert "serve_rm" in str(made)
        return
    written = yaml.safe_load(as_yaml(made))
    kind = {"train": OnlineConfig, "generate": GenerateConfig, "score": GenerateConfig}.get(
        made.command.split()[1], OfflineConfig
    )
    assert from_mapping(kind, written, source=name) == from_mapping(kind, made.settings, source=name)
    known = {field.name for field in dataclasses.fields(load_plugin(TRAIN_ENGINES, "deepspeed").options_type)}
    assert set(made.settings.get("train", {}).get("options", {})) <= known
    assert not [finding.setting for finding in made.findings if finding.outcome is Outcome.UNKNOWN]
    assert all(finding.setting in account(made) for finding in made.findings)


@pytest.mark.parametrize("group", GROUPS)
def test_every_flag_of_a_command_has_an_entry(group):
    file, convert = GROUPS[group]
    for command in commands(file).values():
        try:
            made = convert(command)
        except ConfigError:
            continue
        given = {word.partition("=")[0] for word in command[1:] if word.startswith("--") or group == "verl"}
        assert {finding.setting for finding in made.findings} == given


def test_how_many_are_mapped():
    counts = collections.Counter(
        (group, "not" if isinstance(made, ConfigError) else "fully" if made.complete else "partly")
        for group, _, made in MADE
    )
    assert counts == {
        ("OpenRLHF, classic names", "fully"): 21,
        ("OpenRLHF, classic names", "partly"): 14,
        ("OpenRLHF, classic names", "not"): 1,
        ("OpenRLHF, names with dots", "fully"): 4,
        ("OpenRLHF, names with dots", "partly"): 8,
        ("OpenRLHF, names with dots", "not"): 1,
        ("verl", "fully"): 1,
        ("verl", "partly"): 16,
        ("TRL", "fully"): 5,
        ("TRL", "partly"): 1,
    }


def test_the_page_is_fresh():
    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text, "run packages/rlhf-launch/tests/importing/import_page.py"
