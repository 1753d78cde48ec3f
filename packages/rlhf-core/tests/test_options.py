from __future__ import annotations

import dataclasses

import pytest
from rlhf_core import ConfigError, config_from, did_you_mean, nearest


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tower:
    storeys: int
    colours: tuple[str, ...] = ()
    height: float = dataclasses.field(init=False, default=0.0)

    def __post_init__(self) -> None:
        if self.storeys < 1:
            raise ConfigError(f"a tower has at least one storey, got {self.storeys}")


def test_fields_are_taken_and_lists_become_tuples() -> None:
    tower = config_from(Tower, {"storeys": 3, "colours": ["red", "blue"]}, what="tower")
    assert tower == Tower(storeys=3, colours=("red", "blue"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"storys": 3}, r"^tower: unknown key 'storys'; did you mean 'storeys'\? known are colours, storeys$"),
        ({"storeys": 3, "qqq": 1}, r"^tower: unknown key 'qqq'; known are colours, storeys$"),
        ({"storeys": 3, "height": 1.0}, r"unknown key 'height'"),
        ({}, r"^tower: 'storeys' is missing; write storeys: <value>$"),
        ({"storeys": 0}, r"^a tower has at least one storey, got 0$"),
        ({"storeys": "three"}, r"^tower: .*not supported between instances of 'str' and 'int'"),
    ],
)
def test_what_is_wrong_is_named_with_what_to_write(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from(Tower, options, what="tower")


def test_a_name_like_none_gives_no_hint() -> None:
    assert nearest("abc", []) is None
    assert nearest("reword", {"reward": 1, "word": 2}) == "reward"
    assert did_you_mean("abc", ["xyz"]) == ""
