"""Rewards from the configuration: parsed, checked before anything starts, and all kinds at once in a real run."""

import json
import math
import socket
from pathlib import Path
from typing import get_args

import pytest
from rlhf_algos import dump_config, from_mapping
from rlhf_core import CapabilityError, ConfigError, DataError, PluginError, ResourceError
from rlhf_core.testing.tiny import byte_tokenizer
from rlhf_launch.config.reward import RewardSection
from rlhf_launch.config.run import OnlineConfig
from rlhf_launch.online.preflight import check_inputs
from rlhf_launch.online.run import train
from rlhf_launch.placement.plans import reward_plans
from rlhf_launch.placement.resolve import resolve_backends
from rlhf_launch.samples.prompts import Prompt
from rlhf_launch.samples.reward import check_reward
from rlhf_rollout import EnvironmentRewardConfig, RewardPart

PARTS = {
    "correct": {"kind": "math", "answer": "gold", "weight": 2},
    "tidy": {"kind": "regex", "pattern": "a+", "weight": 0.2, "on_failure": {"then": "drop"}},
    "short": {"kind": "length", "high": 10},
    "service": {"kind": "http", "endpoints": {"urls": ["http://host:8000/score"], "api_key_env": "KEY"}},
    "judge": {"kind": "judge", "endpoints": {"urls": ["http://host:8001/v1"]}, "model": "m"},
    "code": {"kind": "code", "column": "tests", "limits": {"wall_s": 2.0}},
    "rm": {"kind": "model", "path": "some/model"},
    "steps": {"kind": "steps", "path": "some/prm", "placeholder": "<|step|>"},
    "own": {"kind": "function", "function": "m:f", "isolated": True, "options": {"a": 1}},
}


def section(**settings):
    return from_mapping(RewardSection, settings, source="test")


def test_every_kind_is_parsed_and_survives_a_dump():
    parsed = section(parts=PARTS)
    assert {name: part.kind for name, part in parsed.parts.items()} == {n: p["kind"] for n, p in PARTS.items()}
    assert parsed.parts["correct"].weight == 2
    assert parsed.parts["tidy"].on_failure.then == "drop"
    assert list(parsed.engine_parts()) == ["rm", "steps"]
    import yaml

    assert from_mapping(RewardSection, yaml.safe_load(dump_config(parsed)), source="test") == parsed


def test_the_example_has_every_kind():
    from rlhf_algos import load_config

    example = Path(__file__).parents[4] / "examples" / "rewards.yaml"
    if not example.exists():
        pytest.skip("the examples are not beside the packages here")
    parts = load_config(OnlineConfig, example).reward.parts.values()
    assert {type(part) for part in parts} | {EnvironmentRewardConfig} == set(get_args(RewardPart))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"a": {"kind": "maths"}}, r"parts\.a\.kind must be one of code, environment.*found 'maths'"),
        ({"a": {"answer": "gold"}}, r"parts\.a\.kind must be one of"),
        ({"a": {"kind": "math", "anser": "gold"}}, r"'parts\.a\.anser'; did you mean 'parts\.a\.answer'"),
        ({"a": {"kind": "regex"}}, r"missing parts\.a\.pattern"),
        ({"a": {"kind": "regex", "pattern": "("}}, "not a regular expression"),
        ({"a": {"kind": "http", "endpoints": {"urls": ["host:80"]}}}, "'host:80' is not an address"),
        ({"a": {"kind": "math", "weight": "much"}}, r"parts\.a\.weight must be a number"),
        ({"a/b": {"kind": "math"}}, "'a/b' is no name"),
    ],
)
def test_mistakes_are_named(parts, message):
    with pytest.raises(ConfigError, match=message):
        section(parts=parts)


def test_short_forms_are_parts():
    parts = section(function="m:f", model="some/model", timeout_s=3).all_parts(environment=True)
    assert {name: part.kind for name, part in parts.items()} == {
        "function": "function",
        "model": "model",
        "environment": "environment",
    }
    assert parts["function"].timeout_s == 3
    with pytest.raises(ConfigError, match=r"reward\.model is the short form"):
        section(model="m", parts={"model": {"kind": "math"}})


def test_the_environment_is_a_part_once():
    parts = section(parts={"game": {"kind": "environment", "weight": 0.5}})
    assert list(parts.all_parts(environment=True)) == ["game"]
    with pytest.raises(ConfigError, match=r"no environment; set rollout\.agent"):
        parts.all_parts(environment=False)


def check(**parts):
    return check_reward(section(parts=parts), byte_tokenizer(), environment=False)


@pytest.fixture(scope="module")
def scoring_server(reward_modules):
    """Opens a server; see the module of this name."""
    import scoring_server

    return scoring_server.scoring_server


def test_a_code_reward_without_a_sandbox_is_refused(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(CapabilityError, match=r"reward 'program': this machine has no sandbox.*sandbox: none"):
        check(program={"kind": "code"})
    assert check(program={"kind": "code", "sandbox": "none"}).needed == {"program": frozenset({"tests"})}


def test_what_is_missing_is_found_before_anything_starts(monkeypatch, scoring_server):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with scoring_server() as (url, _):
        endpoints = {"urls": [url], "api_key_env": "NO_SUCH_KEY"}
        with pytest.raises(ConfigError, match="'NO_SUCH_KEY', which is not set"):
            check(a={"kind": "http", "endpoints": endpoints})
    with pytest.raises(ConfigError, match=r"reward 'a': no server answers at http://127\.0\.0\.1"):
        check(a={"kind": "judge", "model": "m", "endpoints": {"urls": [url]}})
    with pytest.raises(PluginError, match="nowhere"):
        check(a={"kind": "function", "function": "nowhere:f"})
    with pytest.raises(ConfigError, match="no/such/model"):
        check(a={"kind": "model", "path": "no/such/model"})


def test_an_extra_that_is_not_installed(monkeypatch):
    monkeypatch.setattr("rlhf_rollout.rewards.kinds.answers.find_spec", lambda name: None)
    with pytest.raises(PluginError, match=r"install rlhf-rollout\[math\]"):
        check(a={"kind": "math"})


def test_a_column_that_a_row_does_not_have():
    checked = check(a={"kind": "exact", "answer": "gold"}, b={"kind": "length", "high": 3})
    rows = [Prompt(prompt_id=str(i), text="q", token_ids=(5,), metadata={"gold": 1}) for i in range(2)]
    checked.check_columns(rows, "data.jsonl", environment=False)
    rows.append(Prompt(prompt_id="2", text="q", token_ids=(5,), metadata={"answer": 1}))
    with pytest.raises(DataError, match=r"data\.jsonl row 3: the reward 'a' needs the column 'gold'; found answer"):
        checked.check_columns(rows, "data.jsonl", environment=False)


def test_columns_of_episodes_need_not_be_in_the_data():
    reward = section(parts={"a": {"kind": "function", "function": "launch_rewards:by_turns"}})
    checked = check_reward(reward, byte_tokenizer(), environment=True)
    rows = [Prompt(prompt_id="0", text="q", token_ids=(5,), metadata={})]
    checked.check_columns(rows, "data.jsonl", environment=True)
    with pytest.raises(DataError, match="'turns'"):
        checked.check_columns(rows, "data.jsonl", environment=False)


def test_reward_models_have_ranks_and_engines_of_their_own(settings, make_config, folder):
    path = str(folder / "reward")
    parts = {
        "one": {"kind": "model", "path": path},
        "two": {"kind": "model", "path": path, "engine": "deepspeed"},
    }
    placement = {"executor": "ray", "reward": {"two": {"ranks": 2, "options": {"stage": 3}}}}
    own = {"model_arguments": {"low_cpu_mem_usage": True}}
    config = make_config(settings, reward={"parts": parts}, placement=placement, train__options=own)
    plans = reward_plans(config, resolve_backends(config))
    assert {name: [plan.name for plan in group] for name, group in plans.items()} == {
        "one": ["reward-one-0"],
        "two": ["reward-two-0", "reward-two-1"],
    }
    assert [plans[name][0].arguments[0] for name in plans] == ["torch", "deepspeed"]
    assert [plans[name][0].arguments[1].options for name in plans] == [own, {"stage": 3}]
    del placement["reward"]["two"]["options"]
    config = make_config(settings, reward={"parts": parts}, placement=placement, train__options=own)
    assert reward_plans(config, resolve_backends(config))["two"][0].arguments[1].options == {}, "not torch's"
    with pytest.raises(ResourceError, match=r"placement\.reward\.two\.ranks=2"):
        resolve_backends(make_config(settings, reward={"parts": parts}, placement__reward=placement["reward"]))
    parts["two"]["engine"] = "torch"
    config = make_config(settings, reward={"parts": parts}, placement=placement)
    with pytest.raises(ResourceError, match="reward-two: the engine torch has one rank, and 2 are asked for"):
        reward_plans(config, resolve_backends(config))


def test_a_reward_model_with_another_vocabulary(folder, tmp_path):
    from rlhf_launch.quickstart.arithmetic import make_model

    make_model(tmp_path / "other", seed=0)
    with pytest.raises(ConfigError, match="another vocabulary than the policy"):
        check(a={"kind": "model", "path": str(tmp_path / "other")})


@pytest.fixture(scope="module")
def all_kinds(folder, tmp_path_factory, scoring_server):
    """A run with eight parts at once, a real server among them: its metrics, and what the server was asked."""
    output = tmp_path_factory.mktemp("kinds")
    path = str(folder / "reward")
    with scoring_server() as (url, asked), pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCORING_KEY", "secret")
        endpoints = {"urls": [url + "/score"], "api_key_env": "SCORING_KEY"}
        parts = {
            "own": {"kind": "function", "function": "launch_rewards:digits", "options": {"offset": 1.0}},
            "alone": {"kind": "function", "function": "launch_rewards:share_of_alphanumerics", "isolated": True},
            "sum": {"kind": "math", "answer": "answer", "isolated": False},
            "tidy": {"kind": "regex", "pattern": "[a-z]*", "weight": 0.5},
            "service": {"kind": "http", "endpoints": endpoints, "weight": 4.0},
            "judge": {"kind": "judge", "model": "m", "endpoints": {"urls": [url + "/v1"]}, "weight": 0.0},
            "rm": {"kind": "model", "path": path, "weight": 0.1},
            "rm2": {"kind": "model", "path": path, "weight": -0.1},
        }
        settings = {
            "model": {"path": str(folder / "policy")},
            "data": {"train": str(folder / "prompts.jsonl"), "hold_out": 2},
            "lengths": {"max_prompt_tokens": 16},
            "reward": {"parts": parts},
            "rollout": {"backend": "transformers", "samples_per_prompt": 4, "sampling": {"max_tokens": 8}},
            "train": {
                "engine": "torch",
                "max_tokens_per_micro_batch": 512,
                "prompts_per_step": 4,
                "steps": 2,
                "optimizer": {"learning_rate": 1e-3},
            },
            "placement": {"executor": "local", "device": "cpu", "timeout_s": 300},
            "output": str(output),
        }
        train(from_mapping(OnlineConfig, settings, source="test"))
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "reward" in row], asked


@pytest.mark.stack
def test_the_score_is_the_weighted_sum_of_the_parts(all_kinds):
    rows, _ = all_kinds
    assert len(rows) == 2
    for row in rows:
        parts = {name: row[f"reward/{name}"] for name in ("own", "alone", "sum", "tidy", "service", "judge", "rm")}
        assert all(math.isfinite(value) for value in parts.values())
        assert (parts["service"], parts["judge"]) == (0.25, 1.0)
        assert row["reward/judge/rating"] == 10
        assert row["reward/own"] >= 1.0
        assert row["reward/own/length"] > 0
        assert row["reward/rm"] == pytest.approx(row["reward/rm2"], abs=1e-5)
        total = parts["own"] + parts["alone"] + parts["sum"] + 0.5 * parts["tidy"] + 4 * 0.25
        assert row["reward"] == pytest.approx(total, abs=1e-5)


@pytest.mark.stack
def test_the_service_gets_every_sample_once_with_its_columns_and_the_key(all_kinds):
    _, asked = all_kinds
    bodies = [body for body in asked if "sample_ids" in body]
    names = [name for body in bodies for name in body["sample_ids"]]
    trained = [name for name in names if not name.startswith("eval")]
    assert len(trained) == len(set(trained)) == 2 * 4 * 4
    assert len(names) == len(trained) + 2 * 2  # evaluation before and after
    assert all(body["authorization"] == "Bearer secret" for body in bodies)
    assert all(len(body["columns"]["answer"]) == len(body["completions"]) for body in bodies)


def test_a_missing_column_stops_a_run_before_anything_is_loaded(settings, make_config):
    config = make_config(settings, reward={"parts": {"a": {"kind": "exact", "answer": "gold"}}})
    with pytest.raises(DataError, match=r"row \d+: the reward 'a' needs the column 'gold'; found answer, prompt"):
        check_inputs(config)


@pytest.mark.stack
def test_faults_of_every_part_lose_no_sample_and_count_none_twice(settings, make_config, scoring_server):
    """The service fails, stalls and hangs up; a function raises for some samples and says NaN for others."""
    from launch_rewards import kind_of

    with socket.socket() as listener, scoring_server(["500", "stall", "drop"] * 3) as (url, answered):
        listener.bind(("127.0.0.1", 0))  # bound, not listening: it refuses
        urls = [f"http://127.0.0.1:{listener.getsockname()[1]}", url]
        parts = {
            "service": {
                "kind": "http",
                "endpoints": {"urls": urls, "timeout_s": 0.5, "attempts": 4, "backoff_s": 0.02},
                "on_failure": {"attempts": 10, "backoff_s": 0.02},
            },
            "picky": {
                "kind": "function",
                "function": "launch_rewards:picky",
                "on_failure": {"then": "drop", "attempts": 1},
            },
        }
        config = make_config(settings, reward={"parts": parts}, data__hold_out=0, train__prompts_per_step=8)
        run = train(config)
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "reward" in row]
    # A batch may have been asked for twice; a sample counts once.
    texts = {
        name: text for body in answered for name, text in zip(body["sample_ids"], body["completions"], strict=True)
    }
    assert len(texts) == 4 * sum(row["prompts/started"] for row in rows)
    lost = sum(kind_of(text) != "fine" for text in texts.values())
    assert lost > 0
    assert sum(row["dropped_samples"] for row in rows) == lost
    assert all(row["reward"] == pytest.approx(1.25) for row in rows)
