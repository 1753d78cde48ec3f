import pytest
from rlhf_core import ConfigError, EngineConfig, LoraConfig, OptimizerConfig
from rlhf_train import ZeroConfig
from rlhf_train.config.checks import check_compatible
from rlhf_train.config.options import deepspeed_config


def settings(dtype="float32", device="cpu", trained=True, **options):
    config = EngineConfig(
        model="m", dtype=dtype, device=device, optimizer=OptimizerConfig(max_grad_norm=0.5) if trained else None
    )
    return deepspeed_config(config, ZeroConfig(**options), world_size=4)


def test_an_unknown_option_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'offload_optimizer'"):
        ZeroConfig.from_options({"offload_optimiser": True})


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"stage": 4}, "stage must be"),
        ({"stage": 0, "offload_optimizer": True}, "needs stage 1, 2 or 3"),
        ({"stage": 2, "offload_parameters": True}, "needs stage 3"),
        ({"stage": 2, "zero_hpz_partition_size": 8}, "needs stage 3"),
        ({"reduce_bucket_size": 0}, "must be positive"),
        ({"sequence_parallel_size": 0}, "must be positive"),
        ({"average_decay": 1.0}, "average_decay must lie in"),
        ({"freeze_steps": -1}, "freeze_steps must not be negative"),
        ({"accumulate_dtype": "fp32"}, "accumulate_dtype must be one of"),
    ],
)
def test_impossible_options_are_refused(options, complaint):
    with pytest.raises(ConfigError, match=complaint):
        ZeroConfig.from_options(options)


@pytest.mark.parametrize(
    ("dtype", "options", "complaint"),
    [
        ("bfloat16", {"stage": 0}, "stage 0 trains in float32 only"),
        ("bfloat16", {"stage": 1}, "use stage 2 or 3"),
        ("bfloat16", {"stage": 3, "accumulate_dtype": "float16"}, "use one of these two"),
        ("float16", {"stage": 3}, "does not train on the CPU"),
    ],
)
def test_settings_that_would_train_wrongly_are_refused(dtype, options, complaint):
    config = EngineConfig(model="m", dtype=dtype, optimizer=OptimizerConfig())
    with pytest.raises(ConfigError, match=complaint):
        check_compatible(config, ZeroConfig(**options))
    check_compatible(EngineConfig(model="m", dtype=dtype), ZeroConfig(**options))


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


def test_adapters_are_read_from_a_mapping():
    lora = ZeroConfig.from_options({"lora": {"rank": 4, "target_modules": ["q_proj", "v_proj"]}}).lora
    assert lora is not None
    assert (lora.rank, lora.target_modules) == (4, ("q_proj", "v_proj"))
    with pytest.raises(ConfigError, match="did you mean 'rank'"):
        ZeroConfig.from_options({"lora": {"ranks": 4}})
    with pytest.raises(ConfigError, match="rank must be at least 1"):
        ZeroConfig.from_options({"lora": {"rank": 0}})


def test_muon_needs_whole_gradients_and_whole_matrices():
    muon = OptimizerConfig(kind="muon")
    config = EngineConfig(model="m", optimizer=muon)
    assert deepspeed_config(config, ZeroConfig(), world_size=2)["zero_optimization"]["reduce_scatter"] is False
    for options in ({"zero_hpz_partition_size": 2}, {"lora": LoraConfig()}):
        with pytest.raises(ConfigError, match="use adamw"):
            check_compatible(config, ZeroConfig(**options))


def test_compilation_needs_cuda():
    with pytest.raises(ConfigError, match="deep_compile needs CUDA"):
        check_compatible(EngineConfig(model="m", optimizer=OptimizerConfig()), ZeroConfig(deep_compile=True))
    assert settings(device="cuda", deep_compile=True)["compile"] == {"deepcompile": True}


def test_what_deep_compile_cannot_have():
    config = EngineConfig(model="m", device="cuda", optimizer=OptimizerConfig())
    with pytest.raises(ConfigError, match="needs stage 1 or 3"):
        check_compatible(config, ZeroConfig(deep_compile=True, stage=2))
    with pytest.raises(ConfigError, match=r"no 4-bit weights.*lora\.quantize nf4"):
        check_compatible(config, ZeroConfig(deep_compile=True, lora=LoraConfig(quantize="nf4")))


def test_what_is_not_combined():
    with pytest.raises(ConfigError, match="does not work with 4-bit weights"):
        ZeroConfig.from_options({"zero_hpz_partition_size": 2, "lora": {"quantize": "nf4"}})
    with pytest.raises(ConfigError, match="routing_replay does not work with sequence_parallel_size"):
        ZeroConfig(routing_replay=True, sequence_parallel_size=2)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"stage": 3}, "stage 1 or 2, got stage 3"),
        ({"stage": 2, "lora": LoraConfig()}, "not combined with lora"),
        ({"stage": 2, "average_decay": 0.9}, "not combined with average_decay"),
    ],
)
def test_what_slices_of_layers_are_not_combined_with(options, complaint):
    config = EngineConfig(model="m", optimizer=OptimizerConfig())
    with pytest.raises(ConfigError, match=complaint):
        check_compatible(config, ZeroConfig(autotp_size=2, **options))
    with pytest.raises(ConfigError, match="got a frozen engine"):
        check_compatible(EngineConfig(model="m"), ZeroConfig(autotp_size=2, stage=2))
    assert settings(stage=2, autotp_size=2)["tensor_parallel"] == {"autotp_size": 2}


def test_freeze_patterns_are_read_from_a_list_or_one_string():
    assert ZeroConfig.from_options({"freeze": ["a.*", "b.*"]}).freeze == ("a.*", "b.*")
    assert ZeroConfig.from_options({"freeze": "a.*"}).freeze == ("a.*",)


def test_a_switch_must_be_true_or_false():
    with pytest.raises(ConfigError, match="packing must be true or false"):
        ZeroConfig.from_options({"packing": "no"})
