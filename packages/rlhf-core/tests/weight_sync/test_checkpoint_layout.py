"""Weights in their checkpoint's layout: what Transformers fuses is read and written part by part."""

import pytest
import torch
from rlhf_core import ModuleWeights, WeightSyncError, check_coverage, copy_into
from rlhf_core.testing.tiny import save_tiny_experts, save_tiny_model
from rlhf_core.weight_sync.checkpoint_layout import _part, checkpoint_views


@pytest.fixture(params=["mixtral", "qwen3_moe"])
def path(request, tmp_path):
    return save_tiny_experts(tmp_path, request.param)


def load(path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def checkpoint(path):
    from safetensors.torch import load_file

    return load_file(f"{path}/model.safetensors")


def test_names_shapes_and_values_are_those_of_the_file(path):
    views, file = checkpoint_views(load(path)), checkpoint(path)
    assert views.keys() == file.keys()
    assert any(".experts.0." in name for name in views)
    assert all(torch.equal(views[name], tensor) for name, tensor in file.items())


def test_what_is_written_to_the_views_is_in_the_model(path, tmp_path):
    model, other = load(path), load(path)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn_like(parameter))
    source = ModuleWeights(other)
    manifest = source.manifest(1, bucket_bytes=8 << 10)
    check_coverage(manifest, model)
    take = copy_into(model)
    for bucket in manifest.buckets():
        take(source.gather(bucket))
    theirs = dict(other.named_parameters())
    assert all(torch.equal(parameter, theirs[name]) for name, parameter in model.named_parameters())


def test_an_expert_that_is_not_sent_is_missed(path):
    model = load(path)
    manifest = ModuleWeights(model).manifest(1)
    lost = next(spec for spec in manifest.tensors if ".experts.2." in spec.name)
    from dataclasses import replace

    with pytest.raises(WeightSyncError, match=lost.name):
        check_coverage(replace(manifest, tensors=tuple(s for s in manifest.tensors if s != lost)), model)


def test_plain_models_and_modules_keep_their_parameters(tmp_path):
    model = load(save_tiny_model(tmp_path, tied=True))
    assert {name: id(t) for name, t in checkpoint_views(model).items()} == {
        name: id(parameter) for name, parameter in model.named_parameters()
    }
    linear = torch.nn.Linear(2, 3)
    assert set(checkpoint_views(linear)) == {"weight", "bias"}


@pytest.mark.parametrize(
    "places",
    [torch.tensor([[0, 2], [1, 5]]), torch.tensor([3, 2, 1]), torch.tensor([0.0, 1.0])],
    ids=["no regular part", "backwards", "values that were computed"],
)
def test_what_is_no_part_of_a_parameter_is_refused(places):
    with pytest.raises(WeightSyncError, match="cannot be synchronised"):
        _part("w", torch.arange(6.0).view(2, 3), places)


def test_a_transposed_part():
    parameter = torch.arange(24.0).view(2, 3, 4)
    places = torch.arange(24).view(2, 3, 4)[1].T
    part = _part("w", parameter, places)
    assert torch.equal(part, parameter[1].T)
    part[0, 0] = -1
    assert parameter[1, 0, 0] == -1
