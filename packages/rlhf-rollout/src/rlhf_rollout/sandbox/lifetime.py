"""A roof over trusted processes: what they start cannot outlive them, however it detaches itself."""

from __future__ import annotations

import shutil
import subprocess
import sys
from functools import lru_cache

_TRIAL_S = 30.0


def in_own_process_namespace(command: list[str]) -> list[str]:
    """The command, so that everything it starts ends with it, where `bwrap` works here; else as it is.

    It sees the same files, network and devices; only process numbers are its own. Killing the process that is
    started kills all.
    """
    return [*_prefix(), *command]


@lru_cache(maxsize=1)
def _prefix() -> tuple[str, ...]:
    found = shutil.which("bwrap")
    if sys.platform != "linux" or found is None:
        return ()
    prefix = (found, "--dev-bind", "/", "/", "--proc", "/proc", "--unshare-pid", "--die-with-parent", "--")
    try:
        trial = subprocess.run(
            [*prefix, sys.executable, "-I", "-S", "-c", ""], capture_output=True, timeout=_TRIAL_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return prefix if trial.returncode == 0 else ()
