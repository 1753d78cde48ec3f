"""A host of a Ray cluster goes: its workers are named with it, those of the other host work on.

How soon is measured by `nox -s faults`. Here a call that would last ten minutes ends, and waits end only to say
that nothing came: on a busy machine Ray itself takes a minute for what else takes seconds.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest
import two_hosts
import yaml
from rlhf_core.testing.tiny import save_tiny_model

pytestmark = [
    pytest.mark.stack,
    pytest.mark.skipif(two_hosts.why_not() is not None, reason=two_hosts.why_not() or ""),
]

MODULES = (str(two_hosts.HERE), str(two_hosts.HERE.parent / "reward_modules"))
PATH = os.pathsep.join([*MODULES, *filter(None, [os.environ.get("PYTHONPATH")])])
"""With where the sources under test are, which need not be those that are installed."""
DRIVER = f"""
import os, time
from rlhf_launch.placement.executor import WorkerPlan
from rlhf_launch.placement.ray import RayCluster
from rlhf_launch.workers.handles import close_workers
class Sleeper:
    def where(self):
        return os.environ["RLHF_HOST_ADDRESS"], os.environ["GLOO_SOCKET_IFNAME"], os.stat("/dev/shm").st_dev
    def sleep(self, seconds): time.sleep(seconds)
    def close(self): pass
cluster = RayCluster("10.77.0.1:{two_hosts.PORT}")
handles = cluster.place([WorkerPlan(name=f"w-{{i}}", worker=Sleeper, arguments=(), cpus=1.0) for i in range(4)])
where = {{handle.name: handle.call("where").result(timeout=240) for handle in handles}}
for name, (address, interface, shared) in where.items():
    print("place", name, address, interface, shared, flush=True)
calls = {{handle.name: handle.call("sleep", 600) for handle in handles}}
print("ready", flush=True)
for name, call in calls.items():
    if where[name][0] == "10.77.0.2":
        print("lost", call.exception(timeout=240), flush=True)
for handle in handles:
    if where[handle.name][0] == "10.77.0.1":
        print("there", handle.name, calls[handle.name].done(), flush=True)
        handle.end()
cluster.close()
"""

ENGINE_DRIVER = f"""
import ray, sys, time
from rlhf_core import GenerationRequest, RolloutConfig, SamplingConfig
from rlhf_launch import WorkerRoom, engine_plans
from rlhf_launch.placement.ray import RayCluster
from rlhf_launch.workers.handles import close_workers
config = RolloutConfig(model=sys.argv[1], max_model_len=4096, max_num_seqs=8, pipeline_parallel_size=2, hosts=2)
cluster = RayCluster("10.77.0.1:{two_hosts.PORT}")
(handle,) = cluster.place(engine_plans("vllm", config, room=WorkerRoom(cpus=1)))
handle.call("start").result(timeout=600)
can = handle.call("capabilities").result(timeout=240)
print("state", can.shares_memory or "shm" in can.transports, can.receivers, flush=True)
def generate(tokens):
    sampling = SamplingConfig(max_tokens=tokens, min_tokens=tokens)
    request = GenerationRequest(request_id="r", prompt_token_ids=(1, 2, 3), sampling=sampling, seed=0)
    return handle.call("generate", request)
print("sampled", len(generate(4).result(timeout=240).samples), flush=True)
under_way = generate(4000)
time.sleep(2)
print("ready", flush=True)
print("lost", repr(under_way.exception(timeout=240)), flush=True)
time.sleep(10)
print("later", type(generate(4).exception(timeout=240)).__name__, flush=True)
close_workers([handle])
end = time.monotonic() + 240
while sum(node["Alive"] for node in ray.nodes()) > 1 and time.monotonic() < end:
    time.sleep(1)
try:
    cluster.restart("rollout-0")
except Exception as error:
    print("again", type(error).__name__, error, flush=True)
cluster.close()
"""


@pytest.fixture
def hosts():
    folder = Path(tempfile.mkdtemp(prefix="r", dir="/var/tmp"))  # short: Ray's sockets lie below it
    with two_hosts.two_hosts(folder, {"PYTHONPATH": PATH}, (2, 2)) as both:
        yield both
    shutil.rmtree(folder, ignore_errors=True)


def test_the_workers_of_a_lost_host_are_named_with_it_and_the_others_work_on(hosts):
    first, second = hosts
    said, returned = driven_until_the_second_is_lost(hosts, DRIVER)
    assert returned == 0, "".join(said)
    lines = [line.split(maxsplit=1) for line in said]
    places = [words[1].split() for words in lines if words[:1] == ["place"]]
    by_address = {address: (interface, shared) for _, address, interface, shared in places}
    assert by_address["10.77.0.1"][0] == first.device
    assert by_address["10.77.0.2"][0] == second.device
    # Shared memory is told apart, so that weights never travel by it from one host to the other.
    assert by_address["10.77.0.1"][1] != by_address["10.77.0.2"][1]
    lost = [words[1] for words in lines if words[:1] == ["lost"]]
    assert len(lost) == 2, "".join(said)
    assert all(" on 10.77.0.2) " in said for said in lost), lost
    assert [words[1].split()[1] for words in lines if words[:1] == ["there"]] == ["False", "False"]


def test_the_policy_and_the_engines_over_both_hosts(hosts, tmp_path):
    """Ranks of a ZeRO-3 group on two hosts; its weights reach one of the engines over the network."""
    train_on(
        hosts[0],
        tmp_path,
        rollout={"backend": "transformers", "engines": 2},
        train={"ranks": 2},
        placement={"policy": {"hosts": 2}, "rollout": {"hosts": 2}},
    )


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_an_engine_over_both_hosts_generates_and_gets_new_weights_from_a_policy_on_the_first(hosts, tmp_path):
    """One stage of the engine on each host; it proves by the probe that both have the policy's weights."""
    said = train_on(
        hosts[0],
        tmp_path,
        rollout={"backend": "vllm", "pipeline_parallel_size": 2},
        train={"ranks": 1},
        placement={"policy": {"hosts": ["10.77.0.1"]}, "rollout": {"hosts_per_engine": 2}},
    )
    assert "weight syncs are verified by a probe" in said, said[-4000:]


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_the_loss_of_the_second_host_ends_the_engine_over_both(hosts, tmp_path):
    save_tiny_model(tmp_path / "policy")
    lines, returned = driven_until_the_second_is_lost(hosts, ENGINE_DRIVER, str(tmp_path / "policy"))
    said = "".join(lines)
    assert returned == 0, said
    assert "state False 2\n" in said, said
    assert "lost EngineDiedError('rollout-0 has lost its part" in said, said
    assert "later EngineDiedError" in said, said
    # Its place was on a host that is gone, and the other has the engine's own process already.
    assert "again ResourceError" in said, said


def driven_until_the_second_is_lost(hosts, program, *arguments):
    """Run a program on the first host, and end the second once it is ready.

    Returns the lines that it printed, and its exit status.
    """
    first, second = hosts
    lines = []
    with subprocess.Popen(
        first.command(sys.executable, "-c", program, *arguments),
        env=os.environ | first.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as driver:
        patience = threading.Timer(780, driver.kill)
        patience.start()
        for line in driver.stdout:
            lines.append(line)
            if line == "ready\n":
                second.kill()
    patience.cancel()
    return lines, driver.returncode


def train_on(first, tmp_path, *, rollout, train, placement):
    """Two steps of a run whose weights travel by Gloo; returns what it says."""
    save_tiny_model(tmp_path / "policy")
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{n}+{n}="}) + "\n" for n in range(8)))
    settings = {
        "model": {"path": str(tmp_path / "policy")},
        "data": {"train": str(tmp_path / "prompts.jsonl")},
        "lengths": {"max_prompt_tokens": 16, "max_length": 32},
        "reward": {"function": "launch_rewards:share_of_alphanumerics"},
        "algorithm": {"name": "grpo", "kl_coef": 0.0},
        "rollout": {
            **rollout,
            "samples_per_prompt": 2,
            "sampling": {"max_tokens": 8},
        },
        "train": {**train, "prompts_per_step": 4, "steps": 2},
        "placement": {
            "executor": "ray",
            "device": "cpu",
            "ray_address": f"10.77.0.1:{two_hosts.PORT}",
            "cpus_per_worker": 1,
            **placement,
        },
        "checkpoint": {"every": 2},
        "output": str(tmp_path / "run"),
        "tensorboard": False,
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    command = ("-c", "from rlhf_launch.cli.main import main; main()", "train", str(tmp_path / "run.yaml"))
    env = os.environ | first.env
    ran = subprocess.run(
        first.command(sys.executable, *command), env=env, capture_output=True, text=True, timeout=400
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]
    assert "weights travel by gloo" in ran.stdout, ran.stdout[-4000:]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "seconds/step" in row] == [1, 2]
    assert all(row["rollout_mismatch/max"] < 1e-3 for row in rows if "rollout_mismatch/max" in row)
    return ran.stdout
