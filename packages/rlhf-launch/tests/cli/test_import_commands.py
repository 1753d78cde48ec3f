"""`rlhf import-openrlhf`, `import-verl` and `import-trl` as commands."""

import yaml
from rlhf_algos import OfflineConfig, load_config
from rlhf_launch import OnlineConfig
from rlhf_launch.cli.main import app
from typer.testing import CliRunner

DPO = "python3 -m openrlhf.cli.train_dpo --pretrain m --dataset d --beta 0.2"


def run(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_a_command_line_becomes_a_file_that_loads(tmp_path):
    path = tmp_path / "dpo.yaml"
    result = run("import-openrlhf", DPO + " --zero_stag 3", "-o", path)
    assert result.exit_code == 0, result.output
    assert "--zero_stag 3: no setting of this name" in result.stderr
    assert "partly: 1 left out" in result.stderr
    assert load_config(OfflineConfig, path).algorithm.loss.beta == 0.2
    again = run("import-openrlhf", DPO, "-o", path)
    assert again.exit_code == 2
    assert "exists" in again.stderr


def test_a_script_and_standard_output(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text("M=m\n" + DPO.replace("--pretrain m", "\\\n  --pretrain $M") + "\nopenrlhf.cli.train_sft\n")
    several = run("import-openrlhf", "--file", script)
    assert several.exit_code == 2
    assert "--pick" in several.stderr
    result = run("import-openrlhf", "--file", script, "--pick", 1)
    assert yaml.safe_load(result.stdout)["model"]["path"] == "m"


def test_nothing_is_written_for_what_our_reader_refuses(tmp_path):
    path = tmp_path / "ppo.yaml"
    line = "openrlhf.cli.train_ppo_ray --pretrain m --reward_pretrain r --prompt_data d --top_p 2"
    result = run("import-openrlhf", line, "-o", path)
    assert result.exit_code == 2
    assert "top_p" in result.stderr
    assert not path.exists()


def test_verl_and_trl(tmp_path):
    path = tmp_path / "grpo.yaml"
    model = "actor_rollout_ref.model.path=m actor_rollout_ref.rollout.n=4"
    line = f"algorithm.adv_estimator=grpo data.train_files=d {model}"
    result = run("import-verl", line, "-o", path)
    assert result.exit_code == 0, result.output
    assert load_config(OnlineConfig, path).rollout.samples_per_prompt == 4
    trl = tmp_path / "trl.yaml"
    trl.write_text("model_name_or_path: m\ndataset_name: d\n")
    assert yaml.safe_load(run("import-trl", "sft", trl).stdout)["algorithm"] == {"name": "sft"}
    assert run("import-trl", "ppo", trl).exit_code == 2
