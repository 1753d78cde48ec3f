"""Conformance kit for sandboxes: what each must do, and attacks that none may let through. Needs pytest.

`sandbox` holds a pytest class to subclass; `attack_table` prints what every attack came to, without pytest.
"""

import sys

if "pytest" in sys.modules:
    sys.modules["pytest"].register_assert_rewrite(f"{__name__}.sandbox")
