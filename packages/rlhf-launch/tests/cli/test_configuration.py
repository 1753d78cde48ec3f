"""Configurations that explain themselves: `rlhf init`, --print-config, reference pages; one key for one thing."""

import dataclasses
import json
import typing
from pathlib import Path

import pytest
import yaml
from rlhf_algos import METHODS, NAMED_RECIPES, OfflineConfig, from_mapping, load_config
from rlhf_core import ConfigError
from rlhf_launch.cli.configuration import reference_pages, starting_file
from rlhf_launch.cli.main import app
from rlhf_launch.config.printing import printed
from rlhf_launch.config.renamed import RENAMED
from rlhf_launch.config.run import OnlineConfig
from rlhf_launch.rounds.config import RoundsConfig
from typer.testing import CliRunner

ONLINE = {"model": "m", "data": {"train": "a.jsonl"}, "reward": {"function": "m:f"}}
OFFLINE = {"model": "m", "data": {"train": "a.jsonl"}, "output": "o"}


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("method", [*NAMED_RECIPES, *METHODS])
def test_every_method_has_a_file_to_start_from(method, full, tmp_path):
    path = tmp_path / "start.yaml"
    path.write_text(starting_file(method, full=full))
    config = load_config(OnlineConfig if method in NAMED_RECIPES else OfflineConfig, path)
    assert config.algorithm.name == method
    assert config.data.train[0].path == "data.jsonl"


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(
    ("name", "method", "kind"),
    [
        ("raft", "sft", "best_of_n"),
        ("iterative-dpo", "dpo", "pairs"),
        ("conditional_sft", "sft", "conditional"),
    ],
)
def test_every_way_to_go_in_rounds_has_a_file_to_start_from(name, method, kind, full, tmp_path):
    path = tmp_path / "start.yaml"
    path.write_text(starting_file(name, full=full))
    config = load_config(RoundsConfig, path)
    assert (config.algorithm.name, config.select.kind) == (method, kind)


def test_init_writes_once_and_knows_its_methods(tmp_path):
    path = tmp_path / "dpo.yaml"
    assert CliRunner().invoke(app, ["init", "dpo", "-o", str(path)]).exit_code == 0
    again = CliRunner().invoke(app, ["init", "dpo", "-o", str(path)])
    assert again.exit_code == 2
    assert "exists" in again.output
    unknown = CliRunner().invoke(app, ["init", "gpro"])
    assert unknown.exit_code == 2
    assert "did you mean" in unknown.output


@pytest.mark.parametrize(("cls", "settings"), [(OnlineConfig, ONLINE), (OfflineConfig, OFFLINE)])
def test_what_is_printed_has_a_comment_for_every_key_and_reads_back(cls, settings, tmp_path):
    config = from_mapping(cls, settings | {"placement": {"device": "cpu"}, "seed": 7}, source="test")
    text = printed(config)
    path = tmp_path / "printed.yaml"
    path.write_text(text)
    assert load_config(cls, path) == config
    for option in ("stage:", "offload_optimizer:"):  # of the engine deepspeed, which is installed here
        assert f"#   {option}" in text
    assert "# lora:" in text


def keys(cls, prefix=""):
    """Every dotted key below a configuration class."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        yield prefix + field.name
        inner = [m for m in (hints[field.name], *typing.get_args(hints[field.name])) if dataclasses.is_dataclass(m)]
        if len(inner) == 1:
            yield from keys(inner[0], f"{prefix}{field.name}.")


def test_online_and_offline_runs_say_one_thing_with_one_key():
    online, offline = set(keys(OnlineConfig)), set(keys(OfflineConfig))
    for group in ("model", "data", "lengths", "checkpoint", "placement", "output", "seed", "tensorboard"):
        ours = {key for key in online if key.split(".")[0] == group}
        if group == "placement":  # an offline run has no roles to place, and is not planned
            roles = ("placement.layout", "placement.policy", "placement.critic", "placement.reference")
            roles += ("placement.teacher", "placement.rollout", "placement.reward", "placement.check_memory")
            ours = {key for key in ours if not key.startswith(roles)}
        if group == "data":  # offline, every row comes once an epoch, and there are no samples to learn text beside
            ours = {key for key in ours if not key.startswith(("data.curriculum", "data.pretrain"))}
        assert ours == {key for key in offline if key.split(".")[0] == group}, group
    # A name that both have stands in the same place in both, unless only one of them knows the group.
    shared = {key.rpartition(".")[2] for key in online} & {key.rpartition(".")[2] for key in offline}
    for name in shared - {"name", "path", "weight"}:
        places = [{key for key in side if key.rpartition(".")[2] == name} for side in (online, offline)]
        assert places[0] & places[1], f"{name}: {places}"


@pytest.mark.parametrize("old", sorted(RENAMED))
def test_an_old_key_is_refused_with_its_new_name(old, tmp_path):
    path = tmp_path / "old.yaml"
    settings: dict = {}
    inner = settings
    *groups, last = old.replace("*", "some").split(".")
    for group in groups:
        inner = inner.setdefault(group, {})
    inner[last] = "x"
    path.write_text(yaml.safe_dump(settings))
    with pytest.raises(ConfigError, match="has another name now") as caught:
        load_config(OnlineConfig, path)
    assert RENAMED[old] in str(caught.value)


def test_the_pages_in_docs_are_those_of_the_code():
    docs = Path(__file__).parents[4] / "docs"
    if not docs.exists():
        pytest.skip("the docs are not beside the packages here")
    for name, text in reference_pages().items():
        assert (docs / name).read_text(encoding="utf-8") == text, f"docs/{name} is stale: run `nox -s docs`"


def test_the_schema_takes_what_the_loader_takes():
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(reference_pages()["schema/train.json"])
    jsonschema.validate(ONLINE, schema)
    jsonschema.validate(yaml.safe_load(starting_file("dapo", full=True)), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(ONLINE | {"trian": {}}, schema)
