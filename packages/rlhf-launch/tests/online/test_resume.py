"""Which evaluations a resumed run owes at the step that it continues from."""

import json

import pytest
from rlhf_launch.online.run import is_evaluation_due, sets_evaluated


@pytest.mark.parametrize(("every", "step", "due"), [(2, 4, True), (2, 3, False), (0, 3, False), (0, 6, True)])
def test_an_evaluation_is_due_every_so_many_steps_and_at_the_end(settings, make_config, every, step, due):
    config = make_config(settings, train__steps=6, evaluation__every=every)
    assert is_evaluation_due(config, step) is due


@pytest.mark.parametrize(
    ("rows", "done"),
    [
        ([], set()),
        ([{"step": 4, "reward": 1.0}], set()),
        ([{"step": 2, "eval/sums/reward": 1.0}], set()),
        ([{"step": 4, "reward": 1.0}, {"step": 4, "eval/sums/reward": 1.0}], {"sums"}),
        (
            [{"step": 4, "eval/sums/pass@2": 1.0}, {"step": 4, "eval/words/dropped_samples": 3}],
            {"sums", "words"},
        ),
    ],
)
def test_the_sets_that_were_evaluated_are_in_the_metrics(tmp_path, rows, done):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert sets_evaluated(tmp_path, 4) == done
