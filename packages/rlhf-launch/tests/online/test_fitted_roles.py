"""Sizes of micro-batches that the engines of a run find: said once, kept for those without checkpoints."""

import json

import pytest
from rlhf_core import FittedTokens
from rlhf_launch.online.fitted_roles import FittedRoles


def fitted(tokens):
    return FittedTokens(tokens=tokens, fixed=1 << 20, per_token=2048, free=1 << 30, conditions="one rank")


class Role:
    """Ranks that have found what the test says."""

    def __init__(self, name):
        self.name = name
        self.found, self.taken, self.asked = {}, None, 0

    def fitted_tokens(self):
        self.asked += 1
        return self.found

    def take_fitted_tokens(self, found):
        self.taken = found


@pytest.fixture
def policy():
    return Role("policy")


@pytest.fixture
def reference():
    return Role("reference")


@pytest.fixture
def roles(policy, reference):
    return FittedRoles([policy, reference], trained=["policy"])


def test_what_is_found_is_said_once(roles, policy, reference):
    assert roles.news() == []
    policy.found = {"score": fitted(4096)}
    reference.found = {"score": fitted(8192)}
    assert roles.news() == [
        "policy, to score: micro-batches of 4,096 tokens: 1 MiB fixed + 2.0 KiB a token, 1,024 MiB free on the "
        "smallest rank",
        "reference, to score: micro-batches of 8,192 tokens: 1 MiB fixed + 2.0 KiB a token, 1,024 MiB free on the "
        "smallest rank",
    ]
    assert roles.news() == []
    policy.found = {"score": fitted(4096), "step": fitted(1024)}
    (line,) = roles.news()
    assert line.startswith("policy, to step: micro-batches of 1,024 tokens")
    assert roles.news() == []


def test_a_role_that_has_found_all_it_will_is_not_asked_again(roles, policy, reference):
    policy.found, reference.found = {"step": fitted(1024)}, {"score": fitted(8192)}
    for _ in range(5):
        roles.news()
    assert (policy.asked, reference.asked) == (1, 1)


def test_a_checkpoint_keeps_what_roles_without_checkpoints_found(roles, policy, reference):
    policy.found, reference.found = {"step": fitted(1024)}, {"score": fitted(8192)}
    roles.news()
    state = json.loads(json.dumps(roles.state()))
    assert set(state) == {"reference"}
    other, judge = Role("reference"), Role("reward model")
    FittedRoles([Role("policy"), other, judge], trained=["policy"]).restore(state)
    assert other.taken == {"score": fitted(8192)}
    assert judge.taken is None, "it is new"


def test_a_run_with_a_written_size_asks_nobody():
    roles = FittedRoles()
    assert roles.news() == []
    assert roles.state() == {}
    roles.restore({"reference": {"score": {"tokens": 5}}})
