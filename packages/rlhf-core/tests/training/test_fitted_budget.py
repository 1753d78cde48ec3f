"""The budget that is found by a trial: what is tried, what is kept, and when it is found anew."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from rlhf_core import EngineConfig, FittedBudget, Loss, LossTerms, ModelOutputs, OneRank, ResourceError
from rlhf_core.testing.engine_ground import rows

MIB = 1 << 20
CONFIG = EngineConfig(model="m", max_tokens_per_micro_batch="auto", longest_row=100)


class Meter:
    """A device on which a pass takes 1 MiB, and 10 KiB for each token."""

    device = torch.device("cpu")
    place = "here"
    size = 4 << 30

    def __init__(self, free):
        self._free = free
        self.passes = []
        self.given_back = 0

    def free(self):
        return self._free

    def peak(self, run):
        run()
        return MIB + 10 * 1024 * self.last

    def give_back(self):
        self.given_back += 1


class Engine:
    """Notes what is asked of it."""

    def __init__(self, config=CONFIG, *, free=100 * MIB, to_come=0, ranks=None):
        self.meter = Meter(free)
        self.model = torch.nn.Linear(1, 1)
        self.budget = FittedBudget(config, ranks or OneRank(), self.meter, to_come=lambda: to_come)
        self.forwards, self.backwards, self.undone = [], [], 0

    def forward(self, batch, fields):
        self.forwards.append((batch.rows, batch.token_ids.shape[1], tuple(fields), torch.is_grad_enabled()))
        self.meter.last = batch.tokens
        return ModelOutputs(log_probs=torch.zeros(batch.token_ids.shape, requires_grad=True))

    def backward(self, total, last):
        self.backwards.append((total.item(), last))

    @contextmanager
    def undo(self):
        yield
        self.undone += 1

    def steps(self, batch=None):
        return self.budget.for_steps(
            self.model,
            batch or rows(),
            Loss(function=sum_loss),
            forward=self.forward,
            backward=self.backward,
            undo=self.undo(),
        )

    def scores(self, batch=None):
        return self.budget.for_scores(self.model, batch or rows(), ("values",), self.forward)


def sum_loss(outputs, batch, config):
    return LossTerms(total=outputs.log_probs.sum() + 7, weight=torch.tensor(1.0))


def test_a_number_is_taken_as_it_is():
    engine = Engine(replace(CONFIG, max_tokens_per_micro_batch=77))
    assert engine.steps().tokens == engine.scores().tokens == 77
    assert engine.forwards == []
    assert engine.budget.found == {}


def test_a_trial_of_a_step_is_a_short_pass_and_two_of_the_longest_rows():
    engine = Engine()
    # Half of 100 MiB less 1 MiB, by 10 KiB: 5017 tokens.
    assert engine.steps().tokens == 4864
    assert [one[:2] for one in engine.forwards] == [(1, 64), (2, 100), (4, 100)]
    assert all(one[2:] == (("log_probs",), True) for one in engine.forwards)
    assert engine.backwards == [(0.0, False)] * 3, "no gradient is more than zero, no step is ended"
    assert (engine.undone, engine.meter.given_back) == (1, 1)
    fitted = engine.budget.found["step"]
    assert (fitted.fixed, fitted.per_token, fitted.free) == (MIB, 10 * 1024, 100 * MIB)


def test_a_trial_of_scoring_has_no_gradients():
    engine = Engine()
    assert engine.scores().tokens == 4864
    assert all(one[2:] == (("values",), False) for one in engine.forwards)
    assert engine.backwards == []


def test_a_trial_is_made_once_for_each_kind_of_pass():
    engine = Engine()
    for _ in range(3):
        engine.steps()
        engine.scores()
    assert len(engine.forwards) == 6


def test_memory_that_the_optimizer_will_take_is_not_free():
    assert Engine(to_come=50 * MIB).steps().tokens == Engine(free=50 * MIB).steps().tokens == 2304


def test_rows_longer_than_was_said_are_tried_at_their_length():
    engine = Engine(replace(CONFIG, longest_row=None))
    engine.steps()
    assert engine.forwards[1][1] == 14, "the longest row of the batch"
    engine = Engine(replace(CONFIG, longest_row=5))
    engine.steps()
    assert engine.forwards[1][1] == 14


def test_ranks_that_share_rows_may_have_more_tokens_together():
    assert Engine(free=10**12).steps().tokens == 16_384
    assert Engine(replace(CONFIG, sequence_parallel_size=4), free=10**12).steps().tokens == 4 * 16_384


def test_what_was_found_is_taken_over_under_the_same_conditions_alone():
    first = Engine()
    first.steps()
    second = Engine(free=10 * MIB)
    second.budget.take(first.budget.found)
    assert second.budget.found == first.budget.found
    assert second.steps().tokens == 4864
    assert second.forwards == [], "nothing was tried"
    other = Engine(replace(CONFIG, gradient_checkpointing=True), free=20 * MIB)
    other.budget.take(first.budget.found)
    assert other.steps().tokens == 768
    assert other.budget.found["step"].conditions != first.budget.found["step"].conditions


def test_a_written_number_goes_before_what_was_found():
    first = Engine()
    first.steps()
    second = Engine(replace(CONFIG, max_tokens_per_micro_batch=50))
    second.budget.take(first.budget.found)
    assert second.steps().tokens == 50


def test_rows_that_do_not_fit_are_refused_with_the_numbers():
    with pytest.raises(ResourceError, match=r"100 tokens need 1 MiB \+ 100 x 10.0 KiB = 2 MiB, and 1 MiB are free"):
        Engine(free=1.4 * MIB).steps()


def test_a_device_that_is_full_in_a_trial_is_named():
    engine = Engine(free=3 * MIB)

    def full(run):
        raise torch.OutOfMemoryError("CUDA out of memory")

    engine.meter.peak = full
    with pytest.raises(ResourceError, match=r"2 row\(s\) of 100 tokens needs more than the 3 MiB that are free"):
        engine.steps()


class TwoRanks(OneRank):
    """This rank, and one whose device has less."""

    def __init__(self, other):
        self.other = other

    def gather(self, value):
        return [value, replace(value, place="there", free=self.other)]


def test_all_ranks_take_the_number_of_the_smallest():
    assert Engine(ranks=TwoRanks(20 * MIB)).steps().tokens == Engine(free=20 * MIB).steps().tokens == 768
