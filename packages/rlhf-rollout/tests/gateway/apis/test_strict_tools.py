"""Arguments against the schemas of strict tools."""

import pytest
from rlhf_core import DataError
from rlhf_rollout.gateway.apis.strict_tools import check_strict, fits

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "enum": ["a", "b"]},
        "count": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "next": {"$ref": "#/$defs/node"},
    },
    "required": ["name", "count"],
    "additionalProperties": False,
    "$defs": {"node": {"type": "array", "items": {"type": ["number", "boolean"]}}},
}


@pytest.mark.parametrize(
    ("value", "does"),
    [
        ({"name": "a", "count": 3}, True),
        ({"name": "b", "count": None, "next": [1.5, True]}, True),
        ({"name": "a", "count": 3.0}, True),
        ({"name": "c", "count": 3}, False),
        ({"name": "a"}, False),
        ({"name": "a", "count": True}, False),
        ({"name": "a", "count": 3, "more": 1}, False),
        ({"name": "a", "count": 3, "next": ["x"]}, False),
        ([], False),
    ],
)
def test_a_value_fits_or_does_not(value, does):
    check_strict(SCHEMA, "f")
    assert fits(value, SCHEMA, SCHEMA) is does


def test_a_schema_that_goes_round_in_circles_fits_nothing():
    circle = {"$ref": "#"}
    check_strict(circle, "f")
    assert not fits({}, circle, circle)


@pytest.mark.parametrize(
    ("schema", "part"),
    [
        ({"type": "string", "pattern": "(a+)+$"}, "pattern"),
        ({"properties": {"a": {"minimum": 1}}}, "minimum"),
        ({"type": "text"}, "no type 'text'"),
        ({"type": [5]}, "no type '5'"),
        ({"required": "a"}, "`required`"),
        ({"properties": 5}, "`properties`"),
        (5, "must be an object"),
    ],
)
def test_what_is_not_looked_at_is_refused_by_name(schema, part):
    with pytest.raises(DataError, match=part):
        check_strict(schema, "f")
