"""The whole stack, real: Ray places two ZeRO-3 ranks each of policy and critic, reference, reward model, vLLM.

Everything is started once; the tests run in order on the same workers.
"""

import contextlib
import dataclasses
import json
import math

import pytest
import torch
from rlhf_algos import from_mapping
from rlhf_core import ResourceError, collate
from rlhf_launch.config.rollout import Overlap
from rlhf_launch.config.run import RunConfig
from rlhf_launch.online.checkpoints import CheckpointStore
from rlhf_launch.online.loop import add_model_outputs, train, train_on
from rlhf_launch.online.preflight import check_inputs
from rlhf_launch.online.report import PhaseClock, Reporter
from rlhf_launch.online.run import open_producer, open_run
from rlhf_launch.online.state import RunState
from rlhf_launch.samples.collecting import sample_and_score

pytestmark = pytest.mark.stack


def settings(folder, output_dir):
    return {
        "model": {"policy": str(folder / "policy")},
        "data": {"prompts": str(folder / "prompts.jsonl"), "max_prompt_tokens": 16},
        "reward": {"model": str(folder / "reward"), "function": "launch_rewards:share_of_alphanumerics"},
        "algorithm": {"name": "ppo", "ppo": {"kl_coef": 0.05}},
        "rollout": {
            "samples_per_prompt": 2,
            "sampling": {"max_tokens": 12},
            "max_num_seqs": 32,
            "max_model_len": 64,
        },
        "train": {
            "ranks": 2,
            "prompts_per_step": 6,
            "minibatches": 2,
            "optimizer": {"learning_rate": 1e-3},
            "critic_optimizer": {"learning_rate": 1e-3},
            "average_decay": 0.9,
        },
        "placement": {"executor": "ray", "device": "cpu"},
        "output_dir": str(output_dir),
        "steps": 3,
        "checkpoint_every": 2,
        "checkpoint_in_background": True,
    }


def metric_rows(run):
    rows = map(json.loads, (run.reporter.directory / "metrics.jsonl").read_text().splitlines())
    varying = ("seconds/", "idle_seconds/", "tokens_per_second/", "mismatch", "memory/")
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
    assert run.roles.sync.transport == "shm"
    assert run.roles.policy.ranks == run.roles.critic.ranks == 2
    assert mismatch(run, "start") < 1e-4


def test_the_loop_runs(run):
    train(run)
    rows = metric_rows(run)
    assert [row["weight_version"] for row in rows] == [1, 2, 3]
    for name in ("reward", "reward/model", "reward/function", "kl", "entropy", "grad_norm", "critic/grad_norm"):
        assert all(math.isfinite(row[name]) for row in rows), name
    raw = json.loads((run.reporter.directory / "metrics.jsonl").read_text().splitlines()[0])
    assert all(
        raw[f"memory/{role}/{what}"] > 0 for role in ("policy", "critic") for what in ("optimizer", "peak_step")
    )
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
    run.roles.policy.export_average(tmp_path / "average")
    average = AutoModelForCausalLM.from_pretrained(tmp_path / "average").state_dict()
    assert any(not torch.allclose(weight, average[name]) for name, weight in model.state_dict().items())


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


def overlapping(run, tmp_path, *, steps, **overlap):
    """The same workers in another mode, going on from the version that they have."""
    version = run.roles.sync.version
    rollout = dataclasses.replace(
        run.config.rollout,
        samples_per_prompt=4,
        sampling=dataclasses.replace(run.config.rollout.sampling, max_tokens=40),
        overlap=Overlap(**overlap),
    )
    config = dataclasses.replace(run.config, rollout=rollout, steps=version + steps)
    producer = open_producer(config, run.prompts, run.roles.pool, run.roles.rewarder)
    producer.ledger.step = producer.ledger.version = version
    state = RunState(CheckpointStore(tmp_path), step=version)
    return dataclasses.replace(run, config=config, recipe=config.recipe, producer=producer, state=state), version


def test_partial_rollouts_go_on_under_the_new_weights(run, tmp_path):
    partial, version = overlapping(run, tmp_path, steps=4, max_staleness=3, pause_while_training=True)
    spans, stale_gap, used = 0, 0.0, set()
    with contextlib.closing(partial.producer) as producer:
        for step in range(version, version + 4):
            collected = producer.collect()
            producer.hold()
            assert collected.staleness(step)["staleness/max"] <= 3
            fresh_gap, old_gap = gaps(run, collected.trajectories, step)
            # A token under the new weights means what the trainer says of it, although older ones came before.
            assert fresh_gap < 1e-4
            stale_gap = max(stale_gap, old_gap)
            spans += sum(len({v for v in t.weight_versions if v >= 0}) > 1 for t in collected.trajectories)
            used |= {t.sample_id for t in collected.trajectories}
            train_on(partial, collected, step, PhaseClock())
            run.roles.sync(step + 1)
            producer.go_on(step + 1)
        assert producer.ledger.in_flight == []
    assert spans > 0
    assert stale_gap > 1e-3
    assert len(used) == 4 * 6 * 4  # each prompt's samples once, none given up


def gaps(run, trajectories, version):
    """Largest difference between sampler and trainer, over tokens of this version and over older ones."""
    batch = collate(trajectories)
    gap = (run.roles.policy.score(batch).log_probs - batch["rollout_log_probs"]).abs()
    versions = [torch.tensor(t.weight_versions) for t in trajectories]
    padded = torch.nn.utils.rnn.pad_sequence(versions, batch_first=True, padding_value=-1)
    of_version = {
        "fresh": batch.response_mask & (padded == version),
        "old": batch.response_mask & (padded < version),
    }
    return [float(gap.masked_fill(~mask, 0).max()) for mask in of_version.values()]


def test_asynchronous_training_over_a_resume(run, tmp_path):
    whole, version = overlapping(run, tmp_path, steps=4, max_staleness=2)
    half = dataclasses.replace(whole, config=dataclasses.replace(whole.config, steps=version + 2))
    with contextlib.closing(whole.producer) as producer:
        train(half)
        waiting = producer.state()["ledger"]
        assert len(waiting["in_flight"]) + len(waiting["finished"]) > 0
        whole.state.restore(whole)
        train(whole)
        counts = producer.ledger.counts
        assert counts["dispatched"] == counts["consumed"] == 4 * 6
        assert producer.ledger.in_flight == []
    rows = [row for row in metric_rows(run) if row["weight_version"] > version][-4:]
    assert [row["weight_version"] for row in rows] == [version + 1, version + 2, version + 3, version + 4]
    assert all(row["staleness/max"] <= 2 and math.isfinite(row["grad_norm"]) for row in rows)
    assert all(0 < row["off_policy_weight"] <= 2 for row in rows)


def test_a_generator_killed_during_training_is_replaced_by_the_sync(run, tmp_path):
    import ray

    other, version = overlapping(run, tmp_path, steps=3, max_staleness=1)
    with contextlib.closing(other.producer) as producer:
        collected = producer.collect()
        with run.roles.replacement.held_off():
            ray.kill(run.roles.pool._handles[0]._actor)  # the only one, with samples under way
            train_on(other, collected, version, PhaseClock())
            assert run.roles.replacement.sync(version + 1).version == version + 1
            producer.go_on(version + 1)
        other.state.step = version + 1
        train(other)
        assert producer.ledger.counts["consumed"] == producer.ledger.counts["dispatched"] == 3 * 6
    assert run.roles.pool.weight_versions() == [version + 3]
    assert mismatch(run, "replaced by the sync") < 1e-4


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
