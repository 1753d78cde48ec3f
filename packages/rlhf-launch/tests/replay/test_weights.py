"""Where the weights before a step are found, and what is said where they are not."""

import pytest
from rlhf_algos import CheckpointStore
from rlhf_core import CheckpointError, ConfigError, DataError
from rlhf_launch.bundles.bundle import Bundle, Origin
from rlhf_launch.replay.weights import StartingWeights, check_convertible, find_weights, starting_from


@pytest.fixture
def bundle(tmp_path):
    def make(step, weights="none"):
        path = tmp_path / "run" / "bundles" / f"step-{step:06d}"
        for role in ("policy", "critic"):
            (path / weights / role).mkdir(parents=True, exist_ok=True)
        return Bundle(
            path=path,
            step=step,
            why="named",
            origin=Origin(run_id="r", output="/elsewhere", newest_checkpoint=0, weights=weights),
            kl_state={},
            kl_coef=None,
            order=None,
            reports={},
            metrics={},
        )

    return make


@pytest.fixture
def checkpoint(tmp_path):
    def make(step):
        def fill(folder):
            (folder / "policy").mkdir()
            (folder / "policy" / "weights").write_text("w")

        return CheckpointStore(tmp_path / "run" / "checkpoints", keep=9).write(step, {}, fill)

    return make


def test_the_checkpoint_of_the_step_before_counts(bundle, checkpoint):
    checkpoint(5)
    exact = checkpoint(6)
    found = find_weights(bundle(7))
    assert (found.kind, dict(found.folders)) == ("state", {"policy": exact / "policy"})
    assert found.words == "the checkpoint of step 6"


def test_the_first_step_begins_with_the_models_of_the_settings(bundle):
    found = find_weights(bundle(1))
    assert (found.kind, dict(found.folders)) == ("beginning", {})


@pytest.mark.parametrize("kind", ["state", "model"])
def test_a_bundle_may_carry_them(bundle, kind):
    carrying = bundle(7, kind)
    found = find_weights(carrying)
    assert found.kind == kind
    assert dict(found.folders) == {role: carrying.path / kind / role for role in ("policy", "critic")}


def test_a_checkpoint_knows_more_than_models(bundle, checkpoint):
    checkpoint(6)
    assert find_weights(bundle(7, "model")).kind == "state"


def test_weights_that_are_nowhere_are_said_to_be(bundle, checkpoint):
    checkpoint(4)
    with pytest.raises(DataError, match=r"no checkpoint of step 6.*there are: 4.*bundles\.weights"):
        find_weights(bundle(7))


def test_a_damaged_checkpoint_is_named(bundle, checkpoint):
    (checkpoint(6) / "policy" / "weights").write_text("other")
    with pytest.raises(CheckpointError, match="is damaged: policy/weights has 5 bytes"):
        find_weights(bundle(7))
    assert find_weights(bundle(7, "model")).kind == "model"


def test_what_is_given_wins(bundle, checkpoint, folder, tmp_path):
    given = checkpoint(4)
    assert find_weights(bundle(7), given).folders["policy"] == given / "policy"
    model = find_weights(bundle(7), folder / "policy")
    assert (model.kind, dict(model.folders)) == ("model", {"policy": folder / "policy"})
    with pytest.raises(DataError, match="neither a checkpoint"):
        find_weights(bundle(7), tmp_path / "nothing")
    (given / "policy" / "weights").unlink()
    with pytest.raises(CheckpointError, match="policy/weights is missing"):
        find_weights(bundle(7), given)


def test_the_reference_stays_where_it_was(settings, make_config, folder, tmp_path):
    config = make_config(settings, algorithm={"name": "grpo", "kl_coef": 0.1})
    moved = starting_from(config, {"policy": tmp_path / "then"})
    assert moved.model.path == str(tmp_path / "then")
    assert moved.model.reference == str(folder / "policy")
    ppo = starting_from(make_config(settings, algorithm="ppo"), {"policy": tmp_path / "then"})
    assert (ppo.model.reference, ppo.model.critic) == (None, str(folder / "policy"))


def test_adapters_on_4_bits_stay_on_their_engine(settings, make_config, folder):
    config = make_config(settings, model={"path": str(folder / "policy"), "lora": {"rank": 4, "quantize": "nf4"}})
    state = StartingWeights(kind="state", words="it")
    check_convertible(config, state, "torch")
    with pytest.raises(ConfigError, match=r"train\.engine=torch"):
        check_convertible(config, state, "deepspeed")
    with pytest.raises(ConfigError, match=r"train\.engine=torch"):
        check_convertible(config, StartingWeights(kind="model", words="it"), "torch")
