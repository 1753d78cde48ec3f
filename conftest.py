"""Settings of all tests: property tests draw the same examples every time, and a busy machine is no failure."""

import contextlib

with contextlib.suppress(ImportError):  # the example of a backend is tested without it
    from hypothesis import settings

    settings.load_profile("ci")
