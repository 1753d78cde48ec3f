"""What the checks of two_rank_models.py measured in two processes; see conftest.py."""

import pytest

pytestmark = pytest.mark.stack


@pytest.mark.parametrize("stage", ["0", "2", "3"])
def test_adapters_train_over_4_bit_weights_at_every_stage(measured, stage):
    found = measured["quantized"][stage]
    assert found["dtypes"] == ["torch.float32"], "what leaves the engine is of full precision"
    assert found["reference"] < 1e-5, "a frozen engine with the same option is the policy's start"
    assert found["moved"] > 1e-3
    assert found["gap"] < 1e-6
    assert found["resumed"] == 0
    assert found["exported"] < 1e-4
    assert found["merged_again"] < 1e-4, "from the adapter files beside the export"
    assert found["parameters"] < 0.7 * found["whole"], "linear layers are held in 4 bits"


def test_4_bit_weights_under_bfloat16(measured):
    found = measured["quantized"]["bfloat16"]
    assert found["losses"][-1] < found["losses"][0]
    assert found["dtypes"] == ["bfloat16"]


@pytest.mark.parametrize("case", ["2-900", "3-900", "3-20"])
def test_a_rank_without_places_for_candidates_keeps_up(measured, case):
    found = measured["candidates"][case]
    assert found["moved"] > 1e-2
    assert found["gap"] < 1e-6


@pytest.mark.parametrize("kind", ["mixtral", "qwen-moe", "jamba"])
def test_recorded_experts_are_chosen_again(measured, kind):
    for stage in ("2", "3"):
        found = measured["routing_replay"][f"{kind}-{stage}"]
        assert found["unchanged"] < 1e-6
        assert found["differ"]
        assert found["used"]
        assert found["routers"] > 0, "the routers' weights have gradients"
        assert found["stages"] < 1e-6
        assert found["without"] > 1e-4


@pytest.mark.parametrize("stage", ["2", "3"])
def test_ranks_with_and_without_images_train_together(measured, stage):
    found = measured["images"][stage]
    assert found["scores"] < 1e-5
    assert found["encoder_moved"] > 1e-3
    assert found["gap"] < 1e-5
    assert not found["packing"]


def test_a_frozen_image_encoder_stays_as_it_was(measured):
    found = measured["images"]["3-frozen"]
    assert found["scores"] < 1e-5
    assert found["encoder_moved"] == 0
    assert found["moved"] > 1e-3


def test_two_engines_with_secondary_shards(measured):
    found = measured["secondary_shards"]
    assert found["gap"] < 1e-6
    assert found["norm"] > 0
    assert found["values"] == 0, "a fresh critic"


@pytest.mark.parametrize("case", ["untied-1", "untied-2", "tied-1", "tied-2"])
def test_ranks_with_slices_of_layers_train_as_one_process(measured, case):
    found = measured["tensor_parallel"][case]
    assert found["packing"]
    assert found["scores"] < 1e-5
    assert found["moved"] > 1e-2
    assert found["gap"] < 1e-6
    assert found["tokens"] == 76
    assert found["exported"] < 1e-5
    assert found["resumed"] == 0
    assert found["held"] < 0.8
