"""What the checks of two_ranks.py measured; see conftest.py."""

import pytest

pytestmark = pytest.mark.stack

STAGES = ("0", "1", "2", "3")


@pytest.mark.parametrize("case", ["0-12", "1-12", "2-12", "3-12", "3-4096"])
@pytest.mark.parametrize("model", ["policy-tied", "policy-untied", "critic-untied"])
def test_training_equals_plain_torch(measured, model, case):
    """`case` is the ZeRO stage and the tokens per micro-batch."""
    found = measured["equality"][f"{model}-{case}"]
    assert found["gap"] < 1e-6
    assert found["moved"] > 1e-3
    assert found["norm_gap"] < 1e-5
    assert found["names"]
    assert found["packing"]
    assert found["tokens"] == 900 + 850 + 40 + 9 + 12


def test_gradient_checkpointing_changes_nothing(measured):
    assert measured["gradient_checkpointing"]["gap"] < 1e-6


@pytest.mark.parametrize("stage", ["2", "3"])
def test_host_offload_changes_nothing(measured, stage):
    assert measured["offloaded_to_the_host"][stage] < 1e-6


def test_frozen_engines_beside_a_policy_keep_their_scores(measured):
    assert max(measured["scores"]["gaps"]) < 1e-5
    assert measured["scores"]["moved"] > 1e-3


@pytest.mark.parametrize("fault", ["loss", "gradient"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_fault_on_one_rank_skips_the_step_on_all(measured, stage, fault):
    found = measured["one_rank_is_not_finite"][f"{fault}-{stage}"]
    assert found["skipped"]
    assert found["unchanged"] == 0
    assert "row-2" in found["ids"]
    assert found["good"]
    assert found["trace"] < 1e-6
    if fault == "loss":
        assert len(found["ids"]) <= 2, "only the rows of the micro-batch"


@pytest.mark.parametrize("case", ["1", "3", "3 kept whole", "3 with adapters", "3 with experts"])
def test_weights_arrive_over_gloo(measured, case):
    found = measured["weights_over_gloo"][case]
    assert found["gap"] == 0
    assert found["buckets"] > 2
    # Shards go straight into the buffer; what is made of more than one tensor is gathered.
    assert found["ratio"] == pytest.approx(1.0, abs=0.1 if "adapters" in case else 0), "gathered once"
    packed = found["packed"]
    assert packed == 0 if case == "1" else packed > 2 if "adapters" in case else packed == found["buckets"]


@pytest.mark.parametrize("stage", STAGES)
def test_a_resumed_run_continues_bit_for_bit(measured, stage):
    assert measured["resume"][stage] == {"reports": True, "gap": 0}


@pytest.mark.parametrize("stage", ["2", "3"])
def test_an_export_in_several_files_loads_with_transformers(measured, stage):
    assert measured["export"][stage]["gap"] < 1e-5
    assert measured["export"][stage]["files"] > 1


@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_bfloat16_trains_and_skips(measured, stage):
    found = measured["bfloat16"][stage]
    assert found["losses"] == sorted(found["losses"], reverse=True)
    assert found["dtypes"] == ["bfloat16"]
    assert found["skipped"]
    assert found["unchanged"] == 0


@pytest.mark.parametrize("role", ["policy", "critic"])
@pytest.mark.parametrize("stage", ["0", "2", "3"])
def test_adapters_train_merge_and_resume(measured, stage, role):
    found = measured["adapters"][f"{role}-{stage}"]
    assert found["names"]
    assert found["moved"] > 1e-4
    assert found["frozen"] == 0
    assert found["gap"] < 1e-6
    assert found["resumed"] == 0
    assert found["exported"] < 1e-5
