"""OpenRLHF's names: those with dots of 2026 onwards, and the classic ones under which our tables have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_core import ConfigError

from rlhf_launch.importing.values import number_or_text

_SWITCHES = """colocate_actor_ref colocate_critic_reward colocate_all_models vllm_sync_with_ray
enable_prefix_caching
enforce_eager vllm_enable_sleep enable_vllm_is_correction async_train partial_rollout save_hf_ckpt
disable_ds_ckpt load_checkpoint use_ds_universal_ckpt gradient_checkpointing deepcompile bf16 enable_ema
adam_offload actor_init_on_gpu use_liger_kernel overlap_comm gradient_checkpointing_use_reentrant
disable_fast_tokenizer deepspeed_enable_sleep packing_samples use_dynamic_batch load_in_4bit
normalize_reward full_determinism save_value_network use_kl_loss no_advantage_std_norm ref_reward_offload
ref_offload reward_offload apply_chat_template dynamic_filtering freeze_visual_encoder perf use_ms ipo
margin_loss compute_fp32_loss pretrain_mode multiturn teacher_offload greedy_sampling enable_csft
muon_nesterov muon_no_nesterov flash_attn"""
SWITCHES = frozenset(_SWITCHES.split())
"""Flags without a value."""

_SAME = """vllm.num_engines vllm.tensor_parallel_size vllm.sync_backend vllm.sync_with_ray
vllm.gpu_memory_utilization
ref.num_nodes ref.num_gpus_per_node reward.num_nodes reward.num_gpus_per_node actor.num_nodes
actor.num_gpus_per_node critic.num_nodes critic.num_gpus_per_node eval.dataset eval.split eval.temperature
eval.n_samples_per_prompt ref.offload reward.offload"""
"""Dots became underscores, and nothing else."""

_LAST_PART = """train.colocate_actor_ref train.colocate_critic_reward vllm.enable_prefix_caching vllm.enforce_eager
train.async_queue_size ckpt.best_metric_key ds.zero_stage ds.deepcompile ds.param_dtype train.enable_ema
train.ema_beta ds.zpg ds.adam_offload ds.attn_implementation ds.experts_implementation ds.use_liger_kernel
ds.grad_accum_dtype ds.overlap_comm data.disable_fast_tokenizer data.dataloader_num_workers
ds.packing_samples ds.load_in_4bit train.num_episodes rollout.vllm_generate_batch_size train.max_epochs
data.max_len rollout.max_new_tokens data.max_samples actor.eps_clip actor.eps_clip_low_high actor.dual_clip
critic.value_clip algo.advantage.lambd algo.advantage.gamma rollout.top_p rollout.temperature train.seed
rollout.n_samples_per_prompt critic.save_value_network actor.policy_loss_type actor.aux_loss_coef
model.aux_loss_coef model.beta model.label_smoothing model.nll_loss_coef reward.overlong_buffer_len
reward.overlong_penalty_factor reward.stop_properly_penalty_coef ds.ring_attn_size ds.value_head_prefix
train.agent_func_path data.prompt_split data.input_key data.label_key data.output_key data.input_template
data.apply_chat_template data.prompt_key data.chosen_key data.rejected_key data.dataset data.dataset_probs
data.dataset_split data.tokenizer_chat_template data.multiturn data.image_key data.max_images_per_prompt
actor.freeze_visual_encoder logger.logging_steps"""
"""The last part is the classic name."""

_RENAMED = """train.colocate_all=colocate_all_models vllm.enable_sleep=vllm_enable_sleep
algo.advantage.is_correction_enable=enable_vllm_is_correction
algo.advantage.is_correction_threshold=vllm_is_truncated_threshold
algo.advantage.is_correction_type=vllm_is_correction_type train.async_enable=async_train
train.partial_rollout_enable=partial_rollout eval.steps=eval_steps ckpt.save_steps=save_steps
ckpt.path=ckpt_path ckpt.save_hf=save_hf_ckpt ckpt.disable_ds=disable_ds_ckpt ckpt.max_num=max_ckpt_num
ckpt.max_mem=max_ckpt_mem ckpt.load_enable=load_checkpoint ds.use_universal_ckpt=use_ds_universal_ckpt
actor.gradient_checkpointing_enable=gradient_checkpointing
model.gradient_checkpointing_enable=gradient_checkpointing
actor.gradient_checkpointing_reentrant=gradient_checkpointing_use_reentrant
model.gradient_checkpointing_reentrant=gradient_checkpointing_use_reentrant
ds.enable_sleep=deepspeed_enable_sleep ds.tensor_parallel_size=ds_tensor_parallel_size
train.dynamic_batch_enable=use_dynamic_batch rollout.max_tokens_per_gpu=rollout_max_tokens_per_gpu
train.max_tokens_per_gpu=train_max_tokens_per_gpu ds.lora.rank=lora_rank ds.lora.alpha=lora_alpha
ds.lora.target_modules=target_modules ds.lora.dropout=lora_dropout ckpt.output_dir=save_path
rollout.batch_size=rollout_batch_size rollout.micro_batch_size=micro_rollout_batch_size
train.micro_batch_size=micro_train_batch_size train.batch_size=train_batch_size
reward.normalize_enable=normalize_reward train.full_determinism_enable=full_determinism
critic.freezing_steps=freezing_actor_steps algo.kl.target=kl_target algo.kl.horizon=kl_horizon
algo.kl.init_coef=init_kl_coef algo.kl.estimator=kl_estimator algo.kl.use_loss=use_kl_loss
actor.entropy_coef=entropy_loss_coef reward.clip_range=reward_clip_range
algo.advantage.estimator=advantage_estimator algo.advantage.no_std_norm=no_advantage_std_norm
ds.ring_attn_head_stride=ring_head_stride actor.model_name_or_path=pretrain
model.model_name_or_path=pretrain reward.model_name_or_path=reward_pretrain reward.remote_url=remote_rm_url
critic.model_name_or_path=critic_pretrain ref.model_name_or_path=ref_pretrain
data.prompt_dataset=prompt_data data.prompt_probs=prompt_data_probs
algo.dynamic_filtering_enable=dynamic_filtering algo.dynamic_filtering_range=dynamic_filtering_reward_range
model.ipo_enable=ipo model.loss_type=loss model.margin_loss_enable=margin_loss
model.compute_fp32_loss_enable=compute_fp32_loss model.pretrain_mode_enable=pretrain_mode
logger.wandb.key=use_wandb logger.wandb.org=wandb_org logger.wandb.group=wandb_group
logger.wandb.project=wandb_project logger.wandb.run_name=wandb_run_name
logger.tensorboard_dir=use_tensorboard adam.lr=learning_rate adam.betas=adam_betas adam.eps=adam_eps
adam.weight_decay=l2 muon.lr=muon_lr muon.momentum=muon_momentum muon.ns_steps=muon_ns_steps
muon.nesterov=muon_nesterov muon.no_nesterov=muon_no_nesterov actor.adam.lr=actor_learning_rate
critic.adam.lr=critic_learning_rate data_type=param_dtype generate_max_len=max_new_tokens"""
_OF_A_ROLE = """optim=optim muon.lr=muon_lr muon.momentum=muon_momentum muon.ns_steps=muon_ns_steps
muon.nesterov=muon_nesterov muon.no_nesterov=muon_no_nesterov adam.betas=adam_betas adam.eps=adam_eps
adam.weight_decay=l2 lr_scheduler=lr_scheduler lr_warmup_ratio=lr_warmup_ratio min_lr_ratio=min_lr_ratio
max_norm=max_norm"""
"""What actor and critic each have: `actor.max_norm` is `actor_max_norm` in our table."""


def _names() -> dict[str, str]:
    names = {name: name.replace(".", "_") for name in _SAME.split()}
    names |= {name: name.rpartition(".")[2] for name in _LAST_PART.split()}
    names |= {theirs: ours for theirs, _, ours in (pair.partition("=") for pair in _RENAMED.split())}
    for role in ("actor", "critic"):
        pairs = (pair.split("=", 1) for pair in _OF_A_ROLE.split())
        names |= {f"{role}.{theirs}": f"{role}_{classic}" for theirs, classic in pairs}
    return names


CLASSIC: Mapping[str, str] = _names()
"""Name with dots -> classic name."""


def read_flags(arguments: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Values by classic name, and the spelling of each name that was used. A flag given twice has its last value.

    >>> read_flags(["--actor.adam.lr", "5e-7", "--bf16", "--eps_clip_low_high", "0.2", "0.3"])[0]
    {'actor_learning_rate': 5e-07, 'bf16': True, 'eps_clip_low_high': [0.2, 0.3]}

    Raises:
        ConfigError: a word that belongs to no flag, or a flag that lacks its value.
    """
    values: dict[str, Any] = {}
    written: dict[str, str] = {}
    taken: dict[str, list[str]] = {}
    name: str | None = None
    for word in arguments:
        if word.startswith("--") and word != "--":
            flag, equals, value = word[2:].partition("=")
            name = CLASSIC.get(flag, flag)
            written[name] = f"--{flag}"
            taken[name] = [value] if equals else []
        elif name is None:
            raise ConfigError(f"{word!r} stands before the first flag; flags begin with '--'")
        else:
            taken[name].append(word)
    for name, words in taken.items():
        if name in SWITCHES:
            if words:
                raise ConfigError(f"{written[name]} is a switch and takes no value; found {' '.join(words)!r}")
            values[name] = True
        elif name == "target_modules":
            values[name] = words
        elif not words:
            values[name] = True
        else:
            values[name] = number_or_text(words[0]) if len(words) == 1 else [number_or_text(word) for word in words]
    return values, written
