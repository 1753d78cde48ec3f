"""Manifests, buckets, packing, coverage."""

import json
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rlhf_core import (
    ModuleWeights,
    TensorSpec,
    WeightManifest,
    WeightSyncError,
    buffer_bytes,
    check_coverage,
    copy_into,
    join_link,
    open_sender,
    receive_weights,
    send_weights,
)
from torch import nn

DTYPES = ["float32", "bfloat16", "float16", "float64", "int8"]
specs = st.lists(
    st.tuples(st.lists(st.integers(0, 5), max_size=3), st.sampled_from(DTYPES)), min_size=1, max_size=12
).map(
    lambda items: tuple(
        TensorSpec(name=f"w{index}", shape=tuple(shape), dtype=dtype) for index, (shape, dtype) in enumerate(items)
    )
)


class Tensors:
    """WeightSource of a dict."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def manifest(self, version, *, bucket_bytes=1 << 20):
        return WeightManifest(
            version=version,
            bucket_bytes=bucket_bytes,
            tensors=tuple(
                TensorSpec(name=name, shape=tuple(t.shape), dtype=str(t.dtype).removeprefix("torch."))
                for name, t in self.tensors.items()
            ),
        )

    def gather(self, bucket):
        return [(spec.name, self.tensors[spec.name]) for spec in bucket.tensors]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head, self.inner = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False), nn.Linear(3, 3)
        self.head.weight = self.embed.weight


def transfer(source, manifest, *, receivers=1):
    """Over a local link; the received tensors of each receiver."""
    sender = open_sender("local", receivers=receivers, timeout_s=20)
    arrived = [{} for _ in range(receivers)]

    def receive(rank):
        receive_weights(
            manifest,
            join_link(sender.link, rank),
            lambda pairs: arrived[rank].update({n: t.clone() for n, t in pairs}),
        )

    threads = [threading.Thread(target=receive, args=(rank,)) for rank in range(receivers)]
    for thread in threads:
        thread.start()
    send_weights(source, manifest, sender)
    for thread in threads:
        thread.join(20)
    sender.close()
    return arrived


@given(specs, st.integers(1, 400))
def test_buckets_hold_every_tensor_once_in_order_and_aligned(tensors, bucket_bytes):
    manifest = WeightManifest(version=0, tensors=tensors, bucket_bytes=bucket_bytes)
    buckets = manifest.buckets()
    assert tuple(spec for bucket in buckets if bucket.is_last_part for spec in bucket.tensors) == tensors
    assert [bucket.index for bucket in buckets] == list(range(len(buckets)))
    assert all(bucket.nbytes <= buffer_bytes(bucket_bytes) for bucket in buckets)
    assert sum(bucket.part is not None for bucket in buckets) != 1
    for bucket in (bucket for bucket in buckets if bucket.part is None):
        ends = [offset + spec.nbytes for spec, offset in zip(bucket.tensors, bucket.offsets, strict=True)]
        assert all(offset % 64 == 0 for offset in bucket.offsets)
        assert all(end <= start for end, start in zip(ends, bucket.offsets[1:], strict=False))
        assert ends[-1] <= bucket.nbytes
        assert len(bucket.tensors) == 1 or ends[-1] <= bucket_bytes


def test_a_tensor_larger_than_a_bucket_is_cut_into_whole_values():
    specs = tuple(TensorSpec(name=name, shape=(n,), dtype="float32") for name, n in (("a", 3), ("b", 60), ("c", 2)))
    buckets = WeightManifest(version=0, tensors=specs, bucket_bytes=100, checksums=True).buckets()
    assert [(b.tensors[0].name, b.part, b.is_last_part) for b in buckets] == [
        ("a", None, True), ("b", (0, 64), False), ("b", (64, 128), False), ("b", (128, 192), False),
        ("b", (192, 240), True), ("c", None, True),
    ]  # fmt: skip
    assert [b.payload_bytes for b in buckets] == [64, 64, 64, 64, 48, 64]
    assert list(buckets[1].views(torch.zeros(96, dtype=torch.uint8))) == []


@given(specs, st.integers(1, 400))
def test_a_manifest_travels_as_plain_data(tensors, bucket_bytes):
    manifest = WeightManifest(version=7, tensors=tensors, bucket_bytes=bucket_bytes)
    copy = WeightManifest.from_dict(json.loads(json.dumps(manifest.to_dict())))
    assert copy == manifest
    assert copy.digest == manifest.digest


def test_the_digest_tells_what_changes_the_buckets_and_only_that():
    spec = TensorSpec(name="a", shape=(2,), dtype="float32")
    digest = WeightManifest(version=1, tensors=(spec,)).digest
    assert WeightManifest(version=2, tensors=(spec,)).digest == digest
    assert WeightManifest(version=1, tensors=(spec,), bucket_bytes=5).digest != digest
    for other in ({"name": "b"}, {"shape": (3,)}, {"dtype": "bfloat16"}):
        fields = {"name": "a", "shape": (2,), "dtype": "float32", **other}
        assert WeightManifest(version=1, tensors=(TensorSpec(**fields),)).digest != digest


def test_a_name_may_stand_only_once():
    spec = TensorSpec(name="a", shape=(2,), dtype="float32")
    with pytest.raises(ValueError, match=r"twice.*a"):
        WeightManifest(version=1, tensors=(spec, spec))


@pytest.mark.parametrize("bucket_bytes", [1, 64, 100, 1 << 20])
@pytest.mark.parametrize("receivers", [1, 3])
def test_weights_arrive_as_they_were_sent(bucket_bytes, receivers):
    torch.manual_seed(0)
    tensors = {f"w{i}": torch.randn(shape) for i, shape in enumerate([(3,), (2, 5), (), (0, 4), (7, 1), (11,)])}
    tensors["half"] = torch.randn(3).bfloat16()
    tensors["large"], tensors["turned"] = torch.randn(5, 31), torch.randn(31, 7).T
    source = Tensors(tensors)
    for arrived in transfer(source, source.manifest(1, bucket_bytes=bucket_bytes), receivers=receivers):
        assert set(arrived) == set(tensors)
        assert all(torch.equal(arrived[name], tensor) for name, tensor in tensors.items())


def test_the_manifests_dtype_is_what_travels():
    source = Tensors({"a": torch.tensor([1.0, 2.5])})
    manifest = WeightManifest(version=1, tensors=(TensorSpec(name="a", shape=(2,), dtype="bfloat16"),))
    (arrived,) = transfer(source, manifest)
    assert arrived["a"].dtype == torch.bfloat16
    assert arrived["a"].tolist() == [1.0, 2.5]


def test_a_large_tensor_is_cast_part_by_part():
    source = Tensors({"a": torch.randn(50, dtype=torch.float64)})
    spec = TensorSpec(name="a", shape=(50,), dtype="bfloat16")
    manifest = WeightManifest(version=1, tensors=(spec,), bucket_bytes=64)
    assert len(manifest.buckets()) == 2
    (arrived,) = transfer(source, manifest)
    assert torch.equal(arrived["a"], source.tensors["a"].bfloat16())


@pytest.mark.parametrize(("fits", "loaded"), [(True, ["small"]), (False, ["small", "large"])])
def test_a_large_tensor_is_written_to_its_place_if_it_has_one_that_fits(fits, loaded):
    sent = {"small": torch.randn(4), "large": torch.randn(9, 31)}
    place = torch.zeros(9, 31) if fits else torch.zeros(31, 9)
    manifest = Tensors(sent).manifest(1, bucket_bytes=128)
    sender = open_sender("local", receivers=1, timeout_s=20)
    found = {}

    def receive():
        load = found.update
        receive_weights(
            manifest,
            join_link(sender.link, 0),
            lambda pairs: load({name: tensor.clone() for name, tensor in pairs}),
            place={"large": place}.get,
        )

    thread = threading.Thread(target=receive)
    thread.start()
    report = send_weights(Tensors(sent), manifest, sender)
    thread.join(20)
    sender.close()
    assert list(found) == loaded
    assert torch.equal(place if fits else found["large"], sent["large"])
    assert (report.bytes, report.gathered_bytes, report.gathered_per_sent) == (4 * (4 + 9 * 31), 0, 0.0)
    assert report.seconds > 0


class Wrong(Tensors):
    """Gathers something else than the manifest says."""

    def __init__(self, *pairs) -> None:
        super().__init__({"a": torch.zeros(2), "b": torch.zeros(3)})
        self.pairs = pairs

    def gather(self, bucket):
        return self.pairs


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([("a", torch.zeros(2))], "missing.*b"),
        ([("a", torch.zeros(2)), ("a", torch.zeros(2))], "'a' was gathered twice"),
        ([("a", torch.zeros(2)), ("c", torch.zeros(3))], "'c'"),
        ([("a", torch.zeros(2)), ("b", torch.zeros(4))], r"'b' has shape \(4,\), its manifest says \(3,\)"),
    ],
)
def test_a_source_that_breaks_its_manifest_is_named(pairs, message):
    source = Wrong(*pairs)
    sender = open_sender("local", receivers=1, timeout_s=5)
    with pytest.raises(WeightSyncError, match=message):
        send_weights(source, source.manifest(1), sender)
    sender.close()


def test_ranks_that_do_not_send_gather_all_the_same():
    gathered = []

    class Counting(Tensors):
        def gather(self, bucket):
            gathered.extend(spec.name for spec in bucket.tensors)
            return iter(())

    source = Counting({"a": torch.zeros(2), "b": torch.zeros(3)})
    send_weights(source, source.manifest(1, bucket_bytes=1), None)
    assert gathered == ["a", "b"]


def test_module_weights_name_tied_parameters_once_and_can_rename():
    model = Tied()
    names = [spec.name for spec in ModuleWeights(model).manifest(1).tensors]
    assert names == ["embed.weight", "inner.weight", "inner.bias"]
    renamed = ModuleWeights(model, lambda name: None if "inner" in name else f"model.{name}")
    assert [spec.name for spec in renamed.manifest(1).tensors] == ["model.embed.weight"]


def test_copy_into_reaches_a_tied_parameter_by_either_name():
    model = Tied()
    copy_into(model)([("head.weight", torch.ones(5, 3))])
    assert (model.embed.weight == 1).all()


@pytest.mark.parametrize(
    ("name", "shape", "message"), [("nope", (1,), "no weight 'nope'"), ("inner.bias", (4,), "shape")]
)
def test_copy_into_refuses_what_does_not_fit(name, shape, message):
    with pytest.raises(WeightSyncError, match=message):
        copy_into(Tied())([(name, torch.ones(shape))])


def test_coverage_counts_tied_parameters_as_one():
    model = Tied()
    manifest = ModuleWeights(model).manifest(1)
    check_coverage(manifest, model)
    without = WeightManifest(version=1, tensors=tuple(t for t in manifest.tensors if t.name != "inner.bias"))
    with pytest.raises(WeightSyncError, match=r"1 weights.*inner\.bias"):
        check_coverage(without, model)


def test_a_source_that_breaks_its_manifest_in_parts_is_named():
    for pairs, message in (
        ([("b", torch.zeros(40))], "a part of weight 'a' was to be gathered, and b came"),
        ([("a", torch.zeros(41))], r"'a' has shape \(41,\), its manifest says \(40,\)"),
    ):
        manifest = Tensors({"a": torch.zeros(40)}).manifest(1, bucket_bytes=64)
        sender = open_sender("local", receivers=1, timeout_s=5)
        with pytest.raises(WeightSyncError, match=message):
            send_weights(Wrong(*pairs), manifest, sender)
        sender.close()
