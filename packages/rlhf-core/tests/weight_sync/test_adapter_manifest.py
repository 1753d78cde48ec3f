"""Manifests that hold an adapter instead of weights."""

import pytest
from rlhf_core import TensorSpec, WeightManifest, WeightSyncError, check_base
from rlhf_core.weight_sync.manifest import AdapterScale

TENSORS = (TensorSpec(name="base_model.model.layer.lora_A.weight", shape=(2, 4), dtype="float32"),)


def test_an_adapter_survives_the_control_channel_and_other_manifests_do_not_mention_it():
    scale = AdapterScale(rank=2, alpha=3.0)
    manifest = WeightManifest(version=4, tensors=TENSORS, base_version=0, adapter=scale)
    assert WeightManifest.from_dict(manifest.to_dict()) == manifest
    assert "adapter" not in WeightManifest(version=4, tensors=TENSORS).to_dict()


def test_an_adapter_belongs_to_weights():
    with pytest.raises(ValueError, match="base_version"):
        WeightManifest(version=4, tensors=TENSORS, adapter=AdapterScale(rank=2, alpha=3.0))
    with pytest.raises(ValueError, match="at least 1"):
        AdapterScale(rank=0, alpha=3.0)


def test_a_receiver_of_weights_refuses_an_adapter():
    manifest = WeightManifest(version=4, tensors=TENSORS, base_version=0, adapter=AdapterScale(rank=2, alpha=3.0))
    with pytest.raises(WeightSyncError, match="send them merged"):
        check_base(manifest, 0)
