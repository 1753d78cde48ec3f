"""Single flags, by what they become."""

import shlex

import pytest
from rlhf_core import ConfigError
from rlhf_launch.importing.engine import Outcome
from rlhf_launch.importing.openrlhf.command import import_openrlhf
from rlhf_launch.importing.openrlhf.names import CLASSIC, SWITCHES
from rlhf_launch.importing.openrlhf.offline import OFFLINE
from rlhf_launch.importing.openrlhf.online import ONLINE
from rlhf_launch.importing.report import account, as_yaml
from rlhf_launch.importing.trl.command import import_trl
from rlhf_launch.importing.verl.command import import_verl
from rlhf_launch.selection.run import read_rule

PPO = "--pretrain m --reward_pretrain r --prompt_data d --max_samples 2048"
RUN = "--pretrain m --dataset d"


def openrlhf(entry, flags):
    base = PPO if entry == "train_ppo_ray" else RUN
    return import_openrlhf([f"openrlhf.cli.{entry}", *base.split(), *flags.split()])


def at(made, key):
    found = made.settings
    for part in key.split("."):
        found = found[int(part)] if isinstance(found, list) else found[part]
    return found


@pytest.mark.parametrize(
    ("entry", "flags", "key", "value"),
    [
        ("train_ppo_ray", "--actor_learning_rate 5e-7", "train.optimizer.learning_rate", 5e-7),
        ("train_ppo_ray", "--actor.adam.lr 5e-7", "train.optimizer.learning_rate", 5e-7),
        ("train_ppo_ray", "--critic.max_norm 0.5", "train.critic_optimizer.max_grad_norm", 0.5),
        ("train_ppo_ray", "--l2 0.01", "train.critic_optimizer.weight_decay", 0.01),
        ("train_ppo_ray", "--lambd 0.95", "algorithm.lam", 0.95),
        ("train_ppo_ray", "", "algorithm.lam", 1.0),
        ("train_ppo_ray", "", "algorithm.kl_coef", 0.01),
        ("train_ppo_ray", "", "algorithm.value_loss_options.clip_range", 0.5),
        ("train_ppo_ray", "", "train.optimizer.warmup", 0.03),
        ("train_ppo_ray", "--use_kl_loss --kl_estimator k3", "algorithm.kl_in", "loss"),
        ("train_ppo_ray", "--no_advantage_std_norm", "algorithm.whiten_options.kind", "center"),
        ("train_ppo_ray", "--eps_clip_low_high 0.2 0.27", "algorithm.loss_options.clip_range_high", 0.27),
        ("train_ppo_ray", "--policy_loss_type gspo --n_samples_per_prompt 2", "algorithm.loss", "gspo"),
        ("train_ppo_ray", "--rollout_batch_size 1024 --train_batch_size 128", "train.minibatches", 8),
        ("train_ppo_ray", "--rollout_batch_size 128 --n_samples_per_prompt 16 --train_batch_size 256",
         "train.minibatches", 8),
        ("train_ppo_ray", "--rollout_batch_size 1024 --num_episodes 3", "train.steps", 6),
        ("train_ppo_ray", "--max_epochs 2", "train.epochs_per_step", 2),
        ("train_ppo_ray", "--micro_train_batch_size 4 --prompt_max_len 1024 --generate_max_len 512",
         "train.max_tokens_per_micro_batch", 6144),
        ("train_ppo_ray", "--use_dynamic_batch --train_max_tokens_per_gpu 9000",
         "train.max_tokens_per_micro_batch", 9000),
        ("train_ppo_ray", "--data.max_len 3000 --rollout.max_new_tokens 2000", "lengths.max_prompt_tokens", 1000),
        ("train_ppo_ray", "--data.max_len 2048", "rollout.sampling.max_tokens", 1024),
        ("train_ppo_ray", "--actor_num_nodes 2 --actor_num_gpus_per_node 8", "train.ranks", 16),
        ("train_ppo_ray", "--actor_num_nodes 2 --actor_num_gpus_per_node 8", "placement.policy.hosts", 2),
        ("train_ppo_ray", "--colocate_critic_reward", "placement.reward.model.colocate_with", "critic"),
        ("train_ppo_ray", "--colocate_all_models", "placement.rollout.colocate_with", "policy"),
        ("train_ppo_ray", "--ref_reward_offload", "placement.reference.options.offload_parameters", True),
        ("train_ppo_ray", "--async_train --partial_rollout", "rollout.overlap.max_staleness", 1),
        ("train_ppo_ray", "--enable_vllm_is_correction", "algorithm.off_policy.0", {"low": None, "high": 2.0}),
        ("train_ppo_ray", "--algo.advantage.is_correction_enable", "algorithm.off_policy.0",
         {"low": 0.5, "high": 5.0}),
        ("train_ppo_ray", "--stop_properly_penalty_coef -0.5", "algorithm.shaping.truncation_score", -0.5),
        ("train_ppo_ray", "--stop_properly_penalty_coef 0.0", "algorithm.shaping.truncation_factor", 0.0),
        ("train_ppo_ray", "--remote_rm_url http://a:1/x,http://b:1/x", "reward.parts.http.endpoints.urls",
         ["http://a:1/x", "http://b:1/x"]),
        ("train_ppo_ray", "--pretrain_data a,b --pretrain_data_probs 0.3,0.7 --input_key t", "data.pretrain",
         [{"path": "a", "columns": {"text": "t"}, "weight": 0.3},
          {"path": "b", "columns": {"text": "t"}, "weight": 0.7}]),
        ("train_ppo_ray", "--pretrain_data a", "algorithm.ptx_coef", 0.05),
        ("train_ppo_ray", "--pretrain_data a --ptx_coef 0.2", "algorithm.ptx_coef", 0.2),
        ("train_ppo_ray", "--normalize_reward", "reward.normalize", {"model": {"source": "measured"}}),
        ("train_ppo_ray", "--enable_ema", "train.average_decay", 0.992),
        ("train_ppo_ray", "--ds_tensor_parallel_size 2 --zero_stage 2", "placement.reference.options.stage", 3),
        ("train_dpo", "--ipo", "algorithm.loss", "ipo"),
        ("train_dpo", "", "train.optimizer.learning_rate", 1e-5),
        ("train_dpo", "", "lengths.max_length", 512),
        ("train_dpo", "--ref_pretrain old", "model.reference", "old"),
        ("train_dpo", "--ring_attn_size 2", "train.ranks", 2),
        ("train_dpo", "--micro_train_batch_size 1 --max_len 8192", "train.max_tokens_per_micro_batch", 16384),
        ("train_sft", "", "train.epochs", 2),
        ("train_sft", "", "data.prompt_template", "User: {}\nAssistant: "),
        ("train_sft", "--input_key q --output_key a", "data.train.0.columns", {"prompt": "q", "completion": "a"}),
        ("train_sft", "--pretrain_mode", "data.train.0.columns", {"text": "input"}),
        ("train_sft", "--lora_rank 8 --load_in_4bit", "model.lora",
         {"rank": 8, "alpha": 16.0, "dropout": 0.0, "target_modules": "all-linear", "quantize": "nf4"}),
        ("train_rm", "--loss logexp", "algorithm.loss", "log_exp"),
        ("train_kto", "", "algorithm.beta", 0.01),
        ("train_prm", "--placeholder_token ки --reward_tokens + -", "algorithm.label_tokens", ["+", "-"]),
        ("train_kd", "--teacher_model big", "algorithm.kd_coef", 0.4),
    ],
)  # fmt: skip
def test_openrlhf(entry, flags, key, value):
    assert at(openrlhf(entry, flags), key) == value


@pytest.mark.parametrize(
    ("estimator", "name", "clipped_after"),
    [
        ("reinforce", "reinforce_pp", None),
        ("rloo", "rloo", True),
        ("reinforce_baseline", "reinforce_pp_baseline", True),
        ("group_norm", "grpo", True),
        ("dr_grpo", "grpo", True),
    ],
)
def test_estimators_of_openrlhf(estimator, name, clipped_after):
    made = openrlhf("train_ppo_ray", f"--advantage_estimator {estimator} --n_samples_per_prompt 4")
    algorithm = made.settings["algorithm"]
    assert algorithm["name"] == name
    assert algorithm["kl_in"] == "reward"
    assert algorithm["shaping"].get("clip_after_baseline") == clipped_after
    assert "critic" not in made.settings["placement"]
    assert "critic_optimizer" not in made.settings["train"]


@pytest.mark.parametrize(
    ("entry", "flags", "setting", "outcome", "note"),
    [
        ("train_dpo", "--flash_attn", "--flash_attn", Outcome.MEANINGLESS, "attention"),
        ("train_dpo", "--attn_implementation flash_attention_2", "--attn_implementation", Outcome.EXACT, ""),
        ("train_dpo", "--ds.ring_attn_size 2", "--ds.ring_attn_size", Outcome.NOTED, "Ulysses"),
        ("train_dpo", "--use_wandb KEY", "--use_wandb", Outcome.UNAVAILABLE, "metrics.jsonl"),
        ("train_dpo", "--zero_stag 3", "--zero_stag", Outcome.UNKNOWN, "zero_stage"),
        ("train_ppo_ray", "--remote_rm_url /x/reward_func.py", "--remote_rm_url", Outcome.NOTED, "PYTHONPATH"),
        ("train_ppo_ray", "--ptx_coef 0.1", "--ptx_coef", Outcome.NOTED, "without --pretrain_data"),
        ("train_ppo_ray", "--pretrain_data a --temperature 0.7", "--pretrain_data", Outcome.UNAVAILABLE, "write 1"),
        ("train_ppo_ray", "--normalize_reward", "--normalize_reward", Outcome.NOTED, "source: given"),
        ("train_ppo_ray", "--image_key images", "--image_key", Outcome.NOTED, "<image>"),
        ("train_ppo_ray", "--max_images_per_prompt 2", "--max_images_per_prompt", Outcome.EXACT, ""),
    ],
)
def test_the_account(entry, flags, setting, outcome, note):
    made = openrlhf(entry, flags)
    (finding,) = [finding for finding in made.findings if finding.setting == setting]
    assert finding.outcome is outcome
    assert note in finding.note
    assert made.complete == (outcome not in (Outcome.UNAVAILABLE, Outcome.UNKNOWN))


INFERENCE = "--pretrain m --dataset d.jsonl --output_path o.jsonl"


@pytest.mark.parametrize(
    ("flags", "command", "key", "value"),
    [
        ("--eval_task generate --best_of_n 4", "rlhf generate", "rollout.samples_per_prompt", 4),
        ("--eval_task generate --iter 0 --rollout_batch_size 100", "rlhf generate", "data.train.0.limit", 100),
        ("--eval_task generate --iter 0 --max_samples 7", "rlhf generate", "data.train.0.limit", 7),
        ("--eval_task generate --enable_csft --csft_prompt <s>:5", "rlhf generate", "data.prompt_template",
         "{}<s>:5 "),
        ("--eval_task rm", "rlhf score", "reward.model", "m"),
        ("--eval_task rm", "rlhf score", "data.train", [{"path": "d.jsonl"}]),
        ("--eval_task rm", "rlhf score", "output", "o.jsonl"),
        ("--eval_task rm --input_key chosen", "rlhf score", "data.train.0.columns", {"messages": "chosen"}),
        ("--eval_task rm --input_key q --output_key a", "rlhf score", "data.train.0.columns",
         {"prompt": "q", "response": "a"}),
        ("--eval_task rm --post_processor rs", "rlhf score", "output", "o.scored.jsonl"),
    ],
)  # fmt: skip
def test_batch_inference_generates_or_scores(flags, command, key, value):
    made = import_openrlhf(["openrlhf.cli.batch_inference", *INFERENCE.split(), *flags.split()])
    assert made.complete
    assert made.command == command
    assert at(made, key) == value


@pytest.mark.parametrize(
    ("processor", "rule"), [("rs", "best_of_n"), ("iter_dpo", "pairs"), ("csft", "conditional")]
)
def test_what_follows_a_scored_file_is_chosen_by_a_command_of_its_own(processor, rule):
    flags = f"{INFERENCE} --eval_task rm --post_processor {processor}".split()
    made = import_openrlhf(["openrlhf.cli.batch_inference", *flags])
    (remark,) = made.remarks
    assert remark.startswith(f"Then run: rlhf select {rule} o.scored.jsonl -o o.jsonl")
    # What comes after is read as the command reads it.
    settings = shlex.split(remark.partition("-o o.jsonl")[2])
    assert (len(settings), bool(read_rule(rule, settings))) == (int(rule == "conditional"), True)


def test_later_iterations_and_other_tasks_are_refused():
    made = import_openrlhf(["openrlhf.cli.batch_inference", *f"{INFERENCE} --eval_task generate --iter 2".split()])
    assert [finding.setting for finding in made.left_out] == ["--iter"]
    assert "rows 4097 to 6144" in made.left_out[0].note
    with pytest.raises(ConfigError, match="known are generate_vllm, generate and rm"):
        import_openrlhf(["openrlhf.cli.batch_inference", *f"{INFERENCE} --eval_task judge".split()])


def test_a_key_of_an_account_is_printed_nowhere():
    made = openrlhf("train_dpo", "--use_wandb 0123secret")
    assert "0123secret" not in as_yaml(made) + account(made)


def test_names_with_dots_lead_to_flags_that_a_table_has():
    tables = [ONLINE, *(table for table, _ in OFFLINE.values())]
    known = {name for table in tables for name in table} | {"generate_max_len"}
    assert set(CLASSIC.values()) <= known
    assert {"gradient_checkpointing", "ipo"} <= SWITCHES


@pytest.mark.parametrize(
    ("entry", "flags", "message"),
    [
        ("train_dpo", "--max_epochs one", "--max_epochs: the value 'one' cannot be read"),
        ("train_dpo", "--bf16 yes", "--bf16 is a switch"),
        ("train_dpo", "--dataset_probs 0.5,0.5", "2 probabilities for 1 datasets"),
        ("train_ppo_ray", "--advantage_estimator x", "known are gae"),
        ("train_ppo_ray", "--advantage_estimator rloo", "samples_per_prompt must be at least 2"),
        ("train_ppo_ray", "--max_samples $N", "a value cannot be read"),
        ("train_everything", "", "known are train_ppo_ray"),
    ],
)
def test_bad_commands_of_openrlhf(entry, flags, message):
    with pytest.raises(ConfigError, match=message):
        openrlhf(entry, flags)


VERL = (
    "data.train_files=d.parquet actor_rollout_ref.model.path=m reward_model.enable=True reward_model.model.path=r"
)


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        ("", "algorithm.name", "ppo"),
        ("", "algorithm.kl_coef", 0.0),
        ("", "algorithm.loss_options.dual_clip", 3.0),
        ("", "train.optimizer.weight_decay", 0.01),
        ("data.train_batch_size=512 actor_rollout_ref.actor.ppo_mini_batch_size=128", "train.minibatches", 4),
        ("algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=5", "rollout.samples_per_prompt", 5),
        ("actor_rollout_ref.actor.use_kl_loss=True", "algorithm.kl_estimator", "k3"),
        ("algorithm.use_kl_in_reward=True", "algorithm.kl_in", "reward"),
        ("trainer.n_gpus_per_node=8 trainer.nnodes=2 actor_rollout_ref.rollout.tensor_model_parallel_size=4",
         "rollout.engines", 4),
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16", "train.max_tokens_per_micro_batch", 16384),
        ("data.train_files=['a','b']", "data.train", [{"path": "a"}, {"path": "b"}]),
        ("actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean", "algorithm.loss_options.aggregation",
         "seq_mean_token_mean"),
    ],
)  # fmt: skip
def test_verl(overrides, key, value):
    assert at(import_verl(["verl.trainer.main_ppo", *VERL.split(), *overrides.split()]), key) == value


def test_unknown_overrides_of_verl_are_named():
    made = import_verl(["verl.trainer.main_ppo", *VERL.split(), "+trainer.n_gpu=8"])
    assert [finding.setting for finding in made.left_out] == ["+trainer.n_gpu"]


def test_verl_s_rules_by_data_source_are_left_to_be_written():
    made = import_verl(["verl.trainer.main_ppo", *VERL.split()[:2]])
    assert not made.left_out
    assert not made.complete
    assert "data_source" in account(made)


@pytest.mark.parametrize(
    ("method", "settings", "key", "value"),
    [
        ("sft", {}, "train.optimizer.learning_rate", 2e-5),
        ("sft", {}, "train.optimizer.schedule", "linear"),
        ("sft", {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8}, "train.batch_size", 16),
        ("dpo", {"loss_type": ["ipo"]}, "algorithm.loss", "ipo"),
        ("kto", {"loss_type": "apo_zero_unpaired"}, "algorithm.loss", "apo_zero"),
        ("reward", {"center_rewards_coefficient": 0.01}, "algorithm.center_coef", 0.01),
        ("grpo", {"reward_funcs": "my.f"}, "algorithm.loss_options.aggregation", "token_mean"),
        ("grpo", {"reward_funcs": "my.f", "num_generations": 4}, "train.prompts_per_step", 2),
        ("grpo", {"reward_funcs": "my.f", "beta": 0.04}, "algorithm.kl_coef", 0.04),
    ],
)
def test_trl(method, settings, key, value):
    made = import_trl(method, {"model_name_or_path": "m", "dataset_name": "d", **settings}, source="x.yaml")
    assert at(made, key) == value


def test_unknown_settings_of_trl_are_named():
    made = import_trl("sft", {"model_name_or_path": "m", "dataset_name": "d", "lerning_rate": 1}, source="x.yaml")
    (finding,) = made.left_out
    assert finding.outcome is Outcome.UNKNOWN
    assert "learning_rate" in finding.note


def test_columns_of_images_are_renamed_and_counted():
    made = openrlhf("train_ppo_ray", "--image_key pictures --max_images_per_prompt 2")
    assert made.settings["data"]["train"][0]["columns"]["images"] == "pictures"
    assert made.settings["rollout"]["options"]["limit_mm_per_prompt"] == {"image": 2}
    assert "images" not in openrlhf("train_ppo_ray", "").settings["data"]["train"][0].get("columns", {})
