"""Manifests that hold an adapter instead of weights."""

import pytest
from rlhf_core import ConfigError, TensorSpec, WeightManifest, WeightSyncError, check_base
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
    with pytest.raises(ConfigError, match="rank must be at least 1"):
        AdapterScale(rank=0, alpha=3.0)
    with pytest.raises(ConfigError, match="alpha must be a finite number"):
        AdapterScale(rank=1, alpha=float("nan"))


def test_a_manifest_needs_room_and_dtypes_that_exist():
    with pytest.raises(ConfigError, match="bucket_bytes must be at least 1, got 0"):
        WeightManifest(version=4, tensors=TENSORS, bucket_bytes=0)
    with pytest.raises(ValueError, match="weight 'w' has the dtype 'floaty', which torch does not know"):
        _ = TensorSpec(name="w", shape=(2,), dtype="floaty").nbytes


def test_a_receiver_of_weights_refuses_an_adapter():
    manifest = WeightManifest(version=4, tensors=TENSORS, base_version=0, adapter=AdapterScale(rank=2, alpha=3.0))
    with pytest.raises(WeightSyncError, match="send them merged"):
        check_base(manifest, 0)
