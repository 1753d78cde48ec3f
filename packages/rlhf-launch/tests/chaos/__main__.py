"""Runs that are killed at random moments and resumed until they are done, compared with one that was left alone.

`nox -s chaos -- --forms alternation dpo --kills 20`. As root the whole of it sees a /tmp and a /dev/shm of its own,
so that whatever lies there in the end was left by a run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from chaos.campaign import Campaign  # noqa: E402
from chaos.forms import forms, write_inputs  # noqa: E402
from chaos.records import read_lives, report, write_life  # noqa: E402
from chaos.warm import WarmStarter  # noqa: E402

_PRIVATE = "RLHF_CHAOS_PRIVATE"
_MOUNT = 'mount -t tmpfs -o mode=1777 t /tmp && mount -t tmpfs -o mode=1777 t /dev/shm && exec "$@"'


def main() -> int:
    """Run the forms asked for; the exit code says whether anything differed or was lost."""
    options = _options()
    folder = options.folder.resolve()
    if _PRIVATE not in os.environ and os.geteuid() == 0 and shutil.which("unshare"):
        os.environ[_PRIVATE] = "1"
        os.execvp("unshare", ["unshare", "--mount", "sh", "-c", _MOUNT, "sh", sys.executable, *sys.argv])
    folder.mkdir(parents=True, exist_ok=True)
    reward_modules = str(HERE.parent / "reward_modules")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [reward_modules, os.environ.get("PYTHONPATH")]))
    write_inputs(folder)
    known, results = forms(folder), folder / "results.jsonl"
    with ExitStack() as stack:
        for _ in range(options.busy):
            burner = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(burner.kill)
        starter = stack.enter_context(WarmStarter()) if options.warm else None
        for name in options.forms:
            campaign = Campaign(
                known[name],
                folder,
                seed=options.seed,
                hows=tuple(options.how),
                private=_PRIVATE in os.environ,
                starter=None if known[name].stack else starter,
                say=lambda line: print(line, flush=True),
            )
            left = options.kills
            life = sum(one.form == name for one in read_lives(results))
            while left > 0:
                done = campaign.run_life(life, min(left, options.kills_per_run))
                write_life(done, results)
                print(report([done]), flush=True)
                life, left = life + 1, left - max(1, len(done.kills))
    lives = read_lives(results)
    print(report(lives))
    return int(any(life.differences or life.faults for life in lives))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--forms", nargs="+", default=["alternation", "asynchronous", "partial", "dpo"])
    parser.add_argument("--kills", type=int, default=12, help="of each form")
    parser.add_argument("--kills-per-run", type=int, default=6)
    parser.add_argument("--how", nargs="+", default=["all"], choices=["all", "command", "SIGTERM"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--busy", type=int, default=0, help="processes that burn a core meanwhile")
    parser.add_argument("--warm", action="store_true", help="fork small runs from a process that has imported all")
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp/rlhf-chaos"))
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
