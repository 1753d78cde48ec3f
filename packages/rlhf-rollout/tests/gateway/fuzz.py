"""Requests made from the gateway's OpenAPI schema by schemathesis, right and wrong ones; `nox -s fuzz` runs it.

    python packages/rlhf-rollout/tests/gateway/fuzz.py --examples 2000

Fails on any answer of status 500 and above, and when the session that recorded it all cannot be closed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from rlhf_core.testing.fakes import ScriptedBackend
from rlhf_core.testing.tiny import byte_tokenizer
from rlhf_rollout import Gateway, GatewayConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=1000, help="for each endpoint")
    arguments = parser.parse_args()
    backend = ScriptedBackend(script=lambda request, index: range(100, 116))
    with Gateway(backend, byte_tokenizer(), GatewayConfig(model="m", max_model_len=2048)) as gateway:
        access = gateway.open_session("fuzz")
        command = ["schemathesis", "run", access.root_url + "/openapi.json", "--mode", "all"]
        command += ["--header", f"Authorization: Bearer {access.api_key}", "--checks", "not_a_server_error"]
        command += ["--phases", "examples,coverage,fuzzing", "--max-examples", str(arguments.examples)]
        command += ["--url", access.root_url, "--continue-on-failure"]
        status = subprocess.run(command).returncode
        print(f"{len(backend.requests)} requests reached the backend")
        print(f"{len(gateway.close_session('fuzz'))} trajectories recorded")
    sys.exit(status)


if __name__ == "__main__":
    main()
