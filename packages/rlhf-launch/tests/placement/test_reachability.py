"""Doors that stay shut are told of, once; those that open again are not."""

import queue
import socket

import pytest
from rlhf_launch.placement.reachability import Door, DoorWatch


@pytest.fixture
def lost():
    return queue.Queue()


@pytest.fixture
def watch(lost):
    watch = DoorWatch(lambda door, why: lost.put((door.name, why)), period_s=0.05)
    yield watch
    watch.close()


def listen(port=0):
    server = socket.create_server(("127.0.0.1", port))
    return server, server.getsockname()[1]


def test_a_process_that_has_ended_is_told_of_once(watch, lost):
    server, port = listen()
    staying, other = listen()
    watch.add(
        [
            Door(name="the head", host="127.0.0.1", port=port, refused_s=0.2),
            Door(name="another", host="127.0.0.1", port=other, refused_s=0.2),
        ]
    )
    with pytest.raises(queue.Empty):
        lost.get(timeout=0.4)
    server.close()
    name, why = lost.get(timeout=60)
    assert name == "the head"
    assert why == f"nothing listens at 127.0.0.1:{port} any more, where it did"
    with pytest.raises(queue.Empty):
        lost.get(timeout=0.4)
    staying.close()


def test_one_that_is_started_again_in_time_is_not_lost(watch, lost):
    server, port = listen()
    watch.add([Door(name="the head", host="127.0.0.1", port=port, refused_s=5.0)])
    server.close()
    with pytest.raises(queue.Empty):
        lost.get(timeout=0.3)
    server, _ = listen(port)
    with pytest.raises(queue.Empty):
        lost.get(timeout=0.3)
    server.close()


def test_a_host_that_gives_no_answer_is_told_of_after_its_own_time(watch, lost):
    # A full backlog answers no more: what a host that is cut off looks like.
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        port = server.getsockname()[1]
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        watch.add([Door(name="host 10.0.0.2", host="127.0.0.1", port=port, refused_s=0.1, silent_s=0.5)])
        name, why = lost.get(timeout=60)
        assert name == "host 10.0.0.2"
        assert "has not answered for" in why
        for filler in fillers:
            filler.close()


def test_closing_ends_the_knocking(lost):
    server, port = listen()
    watch = DoorWatch(lambda door, why: lost.put(why), period_s=0.05)
    watch.add([Door(name="the head", host="127.0.0.1", port=port, refused_s=0.1)])
    watch.close()
    watch.close()
    server.close()
    with pytest.raises(queue.Empty):
        lost.get(timeout=0.3)


def test_who_asks_is_told_at_once_where_nothing_listens(lost):
    watch = DoorWatch(lambda door, why: lost.put(why), period_s=60)
    (server, port), (staying, other) = listen(), listen()
    doors = [Door(name=name, host="127.0.0.1", port=number) for name, number in (("gone", port), ("here", other))]
    watch.add(doors)
    assert watch.refused() == []
    server.close()
    assert watch.refused() == [(doors[0], f"nothing listens at 127.0.0.1:{port} any more, where it did")]
    watch.close()
    staying.close()
    assert lost.empty()
