"""Simulated engines against sums by hand."""

import pytest
from rlhf_core import EngineDiedError, GenerationRequest, SamplingConfig, StaleWeightsError, WeightManifest
from rlhf_launch.simulation.clock import VirtualClock
from rlhf_launch.simulation.engines import EngineSpeed, Lengths, SimulatedEngine, SimulatedWeights, SyncSpeed

LENGTHS = {"short": 10.0, "long": 40.0}


class World:
    """One engine on a clock; `scene` runs on it."""

    def __init__(self, **speed):
        self.clock = VirtualClock()
        self.weights = SimulatedWeights(self.clock, SyncSpeed(seconds=3, give_up_s=5))
        self.lengths = Lengths(lambda label, index: LENGTHS[label])
        self.mode = speed.pop("pause_mode", "keep")
        self.speed = EngineSpeed(**{"alone_s": 0.1, **speed})
        self.engine = self.another("engine")

    def another(self, name):
        return SimulatedEngine(name, self.weights, self.speed, self.lengths, pause_mode=self.mode)

    def ask(self, label, n=1):
        request = GenerationRequest(
            request_id=label, prompt_token_ids=(5,), sampling=SamplingConfig(max_tokens=99), n=n
        )
        return self.engine.call("generate", request)

    def until(self, call):
        self.clock.wait([call], 1000)
        return call.result()

    def sync(self, version, *engines):
        self.weights.open("disk", len(engines))
        for engine in engines:
            engine.call("connect", None, 0)
        manifest = WeightManifest(version=version, tensors=())
        received = [engine.call("receive_weights", manifest, None) for engine in engines]
        return self.weights.send(manifest), received

    def run(self, scene):
        self.clock.run(scene)


def test_samples_share_the_engine():
    world = World(alone_s=0.1, more_s=0.1)

    def scene():
        short, long = world.ask("short"), world.ask("long")
        world.until(short)
        assert world.clock.now() == pytest.approx(10 * 0.3)  # two under way: 0.1 + 2 * 0.1 s a token
        world.until(long)
        assert world.clock.now() == pytest.approx(10 * 0.3 + 30 * 0.2)

    world.run(scene)


def test_what_does_not_fit_queues():
    world = World(alone_s=0.1, max_samples=1)

    def scene():
        answer = world.ask("short", n=3)
        assert len(world.until(answer).samples) == 3
        assert world.clock.now() == pytest.approx(3.0)

    world.run(scene)


def test_a_pause_costs_time_and_a_sync_shows_in_the_versions():
    world = World()

    def scene():
        long = world.ask("long")
        world.clock.wait([], 1.0)
        world.engine.call("pause", "keep")
        world.clock.wait([], 100.0)
        world.until(world.sync(1, world.engine)[0])
        world.engine.call("resume")
        (sample,) = world.until(long).samples
        assert world.clock.now() == pytest.approx(4.0 + 103.0)
        assert sample.weight_versions == (0, 1)
        (sample,) = world.until(world.ask("short")).samples
        assert sample.weight_versions == (1,)

    world.run(scene)


def test_an_interrupted_sample_is_continued_where_it_was():
    world = World(pause_mode="abort")

    def scene():
        long = world.ask("long")
        world.clock.wait([], 1.0)
        world.engine.call("pause", "abort")
        (sample,) = world.until(long).samples
        assert (sample.finish_reason, sample.length) == ("abort", 1)
        world.engine.call("resume")
        world.until(world.ask("long+0.1"))
        assert world.clock.now() == pytest.approx(4.0)

    world.run(scene)


def test_a_dead_engine_fails_all_calls_and_a_cut_off_one_answers_later():
    world = World()

    def scene():
        world.engine.cut_off(50)
        late = world.ask("short")
        world.until(late)
        assert world.clock.now() == pytest.approx(50, abs=0.01)
        long = world.ask("long")
        world.engine.die("power cut")
        for call in (long, world.engine.call("resume"), world.engine.pulse()):
            with pytest.raises(EngineDiedError, match="power cut"):
                call.result()

    world.run(scene)


def test_weights_reach_all_engines_or_none():
    world = World()

    def scene():
        other = world.another("other")
        under_way = world.ask("long")
        sent, (received, lost) = world.sync(1, world.engine, other)
        world.clock.wait([], 1)
        other.die("power cut")
        with pytest.raises(Exception, match="a receiver is gone"):
            world.until(sent)
        assert lost.exception() is not None
        assert received.exception() is not None
        with pytest.raises(StaleWeightsError):
            under_way.result()
        with pytest.raises(StaleWeightsError):
            world.until(world.ask("short"))
        world.until(world.sync(1, world.engine)[0])
        assert world.until(world.ask("short")).samples[0].weight_versions == (1,)

    world.run(scene)
