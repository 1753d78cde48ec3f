import pytest
from rlhf_core import EngineConfig, ImaginedPass, Moment, OptimizerConfig, ParameterSize
from rlhf_train import pass_peak, planned_states

WEIGHT = ParameterSize(name="w", elements=1_000_000, bytes=2_000_000, trained=True)
NORM = ParameterSize(name="n", elements=1000, bytes=2000, trained=True)


def config(*, trained=True, dtype="bfloat16", **options):
    return EngineConfig(model="m", dtype=dtype, optimizer=OptimizerConfig() if trained else None, options=options)


def test_stage_3_shards_states_over_ranks_and_keeps_small_parameters_whole():
    states = planned_states(config(stage=3), [WEIGHT, NORM], ranks=4)
    assert states.parameters == 500_000 + 2000 + 500
    mine = 1_001_000 // 4
    assert states.optimizer == (4 + 8) * mine
    assert states.gradients == 4 * mine
    assert states.buckets == 2 * 1_001_000
    assert states.host == 0


def test_an_offloaded_optimizer_is_on_the_host():
    here = planned_states(config(stage=3), [WEIGHT], ranks=2)
    away = planned_states(config(stage=3, offload_optimizer=True), [WEIGHT], ranks=2)
    assert (away.optimizer, away.gradients) == (0, 0)
    assert away.host == here.optimizer + here.gradients
    assert away.parameters == here.parameters


@pytest.mark.parametrize(("stage", "gradients", "optimizer"), [(0, 4, 8), (1, 4, 6), (2, 2, 6)])
def test_lower_stages_shard_less(stage, gradients, optimizer):
    weight = ParameterSize(name="w", elements=1_000_000, bytes=4_000_000, trained=True)
    states = planned_states(config(dtype="float32", stage=stage), [weight], ranks=2)
    assert states.parameters == 4_000_000
    assert (states.gradients, states.optimizer) == (gradients * 1_000_000, optimizer * 1_000_000)


def test_a_frozen_role_has_weights_alone():
    states = planned_states(config(trained=False, stage=3), [WEIGHT], ranks=2)
    assert states.device == 1_000_000
    assert planned_states(config(trained=False, stage=3, offload_parameters=True), [WEIGHT], ranks=2).device == 0


def moment(used, peak, *, begins=True, backward=False):
    return Moment(used=used, begins=begins, backward=backward, peak=peak)


def test_what_is_gathered_is_added_where_it_is_gathered():
    sizes = [WEIGHT] * 3
    moments = (
        moment((0,), 10),
        moment((0,), 5, begins=False),
        moment((1,), 100),
        moment((1,), 5, begins=False),
    )
    done = ImaginedPass(tokens=1, peak=100, moments=moments)
    frozen = config(trained=False, stage=3, prefetch_bucket_size=0)
    # One weight at a time beside the tensors of its moment, and the head's, place 2, all along.
    assert pass_peak(frozen, sizes, done, head=(2,), ranks=2) == 100 + 2 * 2_000_000
    ahead = config(trained=False, stage=3)
    assert pass_peak(ahead, sizes, done, head=(2,), ranks=2) == 10 + 3 * 2_000_000
    assert pass_peak(frozen, sizes, done, head=(2,), ranks=1) == 100
    assert pass_peak(config(trained=False, stage=2), sizes, done, head=(2,), ranks=2) == 100


def test_a_head_above_the_limit_does_not_keep_others_from_being_gathered_ahead():
    head = ParameterSize(name="h", elements=1_100_000_000, bytes=2_200_000_000, trained=True)
    moments = (moment((0,), 10), moment((0,), 5, begins=False), moment((1,), 100))
    done = ImaginedPass(tokens=1, peak=100, moments=moments)
    sizes = [WEIGHT, WEIGHT, head]
    ahead = pass_peak(config(trained=False, stage=3), sizes, done, head=(2,), ranks=2)
    assert ahead == 10 + head.bytes + 2 * WEIGHT.bytes
    without = config(trained=False, stage=3, max_live_parameters=1_000_000_000)
    assert pass_peak(without, sizes, done, head=(2,), ranks=2) == 100 + head.bytes + WEIGHT.bytes


def test_what_is_used_again_soon_stays():
    moments = (
        moment((0,), 0),
        moment((0,), 0, begins=False),
        moment((1,), 7),
        moment((1,), 0, begins=False),
        moment((0,), 0, backward=True),
    )
    done = ImaginedPass(tokens=1, peak=7, moments=moments)
    one_ahead = config(trained=False, stage=3, prefetch_bucket_size=0)
    assert pass_peak(one_ahead, [WEIGHT] * 2, done, head=(), ranks=2) == 7 + 2 * 2_000_000
