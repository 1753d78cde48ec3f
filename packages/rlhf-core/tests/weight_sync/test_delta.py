"""Partial syncs: only changes travel, exactly, and only onto the version they start from."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rlhf_core import (
    ConfigError,
    DeltaSource,
    ModuleWeights,
    WeightManifest,
    WeightSyncError,
    check_base,
    copy_into,
    receive_weights,
    send_weights,
)
from rlhf_core.testing.transport import Beside, TransportConformance
from torch import nn


class Local(TransportConformance):
    kind = "local"


def model(dtype=torch.float32):
    torch.manual_seed(0)
    parts = {
        "layers": nn.ModuleList(nn.ModuleDict({"q": nn.Linear(40, 30), "k": nn.Linear(40, 30)}) for _ in range(3))
    }
    return nn.ModuleDict({**parts, "embed": nn.Embedding(9, 40)}).to(dtype)


class Pair:
    """A sender with memory and a receiver at the end of a local link."""

    def __init__(self, mode, dtype=torch.float32):
        self.trained, self.served = model(dtype), model(dtype)
        nn.init.zeros_(self.served["embed"].weight)
        self.source = DeltaSource(ModuleWeights(self.trained), mode=mode)
        self.sender, (self.receiver,) = Local().connected()

    def sync(self, version):
        manifest = WeightManifest.from_dict(self.source.changes(version, bucket_bytes=2000).to_dict())
        taking = Beside(
            lambda: receive_weights(manifest, self.receiver, copy_into(self.served), base=self.served.get_parameter)
        )
        send_weights(self.source, manifest, self.sender)
        taking.result()
        return manifest

    def check(self):
        for name, parameter in self.trained.named_parameters():
            found = self.served.get_parameter(name).detach()
            assert torch.equal(found.view(torch.uint8), parameter.detach().view(torch.uint8)), name


@pytest.mark.parametrize("mode", ["tensors", "values"])
def test_the_first_sync_is_full_and_an_unconfirmed_one_makes_the_next_full(mode):
    pair = Pair(mode)
    for version in (1, 2):
        assert not pair.sync(version).partial
        pair.check()
    pair.source.confirm(2)
    manifest = pair.sync(3)
    assert (manifest.base_version, manifest.tensors) == (2, ())
    pair.check()


def test_only_changed_tensors_travel_with_what_engines_fuse_them_with():
    pair = Pair("tensors")
    pair.sync(1)
    pair.source.confirm(1)
    with torch.no_grad():
        pair.trained["layers"][1]["k"].bias[3] += 1e-6
    assert [spec.name for spec in pair.sync(2).tensors] == ["layers.1.k.weight", "layers.1.k.bias"]
    pair.check()


@settings(max_examples=15, deadline=None)
@given(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.integers(1, 1200))
def test_single_values_arrive_bit_for_bit(dtype, count):
    pair = Pair("values", dtype)
    pair.sync(1)
    pair.source.confirm(1)
    weight = pair.trained["layers"][2]["q"].weight
    with torch.no_grad():
        places = torch.randperm(weight.numel())[:count]
        weight.view(-1)[places] = torch.randn(count).to(dtype)
        weight.view(-1)[places[0]] = float("nan")
        pair.trained["embed"].weight[0, 0] = -0.0
    pair.trained["embed"].weight.data[0, 0] = -0.0
    manifest = pair.sync(2)
    by_name = {spec.name: spec for spec in manifest.tensors}
    assert by_name.keys() == {"layers.2.q.weight", "embed.weight"}
    assert by_name["embed.weight"].changed == 1
    sparse = by_name["layers.2.q.weight"].changed
    itemsize = weight.element_size()
    if sparse is not None:
        assert by_name["layers.2.q.weight"].nbytes < weight.numel() * itemsize + 64
    else:
        assert count * (4 + itemsize) >= weight.numel() * itemsize * 0.9
    pair.check()
    pair.sender.close()


def test_changes_need_their_base():
    manifest = WeightManifest(version=5, tensors=(), base_version=4)
    check_base(manifest, 4)
    check_base(WeightManifest(version=5, tensors=()), None)
    for held, what in ((3, "version 3"), (None, "a failed sync")):
        with pytest.raises(WeightSyncError, match=f"from weight version 4 to 5.*{what}.*send all"):
            check_base(manifest, held)


def test_a_receiver_of_whole_tensors_refuses_single_values():
    pair = Pair("values")
    pair.sync(1)
    pair.source.confirm(1)
    with torch.no_grad():
        pair.trained["embed"].weight[0, 0] += 1
    manifest = pair.source.changes(2)
    taking = Beside(lambda: receive_weights(manifest, pair.receiver, copy_into(pair.served)))
    with pytest.raises(WeightSyncError, match="left"):
        send_weights(pair.source, manifest, pair.sender)
    with pytest.raises(WeightSyncError, match=r"whole tensors.*embed\.weight"):
        taking.result()


def test_an_unknown_mode_is_refused():
    with pytest.raises(ConfigError, match="'bits'"):
        DeltaSource(ModuleWeights(model()), mode="bits")
