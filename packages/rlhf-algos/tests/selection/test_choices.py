import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlhf_algos import above_threshold, best_of_n, desirable, pair_of, quantile, quantised

numbers = st.lists(st.floats(-100, 100, allow_nan=False).map(lambda x: round(x, 2)), min_size=1, max_size=12)
seeds = st.integers(0, 1000)


@given(numbers, st.integers(1, 5), seeds)
def test_best_of_n_takes_the_highest_scores(scores, k, seed):
    chosen = best_of_n(scores, k=k, draw=Random(seed))
    assert sorted((scores[i] for i in chosen), reverse=True) == sorted(scores, reverse=True)[:k]
    assert [scores[i] for i in chosen] == sorted((scores[i] for i in chosen), reverse=True)
    assert len(set(chosen)) == len(chosen) == min(k, len(scores))
    assert chosen == best_of_n(scores, k=k, draw=Random(seed))


def test_which_of_equal_scores_is_best_is_drawn():
    drawn = [best_of_n([1.0, 1.0, 0.0], draw=Random(seed))[0] for seed in range(400)]
    assert set(drawn) == {0, 1}
    assert 150 < drawn.count(0) < 250


@given(numbers, st.floats(-100, 100))
def test_above_threshold_leaves_the_threshold_out(scores, threshold):
    assert [scores[i] for i in above_threshold(scores, threshold)] == [s for s in scores if s > threshold]


@given(numbers, st.floats(0, 1))
def test_the_quantile_is_that_of_numpy(scores, q):
    numpy = pytest.importorskip("numpy")
    assert quantile(scores, q) == pytest.approx(float(numpy.quantile(scores, q)), abs=1e-9)


@given(numbers)
def test_something_lies_at_or_above_every_quantile(scores):
    for q in (0.0, 1 / 3, 0.9, 1.0):
        assert any(score >= quantile(scores, q) for score in scores)


@given(numbers, st.sampled_from(["worst", "random"]), st.floats(0, 20), seeds, st.data())
def test_a_pair_is_what_it_says(scores, rejected, margin, seed, data):
    texts = data.draw(st.lists(st.sampled_from("abcdef"), min_size=len(scores), max_size=len(scores)))
    found = pair_of(scores, texts, rejected=rejected, min_margin=margin, draw=Random(seed))
    if isinstance(found, str):
        best = max(scores)
        top = {texts[i] for i, s in enumerate(scores) if s == best}
        others = [s for i, s in enumerate(scores) if s < best and {texts[i]} != top]
        # With several texts at the top, another draw of the best may leave more to reject.
        assert found in ("alone", "tie", "margin")
        assert (found == "alone") == (len(scores) < 2)
        if len(top) == 1 and len(scores) > 1:
            assert (found == "tie") == (not others)
        return
    first, second = found
    assert scores[first] == max(scores)
    assert texts[first] != texts[second]
    assert scores[first] - scores[second] > 0
    assert scores[first] - scores[second] >= margin
    if rejected == "worst":
        assert scores[second] == min(s for i, s in enumerate(scores) if texts[i] != texts[first])


def test_pairs_by_hand():
    scores, texts = [0.2, 0.9, 0.5, 0.1], ["a", "b", "c", "d"]
    assert pair_of(scores, texts, draw=Random(0)) == (1, 3)
    drawn = {pair_of(scores, texts, rejected="random", min_margin=0.4, draw=Random(s)) for s in range(50)}
    assert drawn == {(1, 0), (1, 2), (1, 3)}
    assert pair_of(scores, texts, min_margin=0.9, draw=Random(0)) == "margin"
    assert pair_of([1.0, 1.0], ["a", "b"], draw=Random(0)) == "tie"
    assert pair_of([1.0, 0.0], ["a", "a"], draw=Random(0)) == "tie"
    assert pair_of([1.0], ["a"], draw=Random(0)) == "alone"


@given(numbers)
def test_labels_part_at_the_mean(scores):
    labels = desirable(scores)
    mean = math.fsum(scores) / len(scores)
    if min(scores) == max(scores):
        assert labels == [None] * len(scores)
        return
    assert {True, False} <= set(labels)
    assert all(label is None or label == (score > mean) for label, score in zip(labels, scores, strict=True))


@given(numbers, st.integers(2, 9), st.sampled_from(["width", "quantile"]))
def test_levels_rise_with_scores(scores, levels, bins):
    if min(scores) == max(scores):
        with pytest.raises(ValueError, match="scores are"):
            quantised(scores, levels, bins=bins)
        return
    found = quantised(scores, levels, bins=bins)
    assert all(1 <= level <= levels for level in found)
    ordered = sorted(zip(scores, found, strict=True))
    assert [level for _, level in ordered] == sorted(found)
    assert len({(score, level) for score, level in ordered}) == len(set(scores))
    if bins == "width":
        assert (ordered[0][1], ordered[-1][1]) == (1, levels)


def test_quantile_levels_hold_about_as_many_each():
    found = quantised([float(n) ** 3 for n in range(100)], 5, bins="quantile")
    assert [found.count(level) for level in range(1, 6)] == [20] * 5
