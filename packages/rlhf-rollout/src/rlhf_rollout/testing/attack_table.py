"""Every attack on a sandbox, as a table: `python -m rlhf_rollout.testing.attack_table bubblewrap`."""

from __future__ import annotations

import argparse
import getpass
import sys
from collections import Counter

from rlhf_core import RewardError, UserError

from rlhf_rollout.sandbox.choice import open_sandbox
from rlhf_rollout.testing.attacks import AttackGround, attacks, try_attack


def main() -> int:
    """Print what was not repelled, and one row for a table; the exit code is 1 if anything was not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sandbox", help="as in a configuration: bubblewrap, container, an address")
    parser.add_argument("--only", default="", help="part of an attack's name")
    arguments = parser.parse_args()
    if arguments.sandbox == "none":
        parser.error("without a sandbox the attacks would succeed, and fill this machine's memory")
    try:
        sandbox = open_sandbox(arguments.sandbox)
    except UserError as error:
        print(f"| {arguments.sandbox} | {getpass.getuser()} | refused: {error} |")
        return 0
    tried: Counter[str] = Counter()
    repelled: Counter[str] = Counter()
    with AttackGround() as ground:
        for attack in attacks():
            if arguments.only not in attack.id:
                continue
            tried[attack.group] += 1
            try:
                result = try_attack(attack, sandbox, ground)
            except RewardError as error:
                print(f"{attack.id}: the sandbox failed: {error}", flush=True)
                continue
            repelled[attack.group] += result.repelled
            if not result.repelled:
                print(f"{attack.id}: score {result.score:g}, {'; '.join(result.harm) or 'no harm'}, ", end="")
                print(f"{result.seconds:.1f} s", flush=True)
    separation = getattr(sandbox, "separation", "")
    parts = " | ".join(f"{repelled[group]} of {tried[group]}" for group in tried)
    print(f"| {arguments.sandbox} | {getpass.getuser()} {separation} | {parts} |")
    return int(repelled != tried)


if __name__ == "__main__":
    sys.exit(main())
