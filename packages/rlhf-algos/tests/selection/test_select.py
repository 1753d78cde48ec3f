import json
import random

import pytest
from rlhf_algos import (
    BestOfNConfig,
    ConditionalConfig,
    LabelsConfig,
    PairsConfig,
    QuantileConfig,
    ThresholdConfig,
    read_answers,
    select,
)
from rlhf_core import ConfigError, DataError

SCORES = {
    "0": [0.1, 0.9, 0.5],
    "1": [1.0, 1.0, 1.0],
    "2": [None, None, None],
    "10": [0.4, None, 0.2],
    "11": [0.7, None, None],
}


def sample(text, score, **changes):
    made = {"text": text, "token_ids": [len(text), 2], "log_probs": [-1.0, -1.0], "finish_reason": "stop"}
    made |= {"score": score} if score is not None else {"score": None, "score_error": "no"}
    return (
        made | {"score_components": {"helpful": -score, "short": 1.0} if isinstance(score, float) else {}} | changes
    )


def row(name, scores, **changes):
    samples = [sample(f"{name}-{place}", score) for place, score in enumerate(scores)]
    return {"prompt_id": name, "prompt": f"<{name}>", "prompt_token_ids": [7, 8], "samples": samples} | changes


@pytest.fixture
def write(tmp_path):
    def write(rows):
        path = tmp_path / "samples.jsonl"
        path.write_text("".join(json.dumps(each) + "\n" for each in rows))
        return str(path)

    return write


@pytest.fixture
def groups(write):
    return read_answers(write([row(name, scores) for name, scores in SCORES.items()]))


def texts(selection, column="completion"):
    return [made[column] for made in selection.rows]


def test_best_of_n_gives_a_row_of_tokens_and_text_for_each_prompt_that_has_an_answer(groups):
    found = select(groups, BestOfNConfig())
    assert texts(found)[0] == "0-1"
    assert [made["prompt_id"] for made in found.rows] == ["0", "1", "10", "11"]
    assert found.rows[0] == {
        "prompt_id": "0",
        "prompt": "<0>",
        "completion": "0-1",
        "prompt_token_ids": [7, 8],
        "completion_token_ids": [3, 2],
        "score": 0.9,
    }
    report = found.report
    assert (report.prompts, report.answers, report.unscored, report.rows) == (5, 15, 6, 4)
    assert report.mean_score == pytest.approx(5.8 / 9)
    assert report.left_out == {"no answer with a score": ("2",)}
    assert "1 prompts gave none, no answer with a score: 2" in report.lines()
    assert texts(select(groups, BestOfNConfig(k=2)))[:2] == ["0-1", "0-2"]


def test_a_part_of_the_score_may_decide(groups):
    assert texts(select(groups, BestOfNConfig(by="helpful")))[0] == "0-0"
    with pytest.raises(ConfigError, match=r"no 'kind'; there are score, helpful, short"):
        select(groups, BestOfNConfig(by="kind"))


def test_filters_name_the_prompts_that_they_leave_nothing_of(groups):
    found = select(groups, ThresholdConfig(threshold=0.5))
    assert texts(found) == ["0-1", "1-0", "1-1", "1-2", "11-0"]
    assert found.report.left_out == {"no answer with a score": ("2",), "none above 0.5": ("10",)}
    found = select(groups, QuantileConfig(quantile=0.5))
    assert texts(found) == ["0-1", "1-0", "1-1", "1-2", "11-0"]
    assert found.report.left_out["none from the quantile 0.7 on"] == ("10",)
    assert texts(select(groups, QuantileConfig(quantile=1.0, of="prompt")))[-2:] == ["10-0", "11-0"]


def test_equal_texts_of_a_prompt_count_once(write):
    same = row("0", [0.5, 0.9])
    same["samples"] = [sample("a", 0.5), sample("a", 0.9), sample("b", 0.7)]
    groups = read_answers(write([same]))
    assert texts(select(groups, BestOfNConfig(k=3))) == ["b", "a"]
    assert select(groups, ThresholdConfig(threshold=0.0)).report.rows == 2


def test_pairs_and_why_there_is_none(groups):
    found = select(groups, PairsConfig(min_margin=0.3))
    assert [(made["chosen"], made["rejected"]) for made in found.rows] == [("0-1", "0-0")]
    assert (found.rows[0]["chosen_score"], found.rows[0]["rejected_score"]) == (0.9, 0.1)
    assert found.rows[0]["rejected_token_ids"] == [3, 2]
    assert found.report.left_out == {
        "no answer with a score": ("2",),
        "a tie: no answer with a lower score and another text": ("1",),
        "no pair so far apart as min_margin": ("10",),
        "fewer than two answers with a score": ("11",),
    }


def test_labels(groups):
    found = select(groups, LabelsConfig())
    labels = [(made["completion"], made["label"]) for made in found.rows]
    assert labels == [("0-0", False), ("0-1", True), ("10-0", True), ("10-2", False)]
    assert len(select(groups, LabelsConfig(threshold=0.5)).rows) == 9


def test_conditions_stand_in_the_prompt_as_text_alone(groups):
    rule = ConditionalConfig(levels=3, attributes=("score", "helpful"), template="{prompt} [{attributes}]")
    found = select(groups, rule)
    assert found.rows[1] == {
        "prompt_id": "0",
        "prompt": "<0> [score:3,helpful:1]",
        "completion": "0-1",
        "levels": {"score": 3, "helpful": 1},
    }
    assert rule.highest == "{} [score:3,helpful:3]"
    assert len(found.rows) == 9
    with pytest.raises(DataError, match="short makes no levels: all 9 scores are 1"):
        select(groups, ConditionalConfig(attributes=("short",)))
    # A third of the answers share the highest score, so no twentieth is above the others.
    with pytest.raises(DataError, match="no answer has the highest level of score, 20"):
        select(groups, ConditionalConfig(levels=20, bins="quantile"))


def test_a_condition_goes_to_the_last_message_of_the_user(write):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    groups = read_answers(write([row("0", [0.0, 1.0], prompt_source=messages)]))
    found = select(groups, ConditionalConfig(levels=2, template="{prompt} ({attributes})"))
    assert found.rows[1]["prompt"] == [messages[0], {"role": "user", "content": "Hi (score:2)"}]
    assert found.rows[1]["completion"] == [{"role": "assistant", "content": "0-1"}]
    assert select(groups, BestOfNConfig()).rows[0]["prompt"] == messages


def test_tokens_of_text_are_not_taken_for_sampled_ones(write):
    made = row("0", [1.0])
    made["samples"] = [sample("a", 1.0, log_probs=None)]
    (found,) = select(read_answers(write([made])), BestOfNConfig()).rows
    assert set(found) == {"prompt_id", "prompt", "completion", "score"}


def test_truncated_answers_are_counted_or_left_out(write):
    made = row("0", [0.5, 1.0])
    made["samples"][1]["finish_reason"] = "length"
    groups = read_answers(write([made]))
    assert select(groups, BestOfNConfig()).report.truncated_chosen == 1
    found = select(groups, BestOfNConfig(leave_out_truncated=True))
    assert (texts(found), found.report.unscored) == (["0-0"], 1)


@pytest.mark.parametrize("rule", [BestOfNConfig(), PairsConfig(rejected="random"), BestOfNConfig(k=2)])
def test_the_order_of_the_file_changes_nothing(write, rule):
    rows = [row(str(n), [random.Random(n * 10 + s).choice([0.0, 0.5, 1.0]) for s in range(6)]) for n in range(30)]
    first = select(read_answers(write(rows)), rule, seed=3)
    random.Random(1).shuffle(rows)
    assert select(read_answers(write(rows)), rule, seed=3) == first
    assert select(read_answers(write(rows)), rule, seed=4).rows != first.rows
    # A prompt's draw does not depend on which others there are.
    alone = select(read_answers(write(rows[:1])), rule, seed=3).rows
    assert [made for made in first.rows if made["prompt_id"] == rows[0]["prompt_id"]] == list(alone)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [{"prompt": "a", "completion": "b"}],
            r"row 1 is not one of `rlhf generate`.*found 'prompt', 'completion'",
        ),
        ([row("0", [1.0]), row("0", [1.0])], r"row 2 has the prompt '0' of .* row 1 again"),
        ([row("0", [1.0]) | {"samples": [{"text": "a"}]}], r"row 1 has a sample without a score.*rlhf score"),
        ([row("0", [1.0]) | {"samples": [{"score": 1}]}], r"row 1: a sample must have a text"),
        ([row("0", [float("nan")])], r"row 1: score must be finite"),
        ([row("0", ["good"])], r"row 1: score must be a number"),
    ],
)
def test_bad_rows_are_named(write, rows, message):
    with pytest.raises(DataError, match=message):
        read_answers(write(rows))


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (BestOfNConfig, {"k": 0}, "k must be at least 1"),
        (ThresholdConfig, {"threshold": float("nan")}, "threshold must be a finite"),
        (QuantileConfig, {"quantile": 1.5}, "between 0 and 1"),
        (PairsConfig, {"min_margin": -1}, "min_margin must not be negative"),
        (ConditionalConfig, {"levels": 1}, "levels must be at least 2"),
        (ConditionalConfig, {"template": "{prompt}"}, "must have {attributes} once"),
        (ConditionalConfig, {"template": "{prompt}{attributes}{}"}, "stands for {prompt} elsewhere"),
    ],
)
def test_bad_rules(kind, settings, message):
    with pytest.raises(ConfigError, match=message):
        kind(**settings)
