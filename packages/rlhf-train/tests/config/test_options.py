from dataclasses import replace

import pytest
from rlhf_core import ConfigError, EngineConfig, LoraConfig, OptimizerConfig, TrainCapabilities
from rlhf_train import DeepSpeedEngine, ZeroConfig
from rlhf_train.config.checks import check_compatible
from rlhf_train.config.options import deepspeed_config


def zero(**options):
    return ZeroConfig.of(EngineConfig(model="m", options=options))


def settings(dtype="float32", device="cpu", trained=True, **options):
    config = EngineConfig(
        model="m", dtype=dtype, device=device, optimizer=OptimizerConfig(max_grad_norm=0.5) if trained else None
    )
    return deepspeed_config(config, ZeroConfig(**options), world_size=4)


def test_an_unknown_option_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'offload_optimizer'"):
        zero(offload_optimiser=True)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"stage": 4}, "stage must be"),
        ({"stage": 0, "offload_optimizer": True}, "needs stage 1, 2 or 3"),
        ({"stage": 2, "offload_parameters": True}, "needs stage 3"),
        ({"stage": 2, "zero_hpz_partition_size": 8}, "needs stage 3"),
        ({"reduce_bucket_size": 0}, "reduce_bucket_size must be at least 1, got 0"),
        ({"prefetch_bucket_size": -1}, "prefetch_bucket_size must be at least 0, got -1"),
        ({"autotp_size": 1.5}, "autotp_size must be a whole number, got 1.5"),
        ({"timeout_s": float("nan")}, "timeout_s must be a finite number, got nan"),
        ({"timeout_s": 0}, "timeout_s must be above 0, got 0"),
        ({"pin_memory": "no"}, "pin_memory must be true or false, got 'no'"),
        ({"freeze_steps": -1}, "freeze_steps must be at least 0, got -1"),
        ({"average_decay": 0.9}, "'average_decay' is a setting of every engine.*the field average_decay"),
        ({"lora": {"rank": 4}}, "'lora' is a setting of every engine"),
        ({"accumulate_dtype": "fp32"}, "accumulate_dtype must be one of"),
        ({"reduce_dtype": "bf16"}, "reduce_dtype must be one of"),
        ({"autoep_size": 2}, "autoep_size: this engine does not divide experts.*stage 3"),
        ({"expert_parallel": {"enabled": True}}, "expert_parallel: this engine does not divide experts"),
    ],
)
def test_impossible_options_are_refused(options, complaint):
    with pytest.raises(ConfigError, match=complaint):
        zero(**options)


@pytest.mark.parametrize(
    ("dtype", "options", "complaint"),
    [
        ("bfloat16", {"stage": 0}, "stage 0 trains in float32 only"),
        ("bfloat16", {"stage": 1}, "use stage 2 or 3"),
        ("bfloat16", {"stage": 3, "accumulate_dtype": "float16"}, "use one of these two"),
        ("bfloat16", {"stage": 3, "reduce_dtype": "float16"}, "reduce_dtype 'float16' fits neither"),
        ("float32", {"stage": 3, "reduce_dtype": "bfloat16"}, "use one of these two"),
        ("float16", {"stage": 3}, "does not train on the CPU"),
    ],
)
def test_settings_that_would_train_wrongly_are_refused(dtype, options, complaint):
    config = EngineConfig(model="m", dtype=dtype, optimizer=OptimizerConfig())
    with pytest.raises(ConfigError, match=complaint):
        check_compatible(config, ZeroConfig(**options))
    check_compatible(EngineConfig(model="m", dtype=dtype), ZeroConfig(**options))


def test_gradients_are_reduced_in_float32_unless_told_otherwise():
    assert settings("bfloat16")["communication_data_type"] == "fp32"
    assert settings("bfloat16", reduce_dtype="bfloat16")["communication_data_type"] == "bf16"
    assert "communication_data_type" not in settings("bfloat16", trained=False)


def test_micro_batches_are_counted_by_the_engine_not_by_deepspeed():
    found = settings()
    assert found["gradient_accumulation_steps"] == 1
    assert found["train_batch_size"] == 4
    assert found["gradient_clipping"] == 0.5


def test_each_option_arrives():
    section = settings(
        stage=3,
        offload_optimizer=True,
        offload_parameters=True,
        zero_hpz_partition_size=2,
        param_persistence_threshold=7,
        prefetch_bucket_size=8,
        max_live_parameters=9,
        reduce_bucket_size=10,
        overlap_comm=True,
    )["zero_optimization"]
    assert section["offload_optimizer"] == {"device": "cpu", "pin_memory": False}
    assert section["offload_param"] == {"device": "cpu", "pin_memory": False}
    assert section["zero_hpz_partition_size"] == 2
    assert section["stage3_param_persistence_threshold"] == 7
    assert section["stage3_prefetch_bucket_size"] == 8
    assert section["stage3_max_live_parameters"] == 9
    assert section["reduce_bucket_size"] == 10
    assert section["overlap_comm"] is True


def test_the_head_does_not_count_among_what_may_be_gathered():
    assert settings(stage=3)["zero_optimization"]["stage3_max_live_parameters"] == 1_000_000_000
    assert zero().most_live(1_050_673_152) == 2_050_673_152
    assert zero(max_live_parameters=5).most_live(1_050_673_152) == 5


def test_memory_is_pinned_and_communication_overlaps_on_cuda_only():
    section = settings(device="cuda", offload_optimizer=True)["zero_optimization"]
    assert section["offload_optimizer"]["pin_memory"] is True
    assert section["overlap_comm"] is True
    assert settings()["zero_optimization"]["overlap_comm"] is False


@pytest.mark.parametrize(("dtype", "accumulated"), [("float32", "fp32"), ("bfloat16", "fp32"), ("float16", "fp32")])
def test_gradients_are_added_up_in_float32(dtype, accumulated):
    found = settings(dtype)
    assert found["data_types"] == {"grad_accum_dtype": accumulated}
    assert found["bf16"]["enabled"] == (dtype == "bfloat16")
    assert ("fp16" in found) == (dtype == "float16")


def test_muon_needs_whole_gradients_and_whole_matrices():
    muon = OptimizerConfig(kind="muon")
    config = EngineConfig(model="m", optimizer=muon)
    assert deepspeed_config(config, ZeroConfig(), world_size=2)["zero_optimization"]["reduce_scatter"] is False
    with pytest.raises(ConfigError, match="use adamw"):
        check_compatible(config, ZeroConfig(zero_hpz_partition_size=2))
    with pytest.raises(ConfigError, match="use adamw"):
        check_compatible(replace(config, lora=LoraConfig()), ZeroConfig())


def test_compilation_needs_cuda():
    with pytest.raises(ConfigError, match="deep_compile needs CUDA"):
        check_compatible(EngineConfig(model="m", optimizer=OptimizerConfig()), ZeroConfig(deep_compile=True))
    assert settings(device="cuda", deep_compile=True)["compile"] == {"deepcompile": True}


def test_fused_kernels_need_cuda():
    config = EngineConfig(model="m", optimizer=OptimizerConfig())
    with pytest.raises(ConfigError, match="liger_kernels needs CUDA, the device is 'cpu'"):
        check_compatible(config, ZeroConfig(liger_kernels=True))
    check_compatible(replace(config, device="cuda"), ZeroConfig(liger_kernels=True))
    with pytest.raises(ConfigError, match="liger_kernels is not combined with deep_compile"):
        check_compatible(replace(config, device="cuda"), ZeroConfig(liger_kernels=True, deep_compile=True))


def test_what_deep_compile_cannot_have():
    config = EngineConfig(model="m", device="cuda", optimizer=OptimizerConfig())
    with pytest.raises(ConfigError, match="needs stage 1 or 3"):
        check_compatible(config, ZeroConfig(deep_compile=True, stage=2))
    with pytest.raises(ConfigError, match=r"no 4-bit weights.*lora\.quantize nf4"):
        check_compatible(replace(config, lora=LoraConfig(quantize="nf4")), ZeroConfig(deep_compile=True))


@pytest.mark.parametrize(
    ("fields", "options", "complaint"),
    [
        ({"lora": LoraConfig(quantize="nf4")}, {"zero_hpz_partition_size": 2}, "does not work with 4-bit weights"),
        ({"routing_replay": True, "sequence_parallel_size": 2}, {}, "routing_replay does not work with"),
        ({"packing": False, "sequence_parallel_size": 2}, {}, "cuts packed rows, and packing is false"),
        (
            {"max_tokens_per_mlp_tile": 8, "device": "cuda"},
            {"deep_compile": True},
            "deep_compile does not work with max_tokens_per_mlp_tile",
        ),
    ],
)
def test_what_is_not_combined(fields, options, complaint):
    config = EngineConfig(model="m", optimizer=OptimizerConfig(), options=options, **fields)
    with pytest.raises(ConfigError, match=complaint):
        DeepSpeedEngine.capabilities(config)


@pytest.mark.parametrize(
    ("fields", "stage", "complaint"),
    [
        ({}, 3, "stage 1 or 2, got stage 3"),
        ({"lora": LoraConfig()}, 2, "not combined with lora"),
        ({"average_decay": 0.9}, 2, "not combined with average_decay"),
        ({"sequence_parallel_size": 2}, 2, "not combined with sequence_parallel_size"),
        ({"max_tokens_per_mlp_tile": 8}, 2, "not combined with max_tokens_per_mlp_tile"),
        ({"images": True}, 2, "not combined with images"),
    ],
)
def test_what_slices_of_layers_are_not_combined_with(fields, stage, complaint):
    config = EngineConfig(model="m", optimizer=OptimizerConfig(), **fields)
    with pytest.raises(ConfigError, match=complaint):
        check_compatible(config, ZeroConfig(autotp_size=2, stage=stage))


def test_slices_of_layers_are_for_trained_engines():
    with pytest.raises(ConfigError, match="got a frozen engine"):
        check_compatible(EngineConfig(model="m"), ZeroConfig(autotp_size=2, stage=2))
    assert settings(stage=2, autotp_size=2)["tensor_parallel"] == {"autotp_size": 2}


def test_freeze_patterns_are_read_from_a_list_or_one_string():
    assert zero(freeze=["a.*", "b.*"]).freeze == ("a.*", "b.*")
    assert zero(freeze="a.*").freeze == ("a.*",)


def test_capabilities_follow_the_settings():
    plain = EngineConfig(model="m", optimizer=OptimizerConfig())
    always = TrainCapabilities(
        background_save=True, memory_report=True, measures_micro_batches=True, several_ranks=True
    )
    assert DeepSpeedEngine.capabilities(plain) == always
    assert DeepSpeedEngine.capabilities(replace(plain, average_decay=0.9)).average
    assert DeepSpeedEngine.capabilities(replace(plain, lora=LoraConfig())).adapter_weights
    for without in ({"lora": LoraConfig(quantize="nf4")}, {"lora": LoraConfig(), "optimizer": None}):
        assert not DeepSpeedEngine.capabilities(replace(plain, **without)).adapter_weights
