"""Conformance kits for the seams, and small models to run them on. Needs the extra `testing`.

`rollout` and `engine` hold pytest classes to subclass, `tiny` makes models, `fakes` has scripted stand-ins.
"""

import sys

if "pytest" in sys.modules:
    # Failing checks then show the compared values, as in a test module.
    engine = ("engine", "engine_ground", "engine_optional")
    rollout = ("rollout_control", "rollout_ground", "rollout_sampling")
    for name in (*engine, *rollout, "transport"):
        sys.modules["pytest"].register_assert_rewrite(f"{__name__}.{name}")
