"""Workers on a cluster have another working directory: what they are given must not depend on it."""

from pathlib import Path

from rlhf_launch.config.paths import absolute


def test_output_and_all_models_have_absolute_paths(settings, make_config, folder, monkeypatch):
    monkeypatch.chdir(folder)
    parts = {
        "judge": {"kind": "model", "path": "reward"},
        "sum": {"kind": "function", "function": "launch_rewards:share_of_alphanumerics"},
    }
    config = absolute(
        make_config(
            settings,
            model={"path": "policy", "tokenizer": "policy", "reference": "some-org/hub-name"},
            algorithm={"name": "grpo", "kl_coef": 0.1},
            reward={"parts": parts},
            output="runs/relative",
        )
    )
    assert config.model.path == config.model.tokenizer == str(folder / "policy")
    assert config.model.reference == "some-org/hub-name"
    assert config.reward.parts["judge"].path == str(folder / "reward")
    assert config.output == Path(folder) / "runs" / "relative"
    assert absolute(make_config(settings, reward={"model": "reward"})).reward.model == str(folder / "reward")
