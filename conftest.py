"""Settings of all tests: property tests draw the same examples every time, and a busy machine is no failure.

With `--dist loadfile` the files that start engines come first, the longest of them before all, and the light ones
fill what is left: otherwise a file of one test of minutes, which counts as small, comes last and runs alone.
"""

import contextlib

import pytest

with contextlib.suppress(ImportError):  # the example of a backend is tested without it
    from hypothesis import settings

    settings.load_profile("ci")

LONGEST_FIRST = (
    "rlhf-train/tests/test_two_rank",
    "rlhf-launch/tests/online/test_run.py",
    "rlhf-launch/tests/faults/",
    "rlhf-launch/tests/test_shared_devices.py",
    "rlhf-launch/tests/chaos/",
    "rlhf-launch/tests/replay/",
    "rlhf-launch/tests/",
    "rlhf-rollout/tests/backends/",
)
"""Beginnings of paths below `packages/`: minutes to seconds."""
SHARED = ("rlhf-train/tests/test_two_rank",)
"""Files whose tests look at what one session fixture measured; they stay on one worker, or it is measured twice."""


def pytest_collection_modifyitems(items):
    """Files with real engines first; the order within a file stays."""
    files = {item.path for item in items if item.get_closest_marker("stack")}

    def place(item):
        if item.path not in files:
            return len(LONGEST_FIRST) + 1
        path = item.path.as_posix()
        return next((i for i, start in enumerate(LONGEST_FIRST) if start in path), len(LONGEST_FIRST))

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """`loadfile` in the order of the collection."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class LongestFirst(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return next((start for start in SHARED if start in nodeid), super()._split_scope(nodeid))

    config.option.loadscopereorder = False
    return LongestFirst(config, log)
