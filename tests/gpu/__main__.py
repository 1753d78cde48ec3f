"""Every check that needs a GPU, one file of them after the other, each in a process of its own.

    nox -s gpu                        # installs the GPU builds first, see docs/gpu.md
    nox -s gpu -- --list              # what there is, what it needs, what this machine lacks
    nox -s gpu -- --only links        # one file: check_links.py
    python tests/gpu [...]            # the same in the present environment

Ends with two Markdown tables: outcomes, and measurements. The exit status is 1 if a check failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from gpu_report import listing, measurement_table, outcome_table  # noqa: E402

_PYTEST = ("-o", "python_files=check_*.py", "-m", "gpu", "--timeout=3300")
_FILE_S = 7200
"""A file of checks that takes longer stands still."""


def main() -> int:
    """Run or list the checks."""
    parser = argparse.ArgumentParser(prog="nox -s gpu --", description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="name every check and what it needs, run none")
    parser.add_argument("--only", metavar="NAME", help="run check_NAME.py alone")
    chosen, rest = parser.parse_known_args()
    if chosen.list:
        print(listing(HERE))
        return 0
    files = sorted(HERE.glob(f"check_{chosen.only or '*'}.py"))
    if not files:
        names = ", ".join(sorted(file.stem.removeprefix("check_") for file in HERE.glob("check_*.py")))
        parser.error(f"there is no check_{chosen.only}.py; choose one of {names}")
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.jsonl"
        results.touch()
        failed = [file.name for file in files if not _passed(file, results, rest)]
        lines = [json.loads(line) for line in results.read_text().splitlines()]
    print(f"\n{outcome_table(lines)}\n\n{measurement_table(lines)}")
    for name in failed:
        print(f"\n{name} failed", file=sys.stderr)
    return int(bool(failed))


def _passed(file: Path, results: Path, rest: list[str]) -> bool:
    """Run one file; a process that dies fails its own checks alone."""
    variables = {
        "RLHF_GPU_RESULTS": str(results),
        # Sums in a fixed order, which checks of bits need.
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        # The pool of vLLM's sleep mode and the memory of CUDA IPC exclude torch's expandable segments.
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False",
    }
    command = [sys.executable, "-m", "pytest", str(file), *_PYTEST, *rest]
    try:
        code = subprocess.run(command, env={**os.environ, **variables}, timeout=_FILE_S, check=False).returncode
    except subprocess.TimeoutExpired:
        print(f"{file.name} was ended after {_FILE_S} s", file=sys.stderr)
        return False
    return code in (0, 5)  # 5: nothing was selected


if __name__ == "__main__":
    raise SystemExit(main())
