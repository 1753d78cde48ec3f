"""Requests, sampling settings and configs refuse values that mean nothing."""

import math

import pytest
from rlhf_core import (
    ConfigError,
    GenerationRequest,
    LogProbMeaning,
    RolloutConfig,
    Sample,
    SamplingConfig,
)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 0},
        {"min_tokens": -1},
        {"min_tokens": 9},
        {"temperature": -0.1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": 1.0},
        {"min_p": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": math.nan},
        {"max_tokens": 1.5},
        {"repetition_penalty": 0.0},
        {"presence_penalty": 2.1},
        {"frequency_penalty": -2.1},
        {"frequency_penalty": math.nan},
    ],
    ids=str,
)
def test_sampling(fields):
    with pytest.raises(ConfigError, match=f"{next(iter(fields))} must"):
        SamplingConfig(**{"max_tokens": 8, **fields})


def test_log_probs_say_what_they_mean():
    assert SamplingConfig(max_tokens=1, temperature=0.7, top_k=5).meaning == LogProbMeaning(
        temperature=0.7, top_k=5
    )
    assert SamplingConfig(max_tokens=1, temperature=0.0).meaning.temperature == 1.0, "greedy: at temperature 1"
    assert not SamplingConfig(max_tokens=1, temperature=0.7).meaning.truncated
    for truncation in ({"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}):
        cut = SamplingConfig(max_tokens=1, **truncation).meaning
        assert cut.truncated
        assert not cut.plain
    held_back = SamplingConfig(max_tokens=4, min_tokens=2).meaning
    assert (held_back.min_tokens, held_back.truncated, held_back.plain) == (2, False, False)
    assert SamplingConfig(max_tokens=4, temperature=0.7).meaning.plain


@pytest.mark.parametrize(
    ("penalty", "counts_sampled"),
    [({"repetition_penalty": 1.2}, False), ({"presence_penalty": 0.5}, True), ({"frequency_penalty": -0.5}, True)],
    ids=str,
)
def test_log_probs_under_penalties_say_so(penalty, counts_sampled):
    sampling = SamplingConfig(max_tokens=4, **penalty)
    assert sampling.counts_sampled is counts_sampled
    assert sampling.meaning == LogProbMeaning(**penalty)
    assert (sampling.meaning.penalised, sampling.meaning.truncated, sampling.meaning.plain) == (True, False, False)


@pytest.mark.parametrize(
    ("fields", "message"), [({"prompt_token_ids": ()}, "empty prompt"), ({"n": 0}, "n=0 samples")]
)
def test_requests(fields, message):
    with pytest.raises(ConfigError, match=message):
        GenerationRequest(
            **{"request_id": "r", "prompt_token_ids": (1,), "sampling": SamplingConfig(max_tokens=1), **fields}
        )


def test_a_sample_has_one_log_prob_and_version_per_token():
    with pytest.raises(ValueError, match="2 tokens, 1 log-probs, 2 versions"):
        Sample(token_ids=(1, 2), log_probs=(-0.1,), weight_versions=(0, 0), finish_reason="stop")


@pytest.mark.parametrize("field", ["max_model_len", "max_num_seqs", "tensor_parallel_size"])
def test_rollout_config(field):
    with pytest.raises(ConfigError, match=f"{field} must be at least 1, got 0"):
        RolloutConfig(model="m", **{field: 0})


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"dtype": "half"}, "dtype must be one of float32, bfloat16, float16, got 'half'"),
        ({"adapter_rank": -1}, "adapter_rank must be at least 0, got -1"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"max_model_len": 2.5}, "max_model_len must be a whole number, got 2.5"),
        ({"trust_remote_code": "no"}, "trust_remote_code must be true or false"),
    ],
    ids=str,
)
def test_an_impossible_rollout_is_refused(fields, complaint):
    with pytest.raises(ConfigError, match=f"^rollout: {complaint}"):
        RolloutConfig(model="m", **fields)


@pytest.mark.parametrize(
    "fields", [{"temperature": 0.0}, {"temperature": math.nan}, {"top_p": 0.0}, {"repetition_penalty": 0}], ids=str
)
def test_a_log_prob_needs_a_distribution_that_exists(fields):
    with pytest.raises(ConfigError, match=f"^log-probs: {next(iter(fields))} must be"):
        LogProbMeaning(**fields)
