"""Work of several roles under way at once."""

from concurrent.futures import Future

import pytest
from rlhf_core import EngineDiedError
from rlhf_launch.workers.begun import Begun, results_of
from rlhf_launch.workers.waits import Waits


class Rank:
    """A worker of which only the name is looked at."""

    def __init__(self, name):
        self.name = name


def begun(role, *calls, conclude=sum):
    ranks = [Rank(f"{role}-{index}") for index in range(len(calls))]
    return Begun(what=f"{role} to add", calls=calls, workers=ranks, waits=Waits(60), conclude=conclude)


def done(value):
    call = Future()
    call.set_result(value)
    return call


def failed(error):
    call = Future()
    call.set_exception(error)
    return call


def test_each_role_concludes_from_the_results_of_its_own_ranks():
    assert results_of([begun("policy", done(1), done(2)), begun("critic", done(5))]) == [3, 5]
    assert results_of([]) == []
    assert begun("policy", done(1), done(2), conclude=list).result() == [1, 2]


def test_a_failure_is_heard_of_whichever_role_is_waited_for():
    never = Future()
    with pytest.raises(EngineDiedError, match="critic-0"):
        results_of([begun("policy", never), begun("critic", failed(EngineDiedError("critic-0 is gone")))])
