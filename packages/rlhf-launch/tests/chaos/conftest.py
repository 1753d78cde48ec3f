import sys
from pathlib import Path

# The tests import what the script of `nox -s chaos` does: `chaos.campaign` and its neighbours.
sys.path.insert(0, str(Path(__file__).parents[1]))
