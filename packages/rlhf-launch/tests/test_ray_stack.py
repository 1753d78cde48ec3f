"""The whole stack, real: Ray places two ZeRO-3 ranks each of policy and critic, reference, reward model, vLLM.

Everything is started once; the tests run in order on the same workers.
"""

import contextlib
import dataclasses
import json
import math
import shutil

import pytest
import torch
from rlhf_algos import CheckpointStore, from_mapping
from rlhf_core import RaggedBatch, ResourceError, SamplingConfig, collate
from rlhf_launch.config.rollout import Overlap
from rlhf_launch.config.run import OnlineConfig
from rlhf_launch.online.loop import restore, run_steps
from rlhf_launch.online.metrics import PhaseClock
from rlhf_launch.online.preflight import check_inputs
from rlhf_launch.online.report import Reporter
from rlhf_launch.online.setup import open_producer, open_run, schedule_of
from rlhf_launch.online.state import RunState
from rlhf_launch.replay.rerun import replay_step
from rlhf_launch.samples.groups import staleness

pytestmark = pytest.mark.stack


def settings(folder, output_dir):
    return {
        "model": {"path": str(folder / "policy")},
        "data": {"train": str(folder / "prompts.jsonl")},
        "lengths": {"max_prompt_tokens": 16, "max_length": 64},
        "reward": {"model": str(folder / "reward"), "function": "launch_rewards:share_of_alphanumerics"},
        "algorithm": {"name": "ppo", "kl_coef": 0.05},
        "rollout": {
            "samples_per_prompt": 2,
            "sampling": {"max_tokens": 12},
            "max_num_seqs": 32,
        },
        "train": {
            "ranks": 2,
            "prompts_per_step": 6,
            "minibatches": 2,
            "optimizer": {"learning_rate": 1e-3},
            "critic_optimizer": {"learning_rate": 1e-3},
            "average_decay": 0.9,
            "steps": 3,
        },
        "placement": {"executor": "ray", "device": "cpu"},
        "output": str(output_dir),
        "checkpoint": {"every": 2, "in_background": True},
        "bundles": {"steps": [3]},
    }


def with_steps(config, steps):
    return dataclasses.replace(config, train=dataclasses.replace(config.train, steps=steps))


def metric_rows(run):
    rows = map(json.loads, (run.reporter.directory / "metrics.jsonl").read_text().splitlines())
    varying = ("seconds/", "idle_seconds/", "tokens_per_second/", "mismatch", "memory/", "sync/probe_seconds")
    return [{name: value for name, value in row.items() if not name.startswith(varying)} for row in rows]


@pytest.fixture(scope="module")
def config(folder, tmp_path_factory):
    return from_mapping(OnlineConfig, settings(folder, tmp_path_factory.mktemp("stack")), source="test")


@pytest.fixture(scope="module")
def run(config):
    output_dir = config.output
    inputs = check_inputs(config)
    assert (inputs.backends.engine, inputs.backends.backend) == ("deepspeed", "vllm")
    store = CheckpointStore(output_dir / "checkpoints")
    with (
        Reporter(output_dir, steps=config.train.steps, tensorboard=False) as reporter,
        open_run(config, inputs, store, reporter) as run,
    ):
        yield run


SAMPLING = SamplingConfig(max_tokens=12)


def sample(run, prompts, label):
    """New samples, as training has them."""
    groups = run.make_groups(SAMPLING).groups(prompts, label=label, samples=2)
    return [trajectory for group in groups for trajectory in group.trajectories]


def mismatch(run, label):
    """Largest difference between the generator's log-probs of its tokens and the trainer's, on new samples."""
    batch = collate(sample(run, run.prompts.take(4), label=label))
    trainer = run.trainer.policy.score(batch).log_probs
    return float((trainer - batch["rollout_log_probs"]).masked_fill(~batch.response_mask, 0).abs().max())


def test_generator_and_trainer_agree_before_anything_is_trained(run):
    assert run.sync.transport == "shm"
    assert run.trainer.policy.ranks == run.trainer.critic.ranks == 2
    assert mismatch(run, "start") < 1e-4


def test_the_loop_runs(run):
    run_steps(run)
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


def test_a_kept_step_of_two_ranks_is_replayed_by_the_torch_engine(run):
    """From the ZeRO-3 checkpoint of two ranks, in float32: only the order of additions differs."""
    found = replay_step(run.reporter.directory / "bundles" / "step-000003")
    assert found.weights == "the checkpoint of step 2"
    assert found.first is None, found.first
    compared = {parting.name: parting for parting in found.partings}
    for name in ("old_log_probs", "values", "ref_log_probs", "advantages", "policy/loss", "critic/grad_norm"):
        assert compared[name].largest < 1e-4, name
    assert any("optimizer is not carried over" in note for note in found.notes)


def test_a_sync_makes_the_generator_equal_to_the_trainer(run):
    assert mismatch(run, "in-sync") < 1e-4
    rows = RaggedBatch.of_trajectories(sample(run, run.prompts.take(6), label="more"))
    batch = run.trainer.score(rows, run.trainer.asked_before(0)).padded()
    batch = batch.with_columns(truncated=torch.zeros(batch.rows, dtype=torch.bool))
    recipe = run.trainer.recipe
    batch, _ = recipe.prepare(batch, torch.randn(batch.rows), torch.arange(batch.rows), kl_coef=0.0)
    run.trainer.policy.step(batch, recipe.policy_loss())
    assert mismatch(run, "behind") > 1e-2
    report = run.sync(4)
    assert report.bytes > 500_000
    assert run.pool.weight_versions() == [4]
    assert mismatch(run, "in-sync-again") < 1e-4


def test_a_lost_link_is_opened_again(run):
    first = run.sync._link
    run.trainer.policy.open_link("gloo", 1)  # closes the first link; nobody joins this one
    report = run.sync(5)
    assert report.version == 5
    assert run.sync._link != first
    assert mismatch(run, "after-reconnect") < 1e-4


def take_the_last_step_again(run):
    """Without the newest checkpoint the run goes back to the one before, and on from there."""
    folder = run.reporter.directory / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step-000002", "step-000003"]
    shutil.rmtree(folder / "step-000003")
    restore(run, run.state.store.latest())
    assert run.state.step == 2
    assert run.pool.weight_versions() == [2]
    run_steps(run)
    return metric_rows(run)[-1]


def test_restored_engines_go_on_bit_for_bit(run):
    uninterrupted = metric_rows(run)
    assert take_the_last_step_again(run) == uninterrupted[2]
    assert metric_rows(run)[:3] == uninterrupted


def test_restored_engines_go_on_bit_for_bit_on_a_busy_machine(run, busy_cores):
    """Calls arrive at other times there, and share other batches."""
    assert take_the_last_step_again(run) == metric_rows(run)[2]


def test_the_export_loads_and_scores_like_the_trainer(run, tmp_path):
    from rlhf_core import model_outputs
    from transformers import AutoModelForCausalLM

    run.trainer.policy.export(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    batch = collate(sample(run, run.prompts.take(4), label="export"))
    with torch.no_grad():
        exported = model_outputs(model, batch, ("log_probs",)).log_probs
    assert torch.allclose(exported, run.trainer.policy.score(batch).log_probs, atol=1e-5)
    run.trainer.policy.export_average(tmp_path / "average")
    average = AutoModelForCausalLM.from_pretrained(tmp_path / "average").state_dict()
    assert any(not torch.allclose(weight, average[name]) for name, weight in model.state_dict().items())


def test_a_killed_generator_is_replaced_and_no_sample_is_lost(run):
    import threading

    import ray

    prompts = run.prompts.take(6)
    actor = run.pool._handles[0]._actor
    killer = threading.Timer(0.05, ray.kill, [actor])
    long = SamplingConfig(max_tokens=12, min_tokens=12)
    killer.start()
    groups = run.make_groups(long).groups(prompts * 40, label="killed", samples=2)
    killer.join()
    assert run.pool._handles[0]._actor is not actor
    assert not run.pool.lost
    assert not any(group.dropped for group in groups)
    assert len({t.sample_id for g in groups for t in g.trajectories}) == 6 * 40 * 2
    version = run.sync.version
    assert {v for g in groups for t in g.trajectories for v in t.weight_versions} == {-1, version}
    assert mismatch(run, "replaced") < 1e-4
    assert run.sync(version + 1).version == version + 1


def overlapping(run, config, tmp_path, *, steps, **overlap):
    """The same workers in another mode, continuing from the version that they have."""
    version = run.sync.version
    rollout = dataclasses.replace(
        config.rollout,
        samples_per_prompt=4,
        sampling=dataclasses.replace(config.rollout.sampling, max_tokens=40),
        overlap=Overlap(**overlap),
    )
    config = with_steps(dataclasses.replace(config, rollout=rollout), version + steps)
    producer = open_producer(config, run.prompts, run.make_groups, run.pool)
    producer.ledger.step = producer.ledger.version = version
    trainer = dataclasses.replace(run.trainer, recipe=config.recipe)
    state = RunState(CheckpointStore(tmp_path), trainer.trained, producer, trainer.kl)
    state.step = version
    schedule = schedule_of(config)
    other = dataclasses.replace(run, schedule=schedule, trainer=trainer, producer=producer, state=state)
    return other, version


def test_partial_rollouts_continue_under_the_new_weights(run, config, tmp_path):
    partial, version = overlapping(run, config, tmp_path, steps=4, max_staleness=3, pause_while_training=True)
    spans, stale_gap, used = 0, 0.0, set()
    with contextlib.closing(partial.producer) as producer:
        for step in range(version, version + 4):
            groups, _ = producer.collect()
            producer.pause()
            assert staleness(groups, step)["staleness/max"] <= 3
            trajectories = [trajectory for group in groups for trajectory in group.trajectories]
            fresh_gap, old_gap = gaps(run, trajectories, step)
            # A token under the new weights means what the trainer says of it, although older ones came before.
            assert fresh_gap < 1e-4
            stale_gap = max(stale_gap, old_gap)
            spans += sum(len({v for v in t.weight_versions if v >= 0}) > 1 for t in trajectories)
            used |= {t.sample_id for t in trajectories}
            partial.trainer.step(groups, step, PhaseClock())
            run.sync(step + 1)
            producer.resume(step + 1)
        assert producer.ledger.in_flight == []
    assert spans > 0
    assert stale_gap > 1e-3
    assert len(used) == 4 * 6 * 4  # each prompt's samples once, none given up


def gaps(run, trajectories, version):
    """Largest difference between sampler and trainer, over tokens of this version and over older ones."""
    batch = collate(trajectories)
    gap = (run.trainer.policy.score(batch).log_probs - batch["rollout_log_probs"]).abs()
    versions = [torch.tensor(t.weight_versions) for t in trajectories]
    padded = torch.nn.utils.rnn.pad_sequence(versions, batch_first=True, padding_value=-1)
    of_version = {
        "fresh": batch.response_mask & (padded == version),
        "old": batch.response_mask & (padded < version),
    }
    return [float(gap.masked_fill(~mask, 0).max()) for mask in of_version.values()]


def test_asynchronous_training_over_a_resume(run, config, tmp_path):
    whole, version = overlapping(run, config, tmp_path, steps=4, max_staleness=2)
    half = dataclasses.replace(whole, schedule=dataclasses.replace(whole.schedule, steps=version + 2))
    with contextlib.closing(whole.producer) as producer:
        run_steps(half)
        waiting = producer.state()[0]["ledger"]
        assert len(waiting["in_flight"]) + len(waiting["finished"]) > 0
        restore(whole, whole.state.store.latest())
        run_steps(whole)
        counts = producer.ledger.counts
        assert counts["dispatched"] == counts["consumed"] == 4 * 6
        assert producer.ledger.in_flight == []
    rows = [row for row in metric_rows(run) if row["weight_version"] > version][-4:]
    assert [row["weight_version"] for row in rows] == [version + 1, version + 2, version + 3, version + 4]
    assert all(row["staleness/max"] <= 2 and math.isfinite(row["grad_norm"]) for row in rows)
    assert all(0 < row["off_policy_weight"] <= 2 for row in rows)


def test_a_generator_killed_during_training_is_replaced_by_the_sync(run, config, tmp_path):
    import ray

    other, version = overlapping(run, config, tmp_path, steps=3, max_staleness=1)
    with contextlib.closing(other.producer) as producer:
        groups, _ = producer.collect()
        with run.replacement.suspended():
            ray.kill(run.pool._handles[0]._actor)  # the only one, with samples under way
            other.trainer.step(groups, version, PhaseClock())
            assert run.replacement.sync(version + 1).version == version + 1
            producer.resume(version + 1)
        other.state.step = version + 1
        run_steps(other)
        assert producer.ledger.counts["consumed"] == producer.ledger.counts["dispatched"] == 3 * 6
    assert run.pool.weight_versions() == [version + 3]
    assert mismatch(run, "replaced by the sync") < 1e-4


def test_more_workers_than_the_cluster_has_are_refused(run, folder, tmp_path):
    wanted = settings(folder, tmp_path / "large")
    wanted["train"] |= {"ranks": 500, "prompts_per_step": 24}
    wanted["rollout"] |= {"samples_per_prompt": 64}
    config = from_mapping(OnlineConfig, wanted, source="test")
    store = CheckpointStore(tmp_path / "checkpoints")
    with (
        Reporter(tmp_path, steps=1, tensorboard=False) as reporter,
        pytest.raises(ResourceError, match=r"needs 375.5 CPU for 1502 workers, the cluster has"),
        open_run(config, check_inputs(config), store, reporter),
    ):
        pass
