"""The whole stack, real: Ray places two ZeRO-3 ranks each of policy and critic, reference, reward model, vLLM.

Everything is started once; the tests run in order on the same workers.
"""

import dataclasses
import json
import math

import pytest
import torch
from rlhf_algos.config_files import from_mapping
from rlhf_core import ResourceError, collate
from rlhf_launch.assemble import open_run
from rlhf_launch.checkpoints import CheckpointStore
from rlhf_launch.collecting import sample_and_score
from rlhf_launch.config import RunConfig
from rlhf_launch.online import add_model_outputs, train
from rlhf_launch.preflight import check_inputs
from rlhf_launch.report import Reporter

pytestmark = pytest.mark.stack


def settings(folder, output_dir):
    return {
        "model": {"policy": str(folder / "policy")},
        "data": {"prompts": str(folder / "prompts.jsonl"), "max_prompt_tokens": 16},
        "reward": {"model": str(folder / "reward"), "function": "launch_rewards:share_of_alphanumerics"},
        "algorithm": {"name": "ppo", "ppo": {"kl_coef": 0.05}},
        "rollout": {"samples_per_prompt": 2, "sampling": {"max_tokens": 12}, "max_num_seqs": 32},
        "train": {
            "ranks": 2,
            "prompts_per_step": 6,
            "minibatches": 2,
            "optimizer": {"learning_rate": 1e-3},
            "critic_optimizer": {"learning_rate": 1e-3},
        },
        "placement": {"executor": "ray", "device": "cpu"},
        "output_dir": str(output_dir),
        "steps": 3,
        "checkpoint_every": 2,
    }


def metric_rows(run):
    rows = map(json.loads, (run.reporter.directory / "metrics.jsonl").read_text().splitlines())
    varying = ("seconds/", "tokens_per_second/", "mismatch")
    return [{name: value for name, value in row.items() if not name.startswith(varying)} for row in rows]


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    output_dir = tmp_path_factory.mktemp("stack")
    config = from_mapping(RunConfig, settings(folder, output_dir), source="test")
    inputs = check_inputs(config)
    assert (inputs.components.engine, inputs.components.backend) == ("deepspeed", "vllm")
    store = CheckpointStore(output_dir / "checkpoints")
    with (
        Reporter(output_dir, steps=config.steps, tensorboard=False) as reporter,
        open_run(config, inputs, store, reporter) as run,
    ):
        yield run


def sample(run, prompts, label):
    """New training samples."""
    groups, _ = sample_and_score(run, prompts, run.config.rollout.sampling, label=label, samples=2)
    return [trajectory for group in groups for trajectory in group.trajectories]


def mismatch(run, label):
    """Largest difference between the generator's log-probs of its tokens and the trainer's, on new samples."""
    batch = collate(sample(run, run.prompts.take(4), label=label))
    trainer = run.roles.policy.score(batch).log_probs
    return float((trainer - batch["rollout_log_probs"]).masked_fill(~batch.response_mask, 0).abs().max())


def test_generator_and_trainer_agree_before_anything_is_trained(run):
    assert run.roles.sync.transport == "gloo"
    assert run.roles.policy.ranks == run.roles.critic.ranks == 2
    assert mismatch(run, "start") < 1e-4


def test_the_loop_runs(run):
    train(run)
    rows = metric_rows(run)
    assert [row["weight_version"] for row in rows] == [1, 2, 3]
    for name in ("reward", "reward/model", "reward/function", "kl", "entropy", "grad_norm", "critic/grad_norm"):
        assert all(math.isfinite(row[name]) for row in rows), name
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-5)
    assert abs(rows[2]["kl"]) > 1e-3


def test_a_sync_makes_the_generator_equal_to_the_trainer(run):
    assert mismatch(run, "in-sync") < 1e-4
    batch = collate(sample(run, run.prompts.take(6), label="more"))
    batch = add_model_outputs(batch, run.roles).with_columns(truncated=torch.zeros(batch.rows, dtype=torch.bool))
    batch, _ = run.recipe.prepare(batch, torch.randn(batch.rows), torch.arange(batch.rows), kl_coef=0.0)
    run.roles.policy.step(batch, run.recipe.policy_loss())
    assert mismatch(run, "behind") > 1e-2
    report = run.roles.sync(4)
    assert report.bytes > 500_000
    assert run.roles.pool.weight_versions() == [4]
    assert mismatch(run, "in-sync-again") < 1e-4


def test_a_lost_link_is_opened_again(run):
    first = run.roles.sync._link
    run.roles.policy.open_link("gloo", 1)  # closes the first link; nobody joins this one
    report = run.roles.sync(5)
    assert report.version == 5
    assert run.roles.sync._link != first
    assert mismatch(run, "after-reconnect") < 1e-4


def test_restored_engines_go_on_bit_for_bit(run):
    uninterrupted = metric_rows(run)
    folder = run.reporter.directory / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step-000002", "step-000003"]
    for path in (folder / "step-000003").rglob("*"):
        if path.is_file():
            path.unlink()
    for path in sorted((folder / "step-000003").rglob("*"), reverse=True):
        path.rmdir()
    (folder / "step-000003").rmdir()
    run.state.restore(run)
    assert run.state.step == 2
    assert run.roles.pool.weight_versions() == [2]
    train(run)
    rows = metric_rows(run)
    assert rows[:3] == uninterrupted
    assert rows[3] == uninterrupted[2]


def test_the_export_loads_and_scores_like_the_trainer(run, tmp_path):
    from rlhf_core import model_outputs
    from transformers import AutoModelForCausalLM

    run.roles.policy.export(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    batch = collate(sample(run, run.prompts.take(4), label="export"))
    with torch.no_grad():
        exported = model_outputs(model, batch, ("log_probs",)).log_probs
    assert torch.allclose(exported, run.roles.policy.score(batch).log_probs, atol=1e-5)


def test_a_killed_generator_is_replaced_and_no_sample_is_lost(run):
    import threading

    import ray

    prompts = run.prompts.take(6)
    actor = run.roles.pool._handles[0]._actor
    killer = threading.Timer(0.05, ray.kill, [actor])
    long = dataclasses.replace(run.config.rollout.sampling, max_tokens=12, min_tokens=12)
    killer.start()
    groups, dropped = sample_and_score(run, prompts * 40, long, label="killed", samples=2)
    killer.join()
    assert run.roles.pool._handles[0]._actor is not actor
    assert not run.roles.pool.lost
    assert dropped == 0
    assert len({t.sample_id for g in groups for t in g.trajectories}) == 6 * 40 * 2
    version = run.roles.sync.version
    assert {v for g in groups for t in g.trajectories for v in t.weight_versions} == {-1, version}
    assert mismatch(run, "replaced") < 1e-4
    assert run.roles.sync(version + 1).version == version + 1


def test_more_workers_than_the_cluster_has_are_refused(run, folder, tmp_path):
    wanted = settings(folder, tmp_path / "large")
    wanted["train"] |= {"ranks": 500, "prompts_per_step": 1000}
    config = from_mapping(RunConfig, wanted, source="test")
    store = CheckpointStore(tmp_path / "checkpoints")
    with (
        Reporter(tmp_path, steps=1, tensorboard=False) as reporter,
        pytest.raises(ResourceError, match=r"needs 250.75 CPU for 1003 workers, the Ray cluster has"),
        open_run(config, check_inputs(config), store, reporter),
    ):
        pass
