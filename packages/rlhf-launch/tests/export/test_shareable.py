"""Nothing of a machine and no secret is in what a card shows."""

import json
from pathlib import Path

import pytest
from rlhf_launch.export.shareable import LEFT_OUT, shareable_settings, shareable_text, without_secrets

SETTINGS = {
    "model": {
        "path": "/home/ann/models/base",
        "reference": None,
        "tokenizer": "/home/ann/tok",
        "chat_template": None,
    },
    "data": {
        "train": [
            {"path": "/home/ann/My data/pairs.jsonl", "columns": {"prompt": "question"}},
            {"path": "org/set"},
        ],
        "system_prompt": "Be brief. Ask /home/ann/contact/list if in doubt.",
    },
    "reward": {
        "parts": {
            "service": {
                "kind": "http",
                "weight": 1.0,
                "endpoints": {
                    "urls": ["http://ann:pw@10.1.2.3:80/score?key=1"],
                    "api_key_env": "SCORING_KEY",
                    "headers": {"Authorization": "Bearer abcdefghijkl"},
                },
            },
            "rm": {"kind": "model", "path": "/mnt/disk/rm"},
            "own": {
                "kind": "function",
                "function": "rewards:f",
                "options": {"api_key": "k-1234", "table": "/etc/a/b"},
            },
        }
    },
    "rollout": {"sampling": {"max_tokens": 8, "stop_token_ids": [1], "stop": ["</s>"]}, "options": {"x": "~/y/z"}},
    "train": {"optimizer": {"learning_rate": 1e-6}},
    "algorithm": {"name": "grpo"},
    "placement": {"ray_address": "ray://head:10001", "forward_env": ["SECRET"]},
    "output": "/home/ann/runs/x",
}


def test_settings_keep_their_meaning_and_lose_the_machine():
    found = shareable_settings(SETTINGS)
    text = json.dumps(found)
    for leak in ("/home", "ann", "10.1.2.3", "SCORING_KEY", "Bearer", "k-1234", "/etc", "/mnt", "My data", "head:"):
        assert leak not in text, leak
    assert found["model"]["path"] == "base"
    assert [each["path"] for each in found["data"]["train"]] == ["pairs.jsonl", "org/set"]
    assert found["data"]["train"][0]["columns"] == {"prompt": "question"}
    assert found["reward"]["parts"]["service"]["endpoints"]["urls"] == [LEFT_OUT]
    assert found["reward"]["parts"]["own"]["function"] == "rewards:f"
    assert found["rollout"]["sampling"] == {"max_tokens": 8, "stop_token_ids": [1], "stop": ["</s>"]}
    assert found["rollout"]["options"] == {"x": "z"}
    assert found["train"] == {"optimizer": {"learning_rate": 1e-6}}
    assert "placement" not in found
    assert "output" not in found


@pytest.mark.parametrize(
    "text", ["and/or", "a / b", "1/2/3", "yes</think>/no", "org/name", "Rating: N/10", "\\boxed{4}", "x:y"]
)
def test_plain_text_stays_as_it_is(text):
    assert shareable_text(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("run:/srv/ann/x.py", "run:x.py"),
        ("('/srv/ann/x', \"~/y\")", "('x', \"y\")"),
        (r"C:\Users\ann\x.py", "x.py"),
        (r"\\host\share\x.py", "x.py"),
        ("s3://bucket/key and file:///srv/ann", f"{LEFT_OUT} and {LEFT_OUT}"),
        (f"{Path.cwd()}/deep/below/x.py", "x.py"),
    ],
)
def test_directories_are_cut_to_their_last_part(text, shown):
    assert shareable_text(text) == shown


def test_values_of_secret_variables_are_left_out_wherever_they_are(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "not-like-any-key")
    monkeypatch.setenv("HF_TOKEN", "hf_short-one")
    assert without_secrets("a not-like-any-key b hf_short-one") == f"a {LEFT_OUT} b {LEFT_OUT}"
