"""Whether a resumed run owes the evaluation of the step that it continues from."""

import json

import pytest
from rlhf_launch.online.run import is_evaluation_missing


@pytest.mark.parametrize(
    ("every", "step", "rows", "missing"),
    [
        (2, 4, [{"step": 4, "reward": 1.0}], True),
        (2, 4, [{"step": 4, "reward": 1.0}, {"step": 4, "eval/sums/reward": 1.0}], False),
        (2, 4, [{"step": 2, "eval/sums/reward": 1.0}], True),
        (2, 3, [], False),
        (0, 3, [], False),
        (0, 6, [], True),
    ],
)
def test_what_was_due_and_is_not_there_is_owed(settings, make_config, tmp_path, every, step, rows, missing):
    config = make_config(settings, train__steps=6, evaluation__every=every)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert is_evaluation_missing(config, tmp_path, step) is missing
