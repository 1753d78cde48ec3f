"""The numbers of `rlhf eval` against counting, and what is refused."""

import json
from itertools import combinations
from statistics import fmean

import pytest
from rlhf_core import ConfigError, DataError
from rlhf_launch.evaluation.summary import (
    as_plain,
    as_table,
    check_counts,
    check_ks,
    read_samples,
    summarise_rows,
)


def row(*scores, reasons=None, lengths=None, prompt_id="0"):
    reasons = reasons or ["stop"] * len(scores)
    lengths = lengths or [1] * len(scores)
    samples = [
        {"token_ids": [5] * length, "finish_reason": reason, "score": score}
        | ({"score_error": "broke"} if score is None else {})
        for score, reason, length in zip(scores, reasons, lengths, strict=True)
    ]
    return {"prompt_id": prompt_id, "samples": samples}


@pytest.mark.parametrize("n", [1, 4, 6])
def test_pass_at_k_is_the_share_of_draws_with_a_sample_that_passes(n):
    for right in range(n + 1):
        scores = [1.0] * right + [0.0] * (n - right)
        found = summarise_rows([row(*scores)], range(1, n + 1), model="m", data="d")
        for k in range(1, n + 1):
            draws = [max(draw) for draw in combinations(scores, k)]
            assert found.passed[k] == pytest.approx(fmean(draws))


def test_numbers_by_hand():
    rows = [row(1.0, 0.0, lengths=[2, 4], reasons=["stop", "length"]), row(1.0, 1.0, lengths=[1, 1])]
    found = summarise_rows(rows, [1, 2], model="m", data="d")
    assert (found.prompts, found.samples, found.dropped) == (2, 4, 0)
    assert found.reward == 0.75
    # Means of the prompts are 0.5 and 1: deviation sqrt(1/8), over sqrt(2).
    assert found.standard_error == pytest.approx(0.25)
    assert found.passed == {1: 0.75, 2: 1.0}
    assert (found.truncated, found.response_length) == (0.25, 2.0)


def test_more_samples_of_the_same_answers_make_no_mean_surer():
    few = summarise_rows([row(1.0), row(0.0), row(0.0)], [1], model="m", data="d")
    many = summarise_rows([row(*[s] * 50) for s in (1.0, 0.0, 0.0)], [1], model="m", data="d")
    assert few.standard_error == pytest.approx(many.standard_error)


def test_dropped_samples_count_in_no_score():
    found = summarise_rows([row(1.0, None), row(0.0, 1.0)], [1, 2], model="m", data="d")
    assert (found.samples, found.dropped, found.reward) == (4, 1, 0.75)
    assert found.passed == {1: 0.75, 2: 1.0}
    nothing = summarise_rows([row(None)], [1], model="m", data="d")
    assert (nothing.reward, nothing.standard_error, nothing.passed) == (None, None, {1: None})
    assert "  -  " in as_table([nothing], [1])


def test_the_score_that_passes_can_be_chosen():
    assert summarise_rows([row(0.5, 0.6)], [1], model="m", data="d").passed == {1: 0.5}
    assert summarise_rows([row(0.5, 0.6)], [1], model="m", data="d", pass_score=0.4).passed == {1: 1.0}


def test_a_table_and_json_have_a_line_for_each_model_and_set():
    found = [summarise_rows([row(1.0, 0.0)], [1, 2], model=model, data="math") for model in ("before", "after")]
    lines = as_table(found, [1, 2]).splitlines()
    titles = ["model", "data", "prompts", "samples", "dropped", "reward", "+-", "pass@1", "pass@2"]
    assert lines[0].split() == [*titles, "truncated", "length"]
    assert lines[1].split() == ["before", "math", "1", "2", "0", "0.5000", "-", "0.5000", "1.0000", "0.0%", "1.0"]
    assert lines[2].startswith("after")
    plain = json.loads(json.dumps(as_plain(found[0])))
    assert (plain["pass@1"], plain["pass@2"], plain["reward"]) == (0.5, 1.0, 0.5)
    assert "passed" not in plain


def test_a_k_without_samples_is_refused():
    check_ks([1, 8], 8)
    with pytest.raises(ConfigError, match="give --samples 9"):
        check_ks([1, 9], 8)
    with pytest.raises(ConfigError, match="at least 1"):
        check_ks([0], 8)
    with pytest.raises(ConfigError, match="twice"):
        check_ks([1, 1], 8)


def test_a_file_that_is_no_file_of_samples_is_refused(tmp_path):
    path = tmp_path / "samples.jsonl"
    with pytest.raises(DataError, match="no samples file"):
        list(read_samples(path))
    path.write_text(json.dumps(row(1.0)) + "\n" + '{"prompt": "x"}\n')
    with pytest.raises(DataError, match="row 2 is not one"):
        list(read_samples(path))
    path.write_text(json.dumps(row(float("nan"))) + "\n")
    with pytest.raises(DataError, match="the score nan"):
        list(read_samples(path))
    with pytest.raises(DataError, match="too few for pass@2"):
        check_counts(path, [row(1.0)], [1, 2])
    with pytest.raises(DataError, match="no rows"):
        check_counts(path, [], [1])
    unscored = row(1.0)
    del unscored["samples"][0]["score"]
    with pytest.raises(DataError, match="row 1 has a sample without a score"):
        check_counts(path, [unscored], [1])
