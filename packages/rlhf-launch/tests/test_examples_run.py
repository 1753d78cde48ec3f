"""The files of examples/ run on tiny models in one process; agents, chain and recipes have tests of their own."""

import copy
import json
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from rlhf_algos import OfflineConfig, from_mapping, read_metrics
from rlhf_algos import train as train_alone
from rlhf_core.testing.tiny import save_tiny_model
from rlhf_launch import OnlineConfig, RoundsConfig, iterate, train
from transformers import AutoModelForCausalLM

FOLDER = Path(__file__).parents[3] / "examples"
pytestmark = [
    pytest.mark.stack,
    pytest.mark.skipif(not FOLDER.is_dir(), reason="the examples are not beside the packages here"),
]
QUIET = Console(quiet=True)
ONLINE = sorted(FOLDER.glob("*.yaml"))
ROUNDS = sorted(FOLDER.glob("rounds/*.yaml"))
SERVERS = ("service", "judge")
"""Parts of rewards.yaml that want a server at an address."""
SANDBOXED = ("program",)
"""Parts that want bubblewrap."""
VARIED = {"kind": "function", "function": "launch_rewards:share_of_alphanumerics"}
"""A reward that differs between answers of a random model."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Models and data under the names that the files give them."""
    folder = tmp_path_factory.mktemp("examples")
    for name in ("runs/tiny", "runs/student", "runs/teacher", "models/base"):
        save_tiny_model(folder / name)
    for seed, name in enumerate(("runs/tiny-reward", "models/reward")):
        save_tiny_model(folder / name, head="scalar", seed=seed)
    problems = [{"question": f"What is {n} + {n}?", "answer": f"Twice {n}.\n#### {2 * n}"} for n in range(40)]
    pairs = [
        {"prompt": f"{n}+{n}=", "question": f"{n}+{n}=", "chosen": str(2 * n), "rejected": "?"} for n in range(150)
    ]
    prompts = [{"prompt": f"What is {n} + {n}?", "gold": str(2 * n), "tests": "assert True"} for n in range(40)]
    files = {
        "gsm8k_train.jsonl": problems,
        "competition.jsonl": [{"problem": row["question"], "answer": row["answer"]} for row in problems],
        "prompts.jsonl": prompts,
        "held-out.jsonl": prompts[:4],
        "data/pairs.jsonl": pairs,
    }
    (folder / "data").mkdir()
    for name, rows in files.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    pandas = pytest.importorskip("pandas")
    pandas.DataFrame([{key: row[key] for key in ("question", "chosen", "rejected")} for row in pairs]).to_parquet(
        folder / "data" / "more.parquet"
    )
    return folder


def shrunk(content, **sections):
    """A file's settings with others on top, section by section."""
    content = copy.deepcopy(content)
    for section, changes in sections.items():
        content[section] = {**content.get(section, {}), **changes}
    return content


SMALL = {
    "train": {"engine": "torch", "ranks": 1, "steps": 2, "prompts_per_step": 4, "max_tokens_per_micro_batch": 512},
    "placement": {"executor": "local", "device": "cpu"},
}


def small_rollout(content):
    sampling = {**content["rollout"].get("sampling", {}), "max_tokens": 8}
    return {"backend": "transformers", "sampling": sampling, "samples_per_prompt": 2}


@pytest.mark.parametrize("path", [path for path in ONLINE if path.stem != "dpo"], ids=lambda path: path.stem)
def test_an_online_example_runs(path, inputs, tmp_path, monkeypatch):
    monkeypatch.chdir(inputs)
    content = yaml.safe_load(path.read_text())
    for name in SERVERS + SANDBOXED:
        content["reward"].get("parts", {}).pop(name, None) if "reward" in content else None
    if path.stem == "online_dpo":  # without a better and a worse answer there is no update
        content["reward"] = {"parts": {"varied": VARIED}}
    content = shrunk(content, **SMALL, rollout=small_rollout(content))
    config = from_mapping(OnlineConfig, content | {"output": str(tmp_path / "run")}, source=path.name)
    train(config, console=QUIET)
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows if "grad_norm" in row] == [1, 2]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")


def test_the_data_set_s_example_runs_in_one_process(inputs, tmp_path, monkeypatch):
    monkeypatch.chdir(inputs)
    content = yaml.safe_load((FOLDER / "dpo.yaml").read_text())
    # As the file itself says of a run in one process.
    content["train"] = {key: value for key, value in content["train"].items() if key != "options"}
    content = shrunk(content, train={"engine": "auto", "ranks": 1, "max_tokens_per_micro_batch": 512})
    config = from_mapping(OfflineConfig, content | {"output": str(tmp_path / "run")}, source="dpo.yaml")
    result = train_alone(config)
    assert result.metrics["accuracy"] > 0.9
    assert AutoModelForCausalLM.from_pretrained(result.model)


@pytest.mark.parametrize("path", ROUNDS, ids=lambda path: path.stem)
def test_an_example_of_rounds_runs(path, inputs, tmp_path, monkeypatch):
    monkeypatch.chdir(inputs)
    content = yaml.safe_load(path.read_text())
    content["rounds"] = 1
    # Random models earn nothing from a verifier: everything is kept.
    if content["select"]["kind"] == "threshold":
        content["select"]["threshold"] = 0.0
    if "min_margin" in content["select"]:
        content["select"]["min_margin"] = 1e-6
    if content["select"]["kind"] == "conditional":  # short answers alone have one level
        content["reward"]["parts"]["short"] = VARIED
    train_section = {"engine": "torch", "ranks": 1, "batch_size": 16, "max_tokens_per_micro_batch": 512}
    content = shrunk(content, train=train_section, placement=SMALL["placement"], rollout=small_rollout(content))
    config = from_mapping(RoundsConfig, content | {"output": str(tmp_path / "run")}, source=path.name)
    result = iterate(config, console=QUIET)
    assert AutoModelForCausalLM.from_pretrained(result.model)
