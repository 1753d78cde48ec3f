import pytest
from rlhf_launch.online.remarks import Remarks

PLAIN = {"equal_score_groups": 0.5, "truncated": 0.2}


@pytest.mark.parametrize(
    ("metrics", "passes", "part"),
    [
        ({"equal_score_groups": 1.0}, 0.1, "gradient are zero"),
        ({"truncated": 0.95}, 0.1, "95% of the samples were cut off"),
        ({}, 1.5, "come again"),
    ],
)
def test_each_remark_is_made_once(metrics, passes, part):
    remarks = Remarks()
    assert remarks.new(PLAIN, passes=1.0) == []
    (said,) = remarks.new(PLAIN | metrics, passes=passes)
    assert part in said
    assert remarks.new(PLAIN | metrics, passes=passes) == []
