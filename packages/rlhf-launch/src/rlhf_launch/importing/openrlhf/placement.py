"""Which GPUs OpenRLHF's roles have, as our placement."""

from __future__ import annotations

from collections.abc import Mapping

from rlhf_launch.importing.engine import Draft, Rule, combined, needless, to

_ROLES = ("actor", "critic", "ref", "reward")

PLACEMENT: Mapping[str, Rule] = {
    **{f"{role}_{what}": combined() for role in _ROLES for what in ("num_nodes", "num_gpus_per_node")},
    "colocate_actor_ref": combined(),
    "colocate_critic_reward": combined(),
    "colocate_all_models": combined(),
    "ref_reward_offload": combined(),
    "ref_offload": combined(),
    "reward_offload": combined(),
    "vllm_num_engines": to("rollout.engines", convert=int),
    "vllm_tensor_parallel_size": to("rollout.tensor_parallel_size", convert=int),
    "vllm_gpu_memory_utilization": to("rollout.options.gpu_memory_utilization", convert=float),
    "enforce_eager": to("rollout.options.enforce_eager"),
    "enable_prefix_caching": to("rollout.options.enable_prefix_caching"),
    "vllm_enable_sleep": needless("engines sleep wherever they share devices"),
    "deepspeed_enable_sleep": needless("training engines are offloaded wherever they share devices"),
    "vllm_sync_backend": needless("the fastest transport that the placement allows is taken"),
    "vllm_sync_with_ray": needless("weights never travel through Ray"),
}


def write_placement(draft: Draft) -> None:
    """`train.ranks` and where each role sits."""
    ranks = _ranks(draft, "actor")
    draft.put("train.ranks", ranks)
    _hosts(draft, "actor", "policy")
    everyone = draft.on("colocate_all_models")
    sits = everyone and not draft.on("async_train")
    if sits:
        draft.put("placement.rollout.colocate_with", "policy")
    elif everyone:
        draft.noted(
            "colocate_all_models", "the rollout engines have GPUs of their own, as in OpenRLHF's async runs"
        )
    critic = draft.take("algorithm.name") == "ppo"
    if critic:
        _place(draft, "critic", "critic", with_role="policy" if everyone else None)
    else:
        _unused(draft, "critic", "the algorithm has no critic")
    adapters = draft.take("model.lora") is not None
    if draft.take("algorithm.kl_coef") and not adapters:
        together = everyone or draft.on("colocate_actor_ref")
        _place(draft, "ref", "reference", with_role="policy" if together else None)
        if draft.on("ref_reward_offload") or draft.on("ref_offload"):
            draft.put("placement.reference.options.offload_parameters", True)
    else:
        _unused(draft, "ref", "the adapters are switched off for it" if adapters else "no KL is measured")
    _place_rewards(draft, everyone, critic)


def _place_rewards(draft: Draft, everyone: bool, critic: bool) -> None:
    parts = list((draft.take("reward.parts") or {}).items())
    models = [name for name, part in parts if part["kind"] == "model"]
    models += ["model"] if draft.take("reward.model") else []
    for name in models:
        partner = "policy" if everyone else "critic" if critic and draft.on("colocate_critic_reward") else None
        _place(draft, "reward", f"reward.{name}", with_role=partner)
        if draft.on("ref_reward_offload") or draft.on("reward_offload"):
            draft.put(f"placement.reward.{name}.options.offload_parameters", True)
    if not models:
        _unused(draft, "reward", "there is no reward model")


def _ranks(draft: Draft, role: str) -> int:
    return int(draft.value(f"{role}_num_nodes", 1)) * int(draft.value(f"{role}_num_gpus_per_node", 8))


def _place(draft: Draft, theirs: str, ours: str, *, with_role: str | None) -> None:
    draft.put(f"placement.{ours}.ranks", _ranks(draft, theirs))
    if ours != "critic" and (draft.take("train.options.autotp_size") or 1) > 1:
        # Slices of layers are for trained engines.
        draft.put(f"placement.{ours}.options", {"stage": 3, "autotp_size": 1})
    if with_role is not None:
        draft.put(f"placement.{ours}.colocate_with", with_role)
    else:
        _hosts(draft, theirs, ours)


def _hosts(draft: Draft, theirs: str, ours: str) -> None:
    if int(draft.value(f"{theirs}_num_nodes", 1)) > 1:
        draft.put(f"placement.{ours}.hosts", int(draft.value(f"{theirs}_num_nodes")))


def _unused(draft: Draft, role: str, why: str) -> None:
    for what in ("num_nodes", "num_gpus_per_node"):
        draft.noted(f"{role}_{what}", f"not used: {why}")
