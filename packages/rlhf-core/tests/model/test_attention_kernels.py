from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rlhf_core.model import attention_kernels
from rlhf_core.model.attention_kernels import (
    SEGMENT_ATTENTION,
    block_segments,
    kernels_for,
    sdpa_segments,
    varlen_segments,
)
from rlhf_core.model.packing import Layout, Segment

BRANCHED = Layout(
    segments=(
        Segment(start=0, stop=5),
        Segment(start=5, stop=6, prompt_start=0, prompt_stop=5),
        Segment(start=6, stop=9, prompt_start=0, prompt_stop=5),
        Segment(start=9, stop=13),
    )
)
PLAIN = Layout(segments=(Segment(start=0, stop=3), Segment(start=3, stop=4), Segment(start=4, stop=9)))


def states(layout, *, key_heads=2, seed=0):
    torch.manual_seed(seed)
    tokens = layout.segments[-1].stop
    shapes = [(1, 4, tokens, 16), (1, key_heads, tokens, 16), (1, key_heads, tokens, 16)]
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def run(attention, layout, inputs, **options):
    """Output and gradients."""
    layout = Layout(segments=layout.segments)
    output = attention(*inputs, layout, scale=0.3, **options)
    weights = torch.linspace(-1, 1, output.numel()).view_as(output)
    return [output, *torch.autograd.grad((output * weights).sum(), inputs)]


def reference(query, key, value, layout, *, scale):
    """All scores, masked token by token."""
    tokens = query.shape[2]
    mask = torch.zeros(tokens, tokens, dtype=torch.bool)
    for s in layout.segments:
        for q in range(s.start, s.stop):
            mask[q, s.start : q + 1] = True
            mask[q, s.prompt_start : s.prompt_stop] = True
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = (query @ key.transpose(2, 3) * scale).masked_fill(~mask, float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2)


def flash(query, key, value, cu_q, cu_k, max_q, max_k, scale):
    """What a flash-attention kernel for unequal lengths does: causal, aligned to the last query and key."""
    parts = []
    for index in range(len(cu_q) - 1):
        q = query[cu_q[index] : cu_q[index + 1]].transpose(0, 1)
        k, v = (states[cu_k[index] : cu_k[index + 1]].transpose(0, 1) for states in (key, value))
        assert q.shape[1] <= max_q
        assert k.shape[1] <= max_k
        groups = q.shape[0] // k.shape[0]
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        late = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).triu(k.shape[1] - q.shape[1] + 1)
        parts.append(
            ((q @ k.transpose(1, 2) * scale).masked_fill(late, float("-inf")).softmax(-1) @ v).transpose(0, 1)
        )
    return torch.cat(parts)


@pytest.fixture
def with_flash(monkeypatch):
    monkeypatch.setattr(attention_kernels, "_varlen_function", lambda: flash)


@pytest.mark.usefixtures("with_flash")
@pytest.mark.parametrize("layout", [BRANCHED, PLAIN], ids=["branched", "plain"])
@pytest.mark.parametrize("key_heads", [2, 4])
@pytest.mark.parametrize("attention", [sdpa_segments, varlen_segments], ids=["sdpa", "varlen"])
def test_kernels_give_the_same_output_and_gradients(layout, key_heads, attention):
    inputs = states(layout, key_heads=key_heads)
    for found, expected in zip(run(attention, layout, inputs), run(reference, layout, inputs), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("layout", [BRANCHED, PLAIN], ids=["branched", "plain"])
@pytest.mark.parametrize("key_heads", [2, 4])
def test_the_block_mask_gives_the_same_output(layout, key_heads):
    inputs = [tensor.detach() for tensor in states(layout, key_heads=key_heads)]  # no gradient on a CPU
    found = block_segments(*inputs, layout, scale=0.3, compiled=False)
    torch.testing.assert_close(found, reference(*inputs, layout, scale=0.3), atol=1e-5, rtol=1e-4)


@settings(deadline=None, max_examples=25)
@given(
    groups=st.lists(
        st.tuples(st.integers(0, 6), st.lists(st.integers(1, 5), min_size=1, max_size=3)), min_size=1, max_size=3
    )
)
def test_lengths_of_queries_and_keys(groups):
    segments, end = [], 0
    for prompt, branches in groups:
        start = end
        if prompt:
            segments.append(Segment(start=end, stop=end + prompt))
            end += prompt
        for length in branches:
            segments.append(Segment(start=end, stop=end + length, prompt_start=start, prompt_stop=start + prompt))
            end += length
    gathered, (cu_q, cu_k, max_q, max_k) = attention_kernels._varlen_arguments(segments, torch.device("cpu"))
    assert cu_q.tolist()[-1] == end
    assert cu_k.diff().tolist() == [segment.keys for segment in segments]
    assert (max_q, max_k) == (int(cu_q.diff().max()), int(cu_k.diff().max()))
    if gathered is None:
        assert cu_q.equal(cu_k)
    else:
        # A segment's last keys are its own tokens, in order.
        for index, segment in enumerate(segments):
            own = gathered[cu_k[index + 1] - (segment.stop - segment.start) : cu_k[index + 1]]
            assert own.tolist() == list(range(segment.start, segment.stop))


def test_which_kernels_a_device_offers(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert kernels_for(cpu, torch.bfloat16, 64) == ("sdpa",)
    monkeypatch.setattr(attention_kernels, "_varlen_function", lambda: flash)
    monkeypatch.setattr(attention_kernels, "find_spec", lambda name: object())
    assert kernels_for(cuda, torch.bfloat16, 64) == ("varlen", "blocks", "sdpa")
    assert kernels_for(cuda, torch.float32, 64) == ("blocks", "sdpa")
    assert kernels_for(cuda, torch.bfloat16, 8) == ("varlen", "sdpa")
    monkeypatch.setattr(attention_kernels, "_varlen_function", lambda: None)
    monkeypatch.setattr(attention_kernels, "find_spec", lambda name: None)
    assert kernels_for(cuda, torch.bfloat16, 64) == ("sdpa",)
    assert set(SEGMENT_ATTENTION) == {"sdpa", "varlen", "blocks"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kernel", ["varlen", "blocks", "sdpa"])
@pytest.mark.parametrize("layout", [BRANCHED, PLAIN], ids=["branched", "plain"])
def test_on_a_gpu(kernel, layout):
    dtype = torch.bfloat16 if kernel == "varlen" else torch.float32
    if kernel not in kernels_for(torch.device("cuda"), dtype, 16):
        pytest.skip("not there")
    inputs = [tensor.detach().to("cuda", dtype).requires_grad_() for tensor in states(layout)]
    expected = run(reference, layout, [tensor.detach().float().cpu().requires_grad_() for tensor in inputs])
    for found, wanted in zip(run(SEGMENT_ATTENTION[kernel], layout, inputs), expected, strict=True):
        tolerance = 5e-2 if dtype is torch.bfloat16 else 1e-3
        torch.testing.assert_close(found.float().cpu(), wanted, atol=tolerance, rtol=tolerance)
