"""Tables as plain lines."""

from rlhf_launch.tables import aligned


def test_columns_are_as_wide_as_their_widest_cell():
    assert aligned([("name", "n", "at"), ("a/long/name", "10", ""), ("b", "7", "x")], right=[1]) == (
        "name          n  at\na/long/name  10\nb             7  x"
    )


def test_nothing_is_cut_however_wide_the_table():
    assert "x" * 500 in aligned([("x" * 500, "y")])
