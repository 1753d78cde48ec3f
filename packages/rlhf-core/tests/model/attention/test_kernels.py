from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rlhf_core import CapabilityError
from rlhf_core.model.attention import cuda, kernels, segments
from rlhf_core.model.attention.cuda import block_segments, varlen_segments
from rlhf_core.model.attention.kernels import SEGMENT_ATTENTION, kernels_for
from rlhf_core.model.attention.segments import AttentionTerms, sdpa_segments
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


def terms_of(case):
    """A scale, and what the case has beyond it."""
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], requires_grad=True) if case.get("sinks") else None
    return AttentionTerms(scale=0.3, window=case.get("window"), soft_cap=case.get("soft_cap"), sinks=sinks)


CASES = {
    "plain": {},
    "window": {"window": 3},
    "window of one": {"window": 1},
    "wide window": {"window": 100},
    "cap": {"soft_cap": 0.7},
    "sinks": {"sinks": True},
    "all": {"window": 4, "soft_cap": 0.7, "sinks": True},
}


def run(attention, layout, inputs, terms, **options):
    """Output and gradients, those of the sinks last."""
    output = attention(*inputs, Layout(segments=layout.segments), terms, **options)
    weights = torch.linspace(-1, 1, output.numel(), device=output.device).view_as(output)
    wanted = [*inputs, *([] if terms.sinks is None else [terms.sinks])]
    return [output, *torch.autograd.grad((output * weights).sum(), wanted)]


def reference(query, key, value, layout, terms):
    """All scores, masked token by token; the positions of a branch go on after its prompt."""
    tokens = query.shape[2]
    mask = torch.zeros(tokens, tokens, dtype=torch.bool)
    window = terms.window or tokens
    for s in layout.segments:
        places = [*range(s.prompt_start, s.prompt_stop), *range(s.start, s.stop)]
        for q in range(s.start, s.stop):
            position = places.index(q)
            mask[q, places[max(0, position - window + 1) : position + 1]] = True
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * terms.scale
    if terms.soft_cap is not None:
        scores = terms.soft_cap * torch.tanh(scores / terms.soft_cap)
    shares = scores.masked_fill(~mask, float("-inf")).exp()
    total = shares.sum(-1, keepdim=True)
    if terms.sinks is not None:
        total = total + terms.sinks.exp().view(1, -1, 1, 1)
    return (shares / total @ value).transpose(1, 2)


def flash(query, key, value, cu_q, cu_k, max_q, max_k, terms):
    """What a flash-attention kernel for unequal lengths does: causal, aligned to the last query and key."""
    parts = []
    assert terms.sinks is None
    for index in range(len(cu_q) - 1):
        q = query[cu_q[index] : cu_q[index + 1]].transpose(0, 1)
        k, v = (states[cu_k[index] : cu_k[index + 1]].transpose(0, 1) for states in (key, value))
        assert q.shape[1] <= max_q
        assert k.shape[1] <= max_k
        groups = q.shape[0] // k.shape[0]
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        apart = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1] - torch.arange(k.shape[1])
        hidden = (apart < 0) | (apart >= (terms.window or 1 << 30))
        scores = q @ k.transpose(1, 2) * terms.scale
        if terms.soft_cap is not None:
            scores = terms.soft_cap * torch.tanh(scores / terms.soft_cap)
        parts.append((scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(parts)


@pytest.fixture
def with_flash(monkeypatch):
    monkeypatch.setattr(cuda, "varlen_function", lambda: flash)


@pytest.mark.usefixtures("with_flash")
@pytest.mark.parametrize("layout", [BRANCHED, PLAIN], ids=["branched", "plain"])
@pytest.mark.parametrize("key_heads", [2, 4])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("attention", [sdpa_segments, varlen_segments], ids=["sdpa", "varlen"])
def test_kernels_give_the_same_output_and_gradients(layout, key_heads, attention, case):
    inputs, terms = states(layout, key_heads=key_heads), terms_of(CASES[case])
    if attention is varlen_segments and terms.sinks is not None:
        with pytest.raises(CapabilityError, match="sinks"):
            run(attention, layout, inputs, terms)
        return
    expected = run(reference, layout, inputs, terms)
    for found, wanted in zip(run(attention, layout, inputs, terms), expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


def test_long_rows_under_a_window_are_cut_into_blocks(monkeypatch):
    monkeypatch.setattr(segments, "_WINDOW_BLOCK", 2)
    inputs, terms = states(BRANCHED), terms_of(CASES["window"])
    layout = Layout(segments=BRANCHED.segments)
    output = sdpa_segments(*inputs, layout, terms)
    torch.testing.assert_close(output, reference(*inputs, BRANCHED, terms), atol=1e-5, rtol=1e-4)
    assert max(mask.shape[1] for mask in layout.masks.values()) <= 2 + 3 - 1


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("layout", [BRANCHED, PLAIN], ids=["branched", "plain"])
@pytest.mark.parametrize("key_heads", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_the_block_mask_gives_the_same_output(layout, key_heads, case, monkeypatch):
    terms = terms_of(CASES[case])
    if terms.sinks is not None:
        pytest.skip("FlexAttention gives no log-sums on a CPU")
    inputs = [tensor.detach() for tensor in states(layout, key_heads=key_heads)]  # no gradient on a CPU
    found = block_segments(*inputs, Layout(segments=layout.segments), terms, compiled=False)
    torch.testing.assert_close(found, reference(*inputs, layout, terms), atol=1e-5, rtol=1e-4)


def test_a_sink_put_in_after_the_block_kernel(monkeypatch):
    """With a stand-in that gives the output without the sink, and the log of the sum of exponentials."""
    inputs, terms = states(BRANCHED, key_heads=4), terms_of(CASES["sinks"])
    without = AttentionTerms(scale=terms.scale)

    def flex(query, key, value, **_):
        ones = torch.ones(1, 4, query.shape[2], 1)
        one = AttentionTerms(scale=terms.scale, sinks=torch.zeros(4))
        kept = reference(query, key, ones, BRANCHED, one).transpose(1, 2)[..., 0]  # z = sum e; kept = z / (z + 1)
        return reference(query, key, value, BRANCHED, without).transpose(1, 2), torch.logit(kept)

    monkeypatch.setattr(cuda, "_flex", lambda *_: flex)
    monkeypatch.setattr(cuda, "_block_mask", lambda *_, **__: None)
    expected = run(reference, BRANCHED, inputs, terms)
    for found, wanted in zip(run(block_segments, BRANCHED, inputs, terms), expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("terms", "window", "more"),
    [
        (AttentionTerms(scale=0.3), (-1, 0), {}),
        (AttentionTerms(scale=0.3, window=4), (3, 0), {}),
        (AttentionTerms(scale=0.3, soft_cap=2.0), (-1, 0), {"softcap": 2.0}),
    ],
)
def test_what_flash_attention_is_told(monkeypatch, terms, window, more):
    """Its window does not count the query's own key."""
    told = []
    module = ModuleType("flash_attn")
    module.flash_attn_varlen_func = lambda query, *_, **options: told.append(options) or query
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr(cuda, "find_spec", lambda name: object())
    cuda.varlen_function.cache_clear()
    try:
        varlen_segments(*states(BRANCHED), Layout(segments=BRANCHED.segments), terms)
    finally:
        cuda.varlen_function.cache_clear()
    assert told == [{"softmax_scale": 0.3, "causal": True, "window_size": window, **more}]


def test_what_torchs_own_kernel_is_told(monkeypatch):
    from torch.nn.attention import varlen

    told = []
    monkeypatch.setattr(varlen, "varlen_attn", lambda query, *_, **options: told.append(options) or query)
    monkeypatch.setattr(cuda, "find_spec", lambda name: None if name == "flash_attn" else object())
    cuda.varlen_function.cache_clear()
    try:
        layout = Layout(segments=BRANCHED.segments)
        varlen_segments(*states(BRANCHED), layout, AttentionTerms(scale=0.3, window=4))
        with pytest.raises(CapabilityError, match="soft cap"):
            varlen_segments(*states(BRANCHED), layout, AttentionTerms(soft_cap=2.0))
    finally:
        cuda.varlen_function.cache_clear()
    assert told == [{"scale": 0.3, "window_size": (3, 0), "enable_gqa": True}]


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
    gathered, (cu_q, cu_k, max_q, max_k) = cuda.varlen_arguments(segments, torch.device("cpu"))
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
    assert kernels_for(cpu, torch.bfloat16, [64]) == ("sdpa",)
    monkeypatch.setattr(kernels, "varlen_function", lambda: flash)
    monkeypatch.setattr(kernels, "find_spec", lambda name: object())
    assert kernels_for(cuda, torch.bfloat16, [64]) == ("varlen", "blocks", "sdpa")
    assert kernels_for(cuda, torch.float32, [64]) == ("blocks", "sdpa")
    assert kernels_for(cuda, torch.bfloat16, [8]) == ("varlen", "sdpa")
    assert kernels_for(cuda, torch.bfloat16, [64, 20]) == ("blocks", "sdpa")
    monkeypatch.setattr(kernels, "varlen_function", lambda: None)
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    assert kernels_for(cuda, torch.bfloat16, [64]) == ("sdpa",)
    assert set(SEGMENT_ATTENTION) == {"sdpa", "varlen", "blocks"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kernel", ["varlen", "blocks", "sdpa"])
@pytest.mark.parametrize("layout", [BRANCHED, PLAIN], ids=["branched", "plain"])
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu(kernel, layout, case):
    dtype = torch.bfloat16 if kernel == "varlen" else torch.float32
    if kernel not in kernels_for(torch.device("cuda"), dtype, [16]):
        pytest.skip("not there")
    there = [tensor.detach().to("cuda", dtype).requires_grad_() for tensor in states(layout)]
    here, terms = [tensor.detach().float().cpu().requires_grad_() for tensor in there], terms_of(CASES[case])
    sinks = None if terms.sinks is None else terms.sinks.detach().to("cuda", dtype).requires_grad_()
    given = AttentionTerms(scale=terms.scale, window=terms.window, soft_cap=terms.soft_cap, sinks=sinks)
    expected = run(reference, layout, here, terms)
    try:
        outputs = run(SEGMENT_ATTENTION[kernel], layout, there, given)
    except CapabilityError:
        assert kernel == "varlen"
        return
    for found, wanted in zip(outputs, expected, strict=True):
        tolerance = 5e-2 if dtype is torch.bfloat16 else 1e-3
        torch.testing.assert_close(found.float().cpu(), wanted, atol=tolerance, rtol=tolerance)
