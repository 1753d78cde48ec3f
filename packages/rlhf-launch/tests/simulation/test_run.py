"""Whole runs under the virtual clock: whatever goes wrong, every prompt is accounted for once, and nothing hangs.

RLHF_SIMULATIONS=2000 tries as many runs of each kind of fault instead of a few.
"""

import os
import random
from collections import Counter
from dataclasses import replace

import pytest
from rlhf_core import RLHFError
from rlhf_launch.samples.ledger import LedgerLimits
from rlhf_launch.simulation.engines import EngineSpeed, SyncSpeed
from rlhf_launch.simulation.run import SimulatedFaults, SimulatedKill, SimulatedRun, SimulatedSpeed, Simulation
from rlhf_launch.simulation.trainer import RewardSpeed, TrainSpeed

RUNS = int(os.environ.get("RLHF_SIMULATIONS", "6"))

FAULTS = {
    "none": lambda chance: SimulatedFaults(),
    "deaths": lambda chance: SimulatedFaults(death_s=chance.choice([300, 1000])),
    "deaths in syncs": lambda chance: SimulatedFaults(sync_death=0.4),
    "replacements that fail": lambda chance: SimulatedFaults(death_s=1000, failed_start=0.3),
    "partitions": lambda chance: SimulatedFaults(cut_off_s=500, cut_off_for_s=chance.uniform(1, 300)),
    "everything": lambda chance: SimulatedFaults(
        death_s=2000, sync_death=0.2, failed_start=0.2, cut_off_s=3000, cut_off_for_s=chance.uniform(1, 100)
    ),
}


def by_chance(seed, faults="none"):
    """A run whose every setting is drawn."""
    chance = random.Random(f"{seed}/{faults}")
    staleness = chance.choice([0, 1, 1, 2, 4])
    spread = chance.choice([0.3, 1.5])
    limits = LedgerLimits(
        per_step=chance.randint(1, 8),
        steps=chance.randint(2, 10),
        max_staleness=staleness,
        max_in_flight=chance.choice([0, 0, 1, 3, 20]),
        max_misses=chance.choice([0, 200]),
    )
    speed = SimulatedSpeed(
        engine=EngineSpeed(alone_s=0.02, more_s=0.001, max_samples=chance.choice([2, 256])),
        train=TrainSpeed(step_s=chance.uniform(0, 60)),
        sync=SyncSpeed(seconds=chance.uniform(0.1, 10)),
        # Its long tail must stay below the standstill that ends a run, as a reward that takes longer does; and a
        # step none of whose prompts has a score ends it, too, unless others may take their place.
        reward=RewardSpeed(
            seconds=chance.choice([0, 0, 5, 20]),
            drop=chance.choice([0, 0.2]) if limits.max_misses else 0,
            flat=chance.choice([0, 0.3]),
        ),
        start_s=chance.uniform(1, 60),
    )
    return SimulatedRun(
        limits=limits,
        samples=chance.randint(1, 4),
        engines=chance.randint(1, 9),
        during_training=chance.choice(["pause", "run"]) if staleness else "rest",
        filter_flat=chance.random() < 0.4,
        pause_mode=chance.choice(["keep", "abort"]),
        length_of=lambda label, index: random.Random(f"{seed}/{label}/{index}").lognormvariate(4, spread),
        speed=speed,
        faults=FAULTS[faults](chance),
        checkpoint_every=chance.randint(1, 3),
        seed=seed,
    )


def check_account(config, prompts, ledger):
    """Each prompt once, used within the bound, or with the reason why not; all others are in the ledger's hands."""
    positions = Counter(entry["position"] for entry in prompts)
    assert not positions or max(positions.values()) == 1
    outstanding = ledger.unfinished + ledger.waiting
    assert ledger.counts["dispatched"] == len(positions) + outstanding
    assert set(positions) <= set(range(ledger.counts["dispatched"]))
    for entry in prompts:
        assert entry["outcome"] in ("used", "filtered", "dropped")
        assert entry["outcome"] != "dropped" or entry["reason"]
        if entry["outcome"] == "used":
            assert 0 <= entry["step"] - 1 - entry["versions"][0] <= config.limits.max_staleness
    if not config.filter_flat and not config.speed.reward.drop:
        assert outstanding == 0
        assert len(positions) == config.limits.per_step * config.limits.steps


@pytest.mark.parametrize("faults", FAULTS)
def test_every_prompt_is_accounted_for_once_whatever_fails(faults):
    for seed in range(RUNS):
        config = by_chance(seed, faults)
        simulation = Simulation(config)
        report = simulation.run()  # which raises if it hangs
        assert len(report.rows) == config.limits.steps, seed
        check_account(config, report.prompts, simulation.ledger)


def test_every_prompt_is_accounted_for_once_in_runs_that_are_killed_and_resumed():
    kills = 0
    for seed in range(RUNS):
        chance, config = random.Random(seed), by_chance(seed, "none")
        straight = Simulation(config).run()
        prompts, store = [], None
        while True:
            faults = SimulatedFaults(kill_s=chance.uniform(0.05, 1.4) * straight.seconds)
            part = Simulation(replace(config, faults=faults), store)
            try:
                part.run()
                over = True
            except SimulatedKill:
                over, kills = False, kills + 1
            store = part.store
            saved = store.newest.step if store.newest is not None else 0
            done = part.reporter.prompts
            prompts += [entry for entry in done if over or entry["step"] <= saved]
            if over:
                break
        check_account(config, prompts, part.ledger)
        if config.during_training == "rest":
            assert prompts == list(straight.prompts)
    assert kills > RUNS // 2


def test_the_same_seed_is_the_same_run():
    for seed in range(3):
        first, second = (Simulation(by_chance(seed, "everything")).run() for _ in range(2))
        assert first == second


def test_an_engine_that_never_answers_again_costs_a_bounded_time():
    faults = SimulatedFaults(cut_off_s=100, cut_off_for_s=1e9)
    config = replace(by_chance(1), faults=faults, engines=4, standstill_s=120.0)
    simulation = Simulation(config)
    report = simulation.run()
    check_account(config, report.prompts, simulation.ledger)
    assert simulation.clock.now() < 100 * 120


def test_a_run_whose_replacements_are_used_up_ends_by_naming_the_last_loss():
    config = replace(by_chance(0), faults=SimulatedFaults(death_s=30, replacements=3), engines=2)
    with pytest.raises(RLHFError, match=r"no rollout engine is left after 3 replacements.*its host is gone"):
        Simulation(config).run()


def test_hundreds_of_engines_that_die_lose_none_of_many_thousand_prompts():
    prompts = int(os.environ.get("RLHF_SIMULATED_PROMPTS", "6000"))
    config = SimulatedRun(
        limits=LedgerLimits(per_step=prompts // 12, steps=12, max_staleness=1),
        samples=1,
        engines=300,
        during_training="run",
        length_of=lambda label, index: random.Random(label).expovariate(1 / 300) + 1,
        speed=SimulatedSpeed(engine=EngineSpeed(alone_s=0.02, more_s=0.0005), train=TrainSpeed(step_s=20)),
        faults=SimulatedFaults(death_s=5000, sync_death=0.3),
    )
    simulation = Simulation(config)
    report = simulation.run()
    check_account(config, report.prompts, simulation.ledger)
    assert len(report.prompts) == prompts // 12 * 12
    assert report.lost_engines > 5


@pytest.mark.parametrize("max_in_flight", [0, 20])
@pytest.mark.parametrize("during", ["pause", "run"])
def test_long_answers_are_trained_on_as_often_as_they_are_drawn(during, max_in_flight):
    mean, per_step, steps = 300.0, 16, 120

    def length_of(label, index):
        return random.Random(label).expovariate(1 / mean)

    config = SimulatedRun(
        limits=LedgerLimits(per_step=per_step, steps=steps, max_staleness=2, max_in_flight=max_in_flight),
        samples=1,
        engines=4,
        during_training=during,
        length_of=length_of,
        speed=SimulatedSpeed(engine=EngineSpeed(alone_s=0.02, more_s=0.002), train=TrainSpeed(step_s=5)),
    )
    report = Simulation(config).run()
    # The first steps take what is short, for lack of anything else; their long ones come a few steps later.
    used = [entry for entry in report.prompts if 10 < entry["step"] <= steps - 10]
    lengths = [length_of(str(entry["position"]), 0) for entry in used]
    count = len(lengths)
    assert count == per_step * (steps - 20)
    assert sum(lengths) / count == pytest.approx(mean, abs=4 * mean / count**0.5)  # its deviation is its mean
    long = sum(length > 2 * mean for length in lengths) / count
    share = 0.1353352832366127  # exp(-2)
    assert long == pytest.approx(share, abs=4 * (share * (1 - share) / count) ** 0.5)
    assert any(entry["versions"][0] < entry["step"] - 1 for entry in used)  # some are stale: there was a choice
