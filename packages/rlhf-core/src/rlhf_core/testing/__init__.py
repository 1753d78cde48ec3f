"""Conformance kits for the seams, and small models to run them on. Needs the extra `testing`.

`rollout` and `engine` hold pytest classes to subclass, `tiny` makes models, `fakes` has scripted stand-ins.
"""

import sys

if "pytest" in sys.modules:
    # Failing checks then show the compared values, as in a test module.
    sys.modules["pytest"].register_assert_rewrite(
        "rlhf_core.testing.rollout", "rlhf_core.testing.weight_sync", "rlhf_core.testing.engine"
    )
