"""What happens after a step: saved first, then evaluated; the best checkpoint is one that was measured."""

import contextlib
import types

import pytest
from rlhf_algos import CheckpointSchedule, CheckpointStore
from rlhf_core import RewardError, StopRequest
from rlhf_launch.online.evaluation import Evaluation
from rlhf_launch.online.loop import OnlineRun, Schedule, finish_step, run_steps
from rlhf_launch.online.report import Reporter
from rlhf_launch.online.state import RunState
from rlhf_launch.samples.prompts import PromptStream
from rlhf_launch.workers.waits import Waits


class Engine:
    """A role whose checkpoint is one file, which takes until `finish_save` if it is written in the background."""

    name = "policy"

    def save(self, path, *, background):
        path.mkdir()
        self.writing = path if background else None
        if not background:
            (path / "weights").write_text("w")

    def saved(self):
        return self.writing is None

    def finish_save(self):
        if self.writing is not None:
            (self.writing / "weights").write_text("w")
            self.writing = None


class Run:
    """A run whose evaluations give the rewards of a script."""

    def __init__(self, folder, *, rewards=(), keep=1, background=False, checkpoint_every=0, minutes=0, **schedule):
        self.now = 0.0
        due = CheckpointSchedule(every=checkpoint_every, minutes=minutes, clock=lambda: self.now)
        self.rewards = dict(rewards)
        producer = types.SimpleNamespace(
            rests=True,
            state=lambda: ({"ledger": {}}, []),
            collect=lambda: ([], types.SimpleNamespace(seconds={}, counts={}, prompts=[])),
            pause=lambda: None,
            resume=lambda version: None,
        )
        kl = types.SimpleNamespace(state_dict=dict)
        self.store = CheckpointStore(folder / "checkpoints", keep=keep)
        self.reporter = Reporter(folder, steps=100, tensorboard=False)
        self.run = OnlineRun(
            schedule=Schedule(**{"steps": 100, "best_metric": "eval/sums/reward", **schedule}),
            trainer=types.SimpleNamespace(
                step=lambda groups, step, clock, trace: (Nothing(), {"reward": 0.0}), take_idle_seconds=dict
            ),
            producer=producer,
            pool=types.SimpleNamespace(
                lost={}, take_idle_seconds=lambda: 0.0, waits=Waits(), generating=contextlib.nullcontext
            ),
            sync=None,
            replacement=types.SimpleNamespace(
                suspended=contextlib.nullcontext,
                sync=lambda version: types.SimpleNamespace(metrics={"weight_version": version}),
            ),
            evaluator=self.evaluate,
            reporter=self.reporter,
            stop=StopRequest(),
            state=RunState(self.store, [Engine()], producer, kl, schedule=due, background=background),
            prompts=PromptStream(["a"], seed=0),
            make_groups=None,
        )

    def evaluate(self, step, *, done=()):
        reward = self.rewards.get(step, 0.0)
        if isinstance(reward, Exception):
            raise reward
        yield Evaluation(name="sums", step=step, metrics={"reward": reward, "dropped_samples": 0.0})

    def finish(self, step, *, last=False):
        self.run.state.step = step
        finish_step(self.run, last=last)


class Nothing:
    """A batch without tokens, for the clock."""

    response_tokens = tokens = 0


@pytest.fixture
def start(tmp_path):
    return lambda **settings: Run(tmp_path, **settings)


def test_the_best_checkpoint_is_one_that_was_evaluated(start):
    run = start(rewards={50: 0.9, 100: 0.1}, checkpoint_every=10, evaluate_every=50)
    for step in range(10, 101, 10):
        run.finish(step, last=step == 100)
    assert run.store.best() == 50
    assert run.store.steps() == [50, 100]


def test_an_evaluation_between_checkpoints_keeps_the_weights_it_found_best(start):
    run = start(rewards={4: 0.5, 8: 0.9, 12: 0.7}, checkpoint_every=10, evaluate_every=4)
    for step in range(1, 13):
        run.finish(step)
    assert run.store.best() == 8
    assert run.store.steps() == [8, 10]


def test_a_metric_of_the_step_itself_needs_no_evaluation(start):
    run = start(best_metric="reward", checkpoint_every=1)
    for step, reward in enumerate((0.2, 0.8, 0.4), start=1):
        run.reporter.step(step, {"reward": reward})
        run.finish(step)
    assert run.store.best() == 2


@pytest.mark.parametrize(("last", "background"), [(True, False), (False, False), (False, True)])
def test_a_reward_that_fails_in_an_evaluation_costs_no_checkpoint(start, last, background):
    run = start(rewards={7: RewardError("no network")}, evaluate_every=7, checkpoint_every=7, background=background)
    with pytest.raises(RewardError, match="no network"):
        run.finish(7, last=last)
    assert run.store.steps() == [7]
    assert (run.store.latest().path / "policy" / "weights").exists()


def test_the_caller_may_end_the_run_in_good_order(start):
    seen = []

    def on_step(step, metrics):
        seen.append((step, metrics["reward"], metrics["weight_version"]))
        return step < 3

    run = start()
    run_steps(run.run, on_step)
    assert seen == [(1, 0.0, 1), (2, 0.0, 2), (3, 0.0, 3)]
    assert run.store.steps() == [3]
    assert [evaluation.step for evaluation in run.reporter.evaluations] == [3]


def test_an_exception_of_the_caller_ends_the_run_at_once(start):
    def on_step(step, metrics):
        if step == 2:
            raise LookupError("enough")

    run = start(checkpoint_every=1)
    with pytest.raises(LookupError, match="enough"):
        run_steps(run.run, on_step)
    assert run.store.steps() == [1]


def test_saying_nothing_lets_the_run_continue(start):
    run = start(steps=4)
    run_steps(run.run, lambda step, metrics: None)
    assert run.run.state.step == 4


def test_only_the_newest_evaluation_of_a_set_keeps_its_examples(tmp_path):
    reporter = Reporter(tmp_path, steps=3, tensorboard=False)
    for step in range(3):
        for name in ("a", "b"):
            metrics = {"reward": float(step), "dropped_samples": 0.0}
            reporter.evaluation(Evaluation(name=name, step=step, metrics=metrics, examples=[object()]))
    assert [(e.name, e.step, len(e.examples)) for e in reporter.evaluations] == [
        ("a", 0, 0),
        ("b", 0, 0),
        ("a", 1, 0),
        ("b", 1, 0),
        ("a", 2, 1),
        ("b", 2, 1),
    ]
    assert reporter.measured("eval/a/reward", 2) == 2.0
    assert reporter.measured("eval/a/reward", 1) is None
    assert reporter.measured("nothing", 1) is None


def test_an_evaluation_without_any_score_is_said(tmp_path, capsys):
    reporter = Reporter(tmp_path, steps=3, tensorboard=False)
    reporter.evaluation(Evaluation(name="a", step=1, metrics={"dropped_samples": 8.0}))
    assert "a reward nan, 8 sample(s) without a score" in capsys.readouterr().out
    assert reporter.measured("eval/a/reward", 1) is None


def test_what_is_surely_unwanted_is_warned_of(settings, make_config):
    greedy = make_config(
        settings,
        algorithm="reinforce",
        rollout__samples_per_prompt=1,
        rollout__sampling={"max_tokens": 8, "temperature": 0.0},
        train__optimizer={"learning_rate": 0.0},
    )
    assert [text.split(":")[0] for text in greedy.warnings] == [
        "rollout.sampling.temperature=0",
        "train.optimizer.learning_rate=0",
    ]
    assert make_config(settings).warnings == ()


def test_a_checkpoint_is_written_when_the_last_one_is_too_old(start):
    run = start(minutes=30, keep=9)
    for step, minute in enumerate((10, 29, 31, 50, 62), start=1):
        run.now = minute * 60.0
        run.finish(step)
    assert run.store.steps() == [3, 5]
