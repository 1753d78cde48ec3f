"""One step of training, with engines that only remember what they were given."""

from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch
from rlhf_algos import GRPO, PPO, OffPolicyCorrection, make_recipe
from rlhf_core import CapabilityError, SamplingConfig, Score, StepReport, Trajectory
from rlhf_launch.online.metrics import PhaseClock
from rlhf_launch.online.trainer import Trainer, UpdatePlan
from rlhf_launch.workers.begun import Begun
from rlhf_launch.workers.devices import SharedDevices, Tenant
from rlhf_launch.workers.prepare import columns_of_rows, prepare_rows
from rlhf_launch.workers.waits import Waits
from rlhf_rollout import ScoredGroup

WAITS = Waits()


class Engine:
    """A role over some ranks whose log-probs and values are all -0.5."""

    def __init__(self, name, ranks=1, others=()):
        self.name, self.ranks = name, ranks
        self.devices = SharedDevices()
        self.scored, self.steps, self.metrics = [], [], {}
        self.busy, self.others = False, others
        self.seen = []
        """Which of the others were at work when this one was asked for something."""

    def begin_score_rows(self, batch, outputs=("log_probs",), *, adapters=True):
        self.scored.append(batch)
        score = (-0.5 if adapters else -0.75) * batch.padded().response_mask.float()
        return self.begun(dict.fromkeys(outputs, score))

    def prepare(self, batch, recipe, *, kl_coef):
        prepared = prepare_rows(batch, recipe, kl_coef)
        return columns_of_rows([prepared.columns], [range(batch.rows)], batch.rows), prepared.metrics

    def begin_step(self, batch, loss):
        self.steps.append((batch, loss))
        return self.begun(StepReport(loss=1.0, grad_norm=2.0, learning_rate=3.0, metrics=self.metrics))

    def begun(self, result):
        self.seen.append({other.name for other in self.others if other.busy})
        self.busy = True
        call = Future()
        call.set_result(result)

        def conclude(results):
            self.busy = False
            return results[0]

        return Begun(what=self.name, calls=[call], workers=[], waits=WAITS, conclude=conclude)

    def memory(self):
        return {"optimizer": 2**30}


def group(name, *values, greedy=None, rewards=()):
    trajectories = tuple(
        Trajectory(
            sample_id=f"{name}/{index}",
            group_id=name,
            token_ids=(5, 6, 7),
            response_mask=(False, True, True),
            rollout_log_probs=(0.0, -0.5, -0.5),
            weight_versions=(-1, 2, 3),
            rewards=rewards,
        )
        for index in range(len(values))
    )
    return ScoredGroup(trajectories=trajectories, scores=tuple(Score(value=v) for v in values), greedy_score=greedy)


def trainer(recipe, *, ranks=1, **plan):
    return Trainer(
        policy=Engine("policy", ranks),
        critic=Engine("critic", ranks) if recipe.needs_critic else None,
        reference=Engine("reference") if recipe.needs_reference else None,
        recipe=recipe,
        kl=recipe.kl_controller(),
        plan=UpdatePlan(**plan),
    )


def rows(steps):
    return [sorted(batch.sample_ids) for batch, _ in steps]


def test_every_sample_is_trained_on_once_per_epoch():
    run = trainer(GRPO(), minibatches=2, epochs=3, seed=1)
    run.step([group("a", 0.0, 1.0), group("b", 1.0, 0.0)], 0, PhaseClock())
    assert len(run.policy.steps) == 6
    for first in range(0, 6, 2):
        passed = [name for names in rows(run.policy.steps[first : first + 2]) for name in names]
        assert sorted(passed) == ["a/0", "a/1", "b/0", "b/1"]


def test_the_metrics_of_a_step():
    batch, metrics = trainer(GRPO()).step([group("a", 0.0, 1.0)], 4, PhaseClock())
    assert metrics["reward"] == 0.5
    assert metrics["staleness/max"] == 2  # its oldest token is of version 2
    assert (metrics["loss"], metrics["grad_norm"], metrics["learning_rate"]) == (1.0, 2.0, 3.0)
    assert metrics["memory/policy/optimizer"] == 1.0
    assert "reward_greedy" not in metrics
    assert batch["advantages"].shape == (2, 3)


def test_a_step_that_came_out_short_has_fewer_minibatches():
    run = trainer(GRPO(), ranks=2, minibatches=4)
    run.step([group("a", 0.0, 1.0, 0.0, 1.0)], 0, PhaseClock())
    assert [len(names) for names in rows(run.policy.steps)] == [2, 2]
    single = trainer(GRPO(), ranks=8, minibatches=4)
    single.step([group("a", 0.0, 1.0)], 0, PhaseClock())
    assert rows(single.policy.steps) == [["a/0", "a/1"]]  # fewer samples than ranks


def test_a_policy_with_its_adapters_off_is_its_own_reference():
    run = replace(trainer(GRPO(kl_coef=0.1)), reference=None, reference_is_policy=True)
    batch, _ = run.step([group("a", 0.0, 1.0)], 0, PhaseClock())
    assert torch.equal(batch["ref_log_probs"], -0.75 * batch.padded().response_mask.float())
    assert len(run.policy.scored) == 1  # one update: the policy's own log-probs are the update's


def test_the_critic_warms_up_alone():
    run = trainer(PPO(), critic_warmup_steps=2)
    for step in range(3):
        run.step([group("a", 0.0, 1.0)], step, PhaseClock())
    assert (len(run.critic.steps), len(run.policy.steps)) == (3, 1)


@pytest.mark.parametrize("recipe", [GRPO(), PPO(), make_recipe("rloo", {}), make_recipe("remax", {})])
def test_rewards_of_single_turns_reach_every_recipe(recipe):
    groups = [group("a", 1.0, 0.5, greedy=0.5, rewards=(0.0, 0.25, 0.0)), group("b", 0.0, 1.0, greedy=0.0)]
    run = trainer(recipe)
    batch, _ = run.step(groups, 0, PhaseClock())
    assert batch["rewards"][:, 1].tolist() == [0.25, 0.25, 0.0, 0.0]
    assert torch.isfinite(batch["advantages"]).all()


def test_the_policy_is_asked_for_what_the_algorithm_needs():
    run = trainer(make_recipe("dapo", {"loss_options": {"top_entropy": 0.5}}))
    batch, _ = run.step([group("a", 1.0, 0.0)], 0, PhaseClock())
    assert batch["old_entropy"].shape == batch["old_log_probs"].shape
    assert "entropy_selected" in batch
    run = trainer(make_recipe("dppo"))
    batch, _ = run.step([group("a", 1.0, 0.0)], 0, PhaseClock())
    assert not run.policy.scored
    assert batch["old_log_probs"][0].tolist() == [0.0, -0.5, -0.5]  # the sampler's own


def test_remax_compares_with_the_greedy_score():
    run = trainer(make_recipe("remax", {}))
    batch, metrics = run.step([group("a", 1.0, greedy=0.25), group("b", 0.0, greedy=0.5)], 0, PhaseClock())
    assert batch["advantages"][:, 1:].tolist() == [[0.75, 0.75], [-0.5, -0.5]]
    assert metrics["reward_greedy"] == 0.375


def ppo_trainer(*shared, **plan):
    """A critic, a reference and a policy that know of each other, and share devices in these sets."""
    made = trainer(PPO(kl_coef=0.1), **plan)
    roles, devices = [made.policy, made.critic, made.reference], SharedDevices(shared)
    for role in roles:
        role.others, role.devices = roles, devices
    return made


def test_roles_with_devices_of_their_own_work_at_the_same_time():
    run = ppo_trainer()
    run.step([group("a", 0.0, 1.0)], 0, PhaseClock())
    assert run.critic.seen == [{"policy", "reference"}, set()]  # it scores beside both, and steps first
    assert run.policy.seen == [set(), {"critic"}]


def test_roles_that_share_devices_work_in_turns():
    run = ppo_trainer({"policy", "reference", "critic"})
    batch, _ = run.step([group("a", 0.0, 1.0)], 0, PhaseClock())
    assert [role.seen for role in (run.policy, run.critic, run.reference)] == [[set()] * 2, [set()] * 2, [set()]]
    apart, _ = ppo_trainer().step([group("a", 0.0, 1.0)], 0, PhaseClock())
    batch, apart = batch.padded(), apart.padded()
    assert batch.columns.keys() == apart.columns.keys()
    assert all(torch.equal(batch[name], apart[name]) for name in batch.columns)


def test_pairs_take_turns_side_by_side():
    run = ppo_trainer({"policy", "reference"})
    run.step([group("a", 0.0, 1.0)], 0, PhaseClock())
    assert run.reference.seen == [set()]  # after policy and critic
    assert run.critic.seen[0] == {"policy"}


def test_on_shared_devices_each_role_takes_all_its_steps_in_one_turn():
    run = ppo_trainer({"policy", "critic"}, minibatches=2)
    took = []
    for role in (run.policy, run.critic):
        step = role.begin_step
        role.begin_step = lambda batch, loss, role=role, step=step: (took.append(role.name), step(batch, loss))[1]
    run.step([group("a", 0.0, 1.0), group("b", 1.0, 0.0)], 0, PhaseClock())
    assert took == ["critic", "critic", "policy", "policy"]
    assert rows(run.critic.steps) == rows(run.policy.steps)


def test_a_reference_that_is_the_policy_is_where_the_policy_is():
    run = replace(trainer(PPO(kl_coef=0.1, kl_in="loss")), reference=None, reference_is_policy=True)
    devices = SharedDevices([{"policy", "critic"}])
    for role in (run.policy, run.critic):
        role.devices = devices
        with devices.moving_in(role.name, Tenant(leave=lambda: None, come=lambda: None)):
            pass
    there = []
    score = run.policy.begin_score_rows
    run.policy.begin_score_rows = lambda *args, **how: (there.append(devices.present), score(*args, **how))[1]
    run.step([group("a", 0.0, 1.0)], 0, PhaseClock())
    assert there == [{"policy"}]  # the reference's log-probs; the policy's own are those of the update


def test_a_single_update_needs_no_scoring_pass():
    run = trainer(GRPO())
    batch, metrics = run.step([group("a", 0.0, 1.0)], 0, PhaseClock())
    assert not run.policy.scored
    assert "old_log_probs" not in batch
    assert metrics["scoring_pass"] == 0.0


@pytest.mark.parametrize(
    ("recipe", "plan"),
    [
        (GRPO(), {"minibatches": 2}),
        (GRPO(), {"epochs": 2}),
        (GRPO(), {"score_always": True}),
        (make_recipe("rloo"), {}),
        (PPO(kl_coef=0.1), {}),
        (make_recipe("kl_cov"), {}),
        (make_recipe("optimal_token"), {}),
    ],
)
def test_what_needs_the_log_probs_before_gets_them(recipe, plan):
    run = trainer(recipe, **plan)
    batch, metrics = run.step([group("a", 0.0, 1.0), group("b", 1.0, 0.0)], 0, PhaseClock())
    assert len(run.policy.scored) == 1
    assert "old_log_probs" in batch
    assert metrics["scoring_pass"] == 1.0


def test_the_policy_is_scored_while_the_critic_warms_up():
    run = trainer(PPO(), critic_warmup_steps=1)
    assert "policy" in run.asked_before(0)  # nothing else says how far sampler and trainer are apart
    assert run.asked_before(1) == {"critic": ("values",)}


def test_an_adaptive_controller_hears_what_the_update_measured():
    run = trainer(GRPO(kl_coef=0.1, kl_target=0.05))
    run.policy.metrics = {"reference_kl": 0.5}
    run.step([group("a", 0.0, 1.0)], 0, PhaseClock())
    assert run.kl.value > 0.1
    quiet = trainer(GRPO(kl_coef=0.1, kl_target=0.05))
    quiet.policy.metrics = {"reference_kl": 0.0}
    quiet.step([group("a", 0.0, 1.0)], 0, PhaseClock())
    assert quiet.kl.value < 0.1


def test_log_probs_of_another_distribution_are_not_compared():
    for top_p, known in ((1.0, True), (0.9, False)):
        meaning = SamplingConfig(max_tokens=4, top_p=top_p).meaning
        run = trainer(GRPO())
        run.policy.metrics = {"mismatch/log_prob_max": 0.25}
        made = group("a", 0.0, 1.0)
        made = replace(made, trajectories=tuple(replace(t, meaning=meaning) for t in made.trajectories))
        _, metrics = run.step([made], 0, PhaseClock())
        assert ("mismatch/log_prob_max" in metrics) == known


def test_answers_of_a_form_that_a_program_asked_for_are_not_weighed_against_the_trainer():
    meaning = SamplingConfig(max_tokens=4, json_schema='{"type": "object"}').meaning
    made = group("a", 0.0, 1.0)
    made = replace(made, trajectories=tuple(replace(t, meaning=meaning) for t in made.trajectories))
    trainer(GRPO()).step([made], 0, PhaseClock())
    for recipe in (GRPO(off_policy=(OffPolicyCorrection(),)), GRPO(old_log_probs="sampler")):
        with pytest.raises(CapabilityError, match="sample 'a/0' was kept to a JSON Schema"):
            trainer(recipe).step([made], 0, PhaseClock())
