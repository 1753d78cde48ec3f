from rlhf_launch.workers.idle_time import IdleTime


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_the_mean_over_engines_of_the_time_without_work():
    clock = Clock()
    idle = IdleTime(2, clock=clock)
    clock.now = 1.0  # both idle
    idle.begins(0)
    clock.now = 3.0  # the second idle
    idle.begins(1)
    idle.begins(1)
    clock.now = 4.0  # none
    idle.ends(1)
    clock.now = 5.0  # still none
    assert idle.take() == (2 * 1 + 1 * 2) / 2
    idle.ends(1)
    clock.now = 6.0
    assert idle.take() == 0.5


def test_held_engines_are_idle_whatever_they_have():
    clock = Clock()
    idle = IdleTime(1, clock=clock)
    idle.begins(0)
    clock.now = 2.0
    idle.hold(True)
    clock.now = 5.0
    idle.hold(False)
    clock.now = 6.0
    assert idle.take() == 3.0
