"""The least seconds that a phase could take on a device: its FLOPs and bytes over the data sheet's rates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhf_launch.planning.devices import DEVICES, Device
from rlhf_launch.planning.published import (
    EFFICIENCY_DEVICE,
    LLAMA2,
    PROMPT,
    RESPONSE,
    SAMPLES,
    ModelShape,
    Phase,
    PublishedRun,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleWork:
    """A training role: its model, ranks, and what is done with it."""

    role: str
    model: ModelShape
    ranks: int
    trained: bool
    passes: float = 1.0
    """Over the samples of a step, of a trained role."""
    recomputed: bool = True
    """Whether activations are computed again (gradient checkpointing)."""
    scores: bool = True
    micro_tokens: float = math.inf
    """Tokens of a micro-batch on a rank. For each, sharded ranks gather the weights anew."""
    offloaded: float = 0.0
    """Elements whose optimizer state is in host memory."""
    updates: int = 1
    """Optimizer steps in a step of the loop."""
    devices: str = ""
    """Names the set of roles on the same devices, which take turns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWork:
    """What a step of a run has to do."""

    samples: int
    prompt: float
    response: float
    """Tokens of a sample, on average."""
    policy: ModelShape
    engines: int
    tensor_parallel: int
    cache_room: float
    """Bytes for keys and values in all devices of an engine."""
    most_at_once: int
    """Samples that an engine runs at once at most."""
    roles: Sequence[RoleWork]
    gpus: int
    moved: float = 0.0
    """Bytes that leave devices and come back between turns, on each device."""
    host_gpus: int = 8
    """GPUs of a host; more ranks than that gather weights over the network."""
    overlaps: bool = False
    """Whether generation goes on while the others work."""

    @property
    def tokens(self) -> float:
        """Of all samples, prompts included."""
        return self.samples * (self.prompt + self.response)


def least_seconds(work: StepWork, device: Device) -> dict[Phase, float]:
    """Seconds of each phase if every product ran at the peak rate and every byte at full bandwidth."""
    return {
        "generation": _generation(work, device),
        "weight sync": work.policy.bytes / device.network,
        "scoring": _longest(work, {id(one): _scoring(work, one, device) for one in work.roles}),
        "training": _longest(work, {id(one): _training(work, one, device) for one in work.roles}),
    }


def _generation(work: StepWork, device: Device) -> float:
    """Decoding reads the weights once for all samples that run at once, and the keys and values of each."""
    share = work.samples / work.engines
    length = work.prompt + work.response / 2
    fits = max(1.0, work.cache_room / (work.policy.cache_bytes * (work.prompt + work.response)))
    at_once = min(share, fits, work.most_at_once)
    rounds = share / at_once
    rate = work.tensor_parallel
    token = (work.policy.bytes + at_once * work.policy.cache_bytes * length) / (rate * device.bandwidth)
    token = max(token, 2 * work.policy.parameters * at_once / (rate * device.flops))
    prefill = 2 * work.policy.parameters * share * work.prompt / (rate * device.flops)
    return rounds * work.response * token + prefill


_UPDATED_BYTES = 34
"""Through host memory for each element that is updated there: masters, moments and a gradient are read, masters and
moments written, a gradient is brought down and a weight up."""


def _scoring(work: StepWork, role: RoleWork, device: Device) -> float:
    if not role.scores:
        return 0.0
    products = 2 * role.model.parameters * work.tokens / (role.ranks * device.flops)
    return max(products, _gathering(work, role, device))


def _gathering(work: StepWork, role: RoleWork, device: Device) -> float:
    """Seconds in which the ranks of a pass give each other the weights, once for each micro-batch (ZeRO-3)."""
    if role.ranks == 1 or math.isinf(role.micro_tokens):
        return 0.0
    rate = device.link if role.ranks <= work.host_gpus else device.network
    return math.ceil(work.tokens / (role.ranks * role.micro_tokens)) * role.model.bytes / rate


def _training(work: StepWork, role: RoleWork, device: Device) -> float:
    if not role.trained:
        return 0.0
    each = 8 if role.recomputed else 6
    products = each * role.model.parameters * work.tokens / (role.ranks * device.flops)
    # Weights are gathered forwards and backwards, gradients reduced.
    passes = role.passes * max(products, 3 * _gathering(work, role, device))
    return passes + role.updates * role.offloaded * _UPDATED_BYTES / (role.ranks * device.host_link)


def _longest(work: StepWork, seconds: Mapping[int, float]) -> float:
    """Roles on the same devices take turns; others work at the same time."""
    sums: dict[str, float] = {}
    for one in work.roles:
        name = one.devices or one.role
        sums[name] = sums.get(name, 0.0) + seconds[id(one)]
    return max(sums.values(), default=0.0)


def published_work(run: PublishedRun) -> StepWork:
    """A published run as the work of a step."""
    model = LLAMA2[run.size]
    memory = DEVICES[EFFICIENCY_DEVICE].memory
    everywhere = "all" if run.shared else ""
    ranks = {"policy": run.actor, "critic": run.critic, "reference": run.reference, "reward": run.reward}
    roles = [
        RoleWork(
            role=role,
            model=model,
            ranks=count,
            trained=role in ("policy", "critic"),
            micro_tokens=math.inf if run.shared else run.micro_batch * (PROMPT + RESPONSE),
            # The paper offloads Adam everywhere, and does not say how many updates a step has.
            offloaded=model.parameters if role in ("policy", "critic") else 0.0,
            devices=everywhere,
        )
        for role, count in ranks.items()
    ]
    room = 0.9 * memory * run.tensor_parallel - model.bytes
    at_once = run.micro_batch if run.shared else 256
    return StepWork(
        samples=SAMPLES,
        prompt=PROMPT,
        response=RESPONSE,
        policy=model,
        engines=run.engines,
        tensor_parallel=run.tensor_parallel,
        cache_room=max(room, 0.05 * memory),
        most_at_once=at_once,
        roles=roles,
        gpus=max(run.actor, math.ceil(run.actor)),
    )
