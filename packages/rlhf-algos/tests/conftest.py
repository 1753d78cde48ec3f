"""Modules beside the tests of the frozen vectors can be imported."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "vectors"))
