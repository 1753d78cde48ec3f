"""Which steps are kept, and what a bundle gives back; the trainer is one that only fills the trace."""

import dataclasses
import datetime
import json
import math

import pytest
import torch
from rlhf_algos import FixedKL
from rlhf_core import CheckpointError, ConfigError, DataError, RunStopped, Score, StepReport, Trajectory
from rlhf_launch.bundles.bundle import read_bundle
from rlhf_launch.bundles.keep import BundleKeeper, kept_step
from rlhf_launch.samples.groups import rows_of_groups
from rlhf_rollout import ScoredGroup


def group(name, *values, metadata=None):
    trajectories = tuple(
        Trajectory(
            sample_id=f"{name}/{index}",
            group_id=name,
            token_ids=(5, 6, 7),
            response_mask=(False, True, True),
            rollout_log_probs=(0.0, -0.1, -1 / 3),
            weight_versions=(-1, 2, 3),
            metadata=metadata or {},
        )
        for index in range(len(values))
    )
    scores = tuple(Score(value=value, components={"right": value}) for value in values)
    return ScoredGroup(trajectories=trajectories, scores=scores)


GROUPS = [group("a", 0.1, 1.0), group("b", 0.7, 0.0)]


class Engine:
    name = "policy"

    def save(self, path):
        path.mkdir(parents=True)
        (path / "engine.pt").write_text("state")

    def export(self, path):
        path.mkdir(parents=True)
        (path / "model.safetensors").write_text("model")


@pytest.fixture
def keeper(settings, make_config):
    said = []

    def make(**bundles):
        config = make_config(settings, bundles=bundles)
        kept = BundleKeeper(config, [Engine()], FixedKL(0.25), newest=lambda: 3, say=said.append)
        kept.said = said
        return kept

    return make


def take(keeper, step, *, grad_norm=1.5, error=None, groups=GROUPS):
    with keeper.step(step, groups) as trace:
        trace.batch = rows_of_groups(groups)
        trace.batch = trace.batch.with_columns(advantages=torch.full((trace.batch.rows, trace.batch.width), 1 / 3))
        trace.kl_coef, trace.order = 0.25, [[2, 0], [1, 3]]
        skipped = not math.isfinite(grad_norm)
        metrics = {"entropy": 0.1}
        report = StepReport(
            loss=0.5, grad_norm=grad_norm, learning_rate=1e-3, metrics=metrics, skipped=skipped, tokens=9
        )
        trace.reports["policy"] = [report]
        if error is not None:
            raise error
        trace.metrics = {"reward": 0.45, "grad_norm": grad_norm}


def names(keeper):
    return sorted(path.name for path in keeper.folder.iterdir()) if keeper.folder.exists() else []


def test_a_bundle_gives_back_what_the_step_worked_on(keeper):
    kept = keeper(steps=[4])
    take(kept, 4)
    bundle = read_bundle(kept.folder / "step-000004")
    assert bundle.groups() == GROUPS
    batch = bundle.batch()
    assert batch.sample_ids == ("a/0", "a/1", "b/0", "b/1")
    assert torch.equal(batch["scores"], torch.tensor([0.1, 1.0, 0.7, 0.0]))
    assert torch.equal(batch["score/right"], batch["scores"])
    assert torch.equal(batch["advantages"], torch.full((4, 3), 1 / 3))
    assert (bundle.step, bundle.why, bundle.error, list(bundle.faults)) == (4, "named", None, [])
    assert (bundle.kl_coef, bundle.kl_state, bundle.order) == (0.25, {"value": 0.25}, [[2, 0], [1, 3]])
    (report,) = bundle.reports["policy"]
    assert (report.loss, report.grad_norm, report.metrics, report.tokens) == (0.5, 1.5, {"entropy": 0.1}, 9)
    assert bundle.metrics == {"reward": 0.45, "grad_norm": 1.5}
    assert bundle.origin.newest_checkpoint == 3
    assert {"rlhf-launch", "torch"} <= bundle.versions.keys()


def test_a_bundle_has_the_settings_of_its_run(keeper, settings, make_config):
    kept = keeper(every=1)
    take(kept, 1)
    bundle = read_bundle(kept.folder / "step-000001")
    assert bundle.config() == make_config(settings, bundles={"every": 1})
    changed = bundle.config(["algorithm=dapo", "train.packing=false"])
    assert (changed.algorithm.name, changed.train.packing) == ("dapo", False)
    with pytest.raises(ConfigError, match=r"train\.packing"):
        bundle.config(["train.packingg=false"])


def test_nothing_in_a_bundle_is_a_pickle(keeper):
    kept = keeper(every=1)
    take(kept, 1)
    files = {path.name for path in (kept.folder / "step-000001").iterdir()}
    assert files == {"bundle.json", "config.yaml", "groups.safetensors", "batch.safetensors", "manifest.json"}


def test_named_steps_stay_and_of_the_others_the_newest(keeper):
    kept = keeper(every=2, steps=[1, 2], keep=2)
    for step in range(1, 11):
        take(kept, step)
    assert names(kept) == ["step-000001", "step-000002", "step-000008", "step-000010"]


def test_by_default_healthy_steps_are_not_kept(keeper):
    kept = keeper()
    take(kept, 1)
    assert names(kept) == []


def test_a_step_that_was_skipped_is_kept_and_told_of(keeper):
    kept = keeper()
    take(kept, 1, grad_norm=math.nan)
    bundle = read_bundle(kept.folder / "step-000001")
    assert bundle.why == "fault"
    assert list(bundle.faults) == ["1 optimizer step(s) of the policy were skipped"]
    assert math.isnan(bundle.reports["policy"][0].grad_norm)
    assert math.isnan(bundle.metrics["grad_norm"])
    assert "step-000001" in kept.said[0]
    assert "rlhf replay" in kept.said[0]


def test_a_step_that_ends_in_an_error_is_kept_as_far_as_it_came(keeper):
    kept = keeper()
    with pytest.raises(ZeroDivisionError):
        take(kept, 7, error=ZeroDivisionError("by nothing"))
    bundle = read_bundle(kept.folder / "step-000007")
    assert (bundle.why, bundle.error) == ("fault", "ZeroDivisionError: by nothing")
    assert bundle.metrics == {}
    assert len(bundle.reports["policy"]) == 1
    with pytest.raises(LookupError), kept.step(8, GROUPS):
        raise LookupError("before anything was scored")
    assert read_bundle(kept.folder / "step-000008").batch() is None


def test_a_run_that_is_asked_to_end_has_no_fault(keeper):
    kept = keeper()
    with pytest.raises(RunStopped):
        take(kept, 1, error=RunStopped("asked to end"))
    assert names(kept) == []


def test_faults_are_left_out_where_they_are_not_wanted(keeper):
    kept = keeper(on_fault=False)
    take(kept, 1, grad_norm=math.inf)
    with pytest.raises(ZeroDivisionError):
        take(kept, 2, error=ZeroDivisionError())
    assert names(kept) == []


@pytest.mark.parametrize(("kind", "file"), [("model", "model.safetensors"), ("state", "engine.pt")])
def test_weights_are_those_before_the_step(keeper, kind, file):
    kept = keeper(steps=[2], weights=kind)
    with kept.step(2, GROUPS):
        assert (kept.folder / ".unfinished-step-000002" / kind / "policy" / file).exists()
    take(kept, 3, grad_norm=math.nan)
    assert read_bundle(kept.folder / "step-000002").origin.weights == kind
    assert (kept.folder / "step-000002" / kind / "policy" / file).exists()
    assert read_bundle(kept.folder / "step-000003").origin.weights == "none"


def test_a_bundle_that_was_cut_off_is_cleared_away(keeper):
    kept = keeper(every=1)
    (kept.folder / ".unfinished-step-000001").mkdir(parents=True)
    take(kept, 2)
    assert names(kept) == ["step-000002"]


def test_a_step_that_is_taken_again_replaces_its_bundle(keeper):
    kept = keeper(every=1)
    take(kept, 1)
    take(kept, 1, groups=GROUPS[:2])
    take(kept, 1, grad_norm=9.0)
    assert names(kept) == ["step-000001"]
    assert read_bundle(kept.folder / "step-000001").reports["policy"][0].grad_norm == 9.0


def test_metadata_that_no_file_holds_is_left_out(keeper):
    kept = keeper(every=1)
    dated = group("a", 0.5, metadata={"day": datetime.date(2026, 1, 1)})
    take(kept, 1, groups=[dated, GROUPS[1]])
    found = read_bundle(kept.folder / "step-000001").groups()
    assert found[0] == dataclasses.replace(
        dated, trajectories=(dataclasses.replace(dated.trajectories[0], metadata={}),)
    )
    assert found[1] == GROUPS[1]


def test_a_bundle_that_cannot_be_written_does_not_end_the_run(keeper):
    kept = keeper(every=1)
    kept.folder.parent.mkdir(parents=True)
    kept.folder.write_text("a file in the way")
    take(kept, 1)
    assert "step 1 could not be kept" in kept.said[0]


def test_without_a_keeper_a_step_is_taken_all_the_same():
    with kept_step(None, 3, GROUPS) as trace:
        assert trace.step == 3


def test_damage_is_found_before_anything_is_read(keeper):
    kept = keeper(every=1)
    take(kept, 1)
    folder = kept.folder / "step-000001"
    (folder / "groups.safetensors").write_bytes(b"other")
    with pytest.raises(CheckpointError, match=r"damaged: groups\.safetensors has 5 bytes"):
        read_bundle(folder)


def test_what_is_no_bundle_is_refused_with_what_there_is(keeper, tmp_path):
    kept = keeper(every=1)
    take(kept, 1)
    with pytest.raises(DataError, match="has step-000001; give one of them"):
        read_bundle(kept.folder)
    with pytest.raises(DataError, match="has step-000001; give one of them"):
        read_bundle(kept.folder.parent)
    with pytest.raises(DataError, match="no bundle in"):
        read_bundle(tmp_path / "nowhere")


def test_a_bundle_of_another_format_is_refused(keeper):
    kept = keeper(every=1)
    take(kept, 1)
    folder = kept.folder / "step-000001"
    story = json.loads((folder / "bundle.json").read_text())
    (folder / "bundle.json").write_text(json.dumps(story | {"format": 99}))
    from rlhf_algos import write_manifest

    write_manifest(folder)
    with pytest.raises(DataError, match="has format 99, this version of rlhf-launch reads format 1"):
        read_bundle(folder)


@pytest.mark.parametrize(
    ("bundles", "message"),
    [({"every": -1}, "every"), ({"keep": 0}, "keep"), ({"steps": [0]}, "steps"), ({"weights": "all"}, "weights")],
)
def test_settings_that_mean_nothing_are_refused(keeper, bundles, message):
    with pytest.raises(ConfigError, match=message):
        keeper(**bundles)
