"""Engines that load weights wrongly are caught by the probe: loaded another way, or named as the run ends."""

import asyncio

import pytest
import torch
from rlhf_core import (
    Batch,
    ConfigError,
    EngineConfig,
    GenerationRequest,
    LoraConfig,
    Loss,
    LossTerms,
    OptimizerConfig,
    RolloutConfig,
    SamplingConfig,
    StaleWeightsError,
    WeightManifest,
    WeightSyncError,
    receive_weights,
)
from rlhf_core.testing.tiny import save_tiny_experts, save_tiny_model
from rlhf_launch.config.weight_sync import WeightSyncSection
from rlhf_launch.weight_sync.sync import WeightSync
from rlhf_launch.workers.handles import LocalHandle
from rlhf_launch.workers.rollout_engine import RolloutWorker
from rlhf_launch.workers.rollout_pool import RolloutPool
from rlhf_launch.workers.train_group import TrainGroup
from rlhf_launch.workers.train_rank import TrainWorker
from rlhf_launch.workers.waits import Waits
from rlhf_rollout import TransformersBackend

PATIENCE_S = 60.0
REQUEST = GenerationRequest(
    request_id="r", prompt_token_ids=tuple(range(20, 40)), sampling=SamplingConfig(max_tokens=8), n=2, seed=0
)


class Faulty(TransformersBackend):
    """Takes weights like a real backend and then does to its model what `fault` does, `times` times."""

    fault = None
    times = 99

    def _take_weights(self, manifest):
        before = {name: tensor.clone() for name, tensor in self._model.state_dict().items()}
        super()._take_weights(manifest)
        if self.fault is not None and self.times:
            self.times -= 1
            with torch.no_grad():
                self.fault(dict(self._model.named_parameters()), before)


def keep_old_weights(weights, before):
    for name, tensor in weights.items():
        tensor.copy_(before[name])


def spoil_a_norm(weights, before):
    weights["model.layers.0.input_layernorm.weight"] *= 1.5


def spoil_one_expert(weights, before):
    down = weights["model.layers.1.mlp.experts.down_proj"]
    down[2] = down[2].roll(1, 0)


def swap_one_layer(weights, before):
    name = "model.layers.1.self_attn.o_proj.weight"
    weights[name].copy_(before[name].roll(1, 0))


def make_nan(weights, before):
    weights["model.norm.weight"][0] = torch.nan


def likelihood(outputs, batch, config):
    """Raise the likelihood of the response."""
    mask = batch.response_mask
    return LossTerms(total=-(outputs.log_probs * mask).sum(), weight=mask.sum().float(), metrics={})


class Stack:
    """A torch engine and Transformers backends in this process."""

    def __init__(self, path, *, engines=1, dtype="float32", rate=1e-3, lora=None, backend="Faulty", **options):
        config = EngineConfig(
            model=path, role="policy", optimizer=OptimizerConfig(learning_rate=rate), dtype=dtype, lora=lora
        )
        self.trainer = TrainWorker("torch", config, {})
        self.policy = TrainGroup("policy", [LocalHandle("policy-0", lambda: self.trainer)], waits=Waits(PATIENCE_S))
        self.policy.start()
        rollout = RolloutConfig(model=path, dtype=dtype, max_model_len=64)
        name = backend if backend == "vllm" else f"{__name__}:{backend}"
        self.workers = [RolloutWorker(name, rollout, {}) for _ in range(engines)]
        handles = [LocalHandle(f"rollout-{i}", lambda w=w: w) for i, w in enumerate(self.workers)]
        self.pool = RolloutPool(handles, waits=Waits(PATIENCE_S))
        self.pool.start()
        self.options = options

    def sync(self, **options):
        section = WeightSyncSection(**{**self.options, **options})
        return WeightSync(self.policy, self.pool, transports=("local",), options=section)

    @property
    def backends(self):
        return [worker._backend for worker in self.workers]

    def step(self):
        tokens = torch.tensor([[*REQUEST.prompt_token_ids]])
        mask = torch.arange(tokens.shape[1])[None] > 10
        batch = Batch(token_ids=tokens, attention_mask=torch.ones_like(mask), response_mask=mask)
        self.policy.step(batch, Loss(function=likelihood, config=None))

    def generate(self):
        return asyncio.run(self.pool.generate(REQUEST)).samples

    def close(self):
        self.pool.close()
        self.policy.close()


@pytest.fixture
def start():
    stacks = []

    def start(*args, **kwargs):
        stacks.append(Stack(*args, **kwargs))
        return stacks[-1]

    yield start
    for stack in stacks:
        stack.close()


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("dense"), tokenizer=False)


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    return save_tiny_experts(tmp_path_factory.mktemp("experts"), "qwen3_moe", tokenizer=False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_right_loads_pass_and_are_measured(start, dense, dtype):
    stack = start(dense, dtype=dtype)
    sync = stack.sync()
    assert "verified by a probe" in sync.prove()
    for version in (1, 2, 3):
        stack.step()
        report = sync(version)
        assert report.metrics["sync/probe_gap"] < (1e-5 if dtype == "float32" else 0.05)
        assert report.metrics["sync/probe_gap_max"] >= report.metrics["sync/probe_gap"]
        assert 0 < report.metrics["sync/probe_seconds"] < report.seconds
    assert {v for sample in stack.generate() for v in sample.weight_versions} == {3}


FAULTS = [keep_old_weights, spoil_a_norm, swap_one_layer, make_nan]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", FAULTS)
def test_an_engine_that_loads_wrongly_twice_ends_the_run(start, dense, fault, dtype):
    stack = start(dense, dtype=dtype, engines=2)
    sync = stack.sync()
    sync.prove()
    stack.step()
    sync(1)
    stack.backends[1].fault = fault
    stack.step()
    with pytest.raises(WeightSyncError) as caught:
        sync(2)
    said = str(caught.value)
    assert "rollout engine 1" in said
    assert "rollout engine 0" not in said
    for part in ("version 2", "First try", "Second try", "at the median", "weight_sync.probe_limit"):
        assert part in said or (fault is keep_old_weights and part == "at the median")
    assert sync.version is None
    with pytest.raises(StaleWeightsError):
        stack.pool.call(1, "generate", REQUEST).result(PATIENCE_S)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_load_that_is_wrong_once_is_mended_by_another_way(start, dense, fault):
    stack = start(dense, engines=2)
    sync = stack.sync()
    sync.prove()
    stack.backends[0].fault, stack.backends[0].times = fault, 1
    stack.step()
    report = sync(1)
    assert stack.backends[0].times == 0
    assert all(probe.gap.largest < 1e-4 for probe in report.probes)
    assert stack.pool.weight_versions() == [1, 1]
    assert len(stack.generate()) == 2
    stack.step()
    assert sync(2).probes[0].gap.largest < 1e-4, "the model that was loaded anew takes syncs as usual"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_expert_that_is_loaded_wrongly_is_caught(start, experts, dtype):
    stack = start(experts, dtype=dtype)
    sync = stack.sync()
    sync.prove()
    stack.step()
    sync(1)
    stack.backends[0].fault, stack.backends[0].times = spoil_one_expert, 1
    stack.step()
    assert sync(2).probes[0].fault is None
    assert stack.backends[0].times == 0, "the fault passed unseen"


def test_old_weights_are_noticed_though_rounding_would_hide_the_change(start, dense, caplog):
    """A step of a usual learning rate in bfloat16: the gap says nothing, equal bits do."""
    stack = start(dense, dtype="bfloat16", rate=2e-5)
    sync = stack.sync()
    sync.prove()
    stack.step()
    sync(1)
    stack.backends[0].fault, stack.backends[0].times = keep_old_weights, 1
    stack.step()
    assert sync(2).probes[0].fault is None
    assert stack.backends[0].times == 0, "the fault passed unseen"
    assert "bit for bit" in caplog.text


def test_weights_that_did_not_change_are_no_fault(start, dense):
    stack = start(dense, rate=0.0)
    sync = stack.sync()
    sync.prove()
    for version in (1, 2):
        stack.step()
        assert sync(version).probes[0].fault is None


def test_nothing_is_sampled_between_a_load_and_its_verdict(start, dense):
    """Requests that run during a sync which fails end without a token of the wrong weights."""
    stack = start(dense)
    sync = stack.sync()
    sync.prove()
    long = GenerationRequest(
        request_id="long", prompt_token_ids=(30, 31), sampling=SamplingConfig(max_tokens=60, min_tokens=60), seed=1
    )
    stack.backends[0].fault, stack.backends[0].times = spoil_a_norm, 1
    running = stack.pool.call(0, "generate", long)
    stack.step()
    sync(1)
    (sample,) = running.result(PATIENCE_S).samples
    rows = ((*long.prompt_token_ids, *sample.token_ids),)
    (expected,) = stack.policy.score_tokens(rows)
    for found, right, version in zip(sample.log_probs, expected[1:], sample.weight_versions, strict=True):
        if version == 1:
            assert abs(found - right) < 0.5, "more than what the forbidden end-of-text explains"


def test_an_engine_that_is_paused_stays_paused(start, dense):
    stack = start(dense)
    sync = stack.sync()
    stack.pool.pause()
    stack.step()
    sync(1)
    waiting = stack.pool.call(0, "generate", REQUEST)
    with pytest.raises(TimeoutError):
        waiting.result(0.3)
    stack.pool.resume()
    assert len(waiting.result(PATIENCE_S).samples) == 2


def test_a_transfer_that_fails_after_a_wrong_load_leaves_the_engine_held(start, dense):
    """Only a load that passes its probe lets the engine go on, whatever happens in between."""
    stack = start(dense)
    sync = stack.sync()
    sync.prove()
    backend = stack.backends[0]
    backend.fault, backend.times = spoil_a_norm, 1
    receive, calls = backend.receive_weights, []

    async def fails_the_second_time(manifest):
        calls.append(manifest.other_way)
        if len(calls) == 2:
            raise WeightSyncError("a hiccup before anything was touched")
        await receive(manifest)

    backend.receive_weights = fails_the_second_time
    held = []
    connect = backend.connect

    async def look_and_connect(link, rank):
        if calls:
            held.append(stack.workers[0]._fault is not None)
        await connect(link, rank)

    backend.connect = look_and_connect
    stack.step()
    assert sync(1).probes[0].fault is None
    assert calls == [False, True, True]
    assert held == [True, True]
    assert len(stack.generate()) == 2


def test_an_engine_that_joins_is_probed(start, dense):
    stack = start(dense, engines=2)
    sync = stack.sync()
    sync.prove()
    stack.step()
    sync(1)
    stack.pool.drop(1, "gone")
    stack.backends[1].fault = spoil_a_norm
    with pytest.raises(WeightSyncError, match="rollout engine 1"):
        sync.bring_up(1)
    assert stack.pool.live == [0]
    stack.backends[1].fault = None
    sync.bring_up(1)
    assert stack.pool.live == [0, 1]


def test_engines_that_were_loaded_with_other_weights_are_synced_before_they_sample(start, dense, caplog):
    stack = start(dense, engines=2)
    with torch.no_grad():
        stack.backends[1]._model.model.norm.weight *= 2
    sync = stack.sync()
    assert "took its weights" in sync.prove()
    assert "rollout engine 1" in caplog.text
    assert sync.version == 0
    assert len(stack.generate()) == 2


def test_only_every_other_sync_is_verified_on_demand(start, dense):
    stack = start(dense)
    sync = stack.sync(probe_every=2)
    sync.prove()
    verified = []
    for version in range(1, 5):
        stack.step()
        verified.append(bool(sync(version).probes))
    assert verified == [False, True, False, True]
    never = stack.sync(probe_every=0)
    assert "probe_every is 0" in never.prove()
    assert never(5).probes == ()


class Mute(TransformersBackend):
    """Cannot score tokens."""

    score_tokens = None

    @property
    def capabilities(self):
        stated = super().capabilities
        object.__setattr__(stated, "token_scores", None)
        return stated


def test_a_backend_that_cannot_score_is_said_and_used(start, dense):
    stack = start(dense, backend="Mute")
    sync = stack.sync()
    assert "cannot score given tokens" in sync.prove()
    report = sync(1)
    assert report.probes == ()
    assert set(report.metrics) == {"weight_version", "sync/bytes"}


def test_merged_adapters_and_changes_alone_are_probed(start, dense):
    stack = start(dense, lora=LoraConfig(rank=4, alpha=8.0), rate=1e-2)
    sync = stack.sync()
    sync.prove()
    stack.step()
    assert sync(1).probes[0].gap.largest < 1e-4
    delta = stack.sync(delta="values")
    for version in (2, 3):
        stack.step()
        report = delta(version)
        assert report.probes[0].gap.largest < 1e-4
    assert report.partial
    stack.backends[0].fault, stack.backends[0].times = swap_one_layer, 1
    stack.step()
    report = delta(4)
    assert not report.partial, "the second try brings all weights"
    assert report.probes[0].gap.largest < 1e-4


@pytest.mark.stack
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_vllm_engines_that_load_wrongly_are_caught(start, experts, dtype, monkeypatch, caplog):
    """Faults in the place where vLLM takes weights: once each, mended by loading all at once; then for good."""
    from rlhf_rollout.backends.vllm.worker.transfer import LinkTransfer

    stack = start(experts, dtype=dtype, backend="vllm")
    sync = stack.sync()
    assert "verified by a probe" in sync.prove()
    stack.step()
    first = sync(1).probes[0].gap
    assert first.mean < (1e-5 if dtype == "float32" else 0.05)
    load, receive = LinkTransfer._load, LinkTransfer.receive_weights
    spoiled = []

    def spoil(part, change):
        def changed(transfer, weights):
            def pairs():
                for name, tensor in weights:
                    if part in name:
                        spoiled.append(name)
                        tensor = change(tensor)
                    yield name, tensor

            load(transfer, pairs())

        return changed

    def keep_old(transfer, update):
        if update.other_way:
            receive(transfer, update)
        else:
            receive_all(transfer, update)

    def receive_all(transfer, update):
        manifest = WeightManifest.from_dict(vars(update))
        receive_weights(manifest, transfer.receiver, list)

    faults = [
        ("_load", spoil("layers.1.mlp.experts.2.down_proj", lambda tensor: tensor.roll(1, 0))),
        ("_load", spoil("layers.0.input_layernorm", lambda tensor: tensor * 1.5)),
        ("_load", spoil("layers.1.mlp.experts", torch.zeros_like)),
        ("receive_weights", keep_old),
    ]
    for version, (name, fault) in enumerate(faults, start=2):
        caplog.clear()
        stack.step()
        with monkeypatch.context() as patch:
            patch.setattr(LinkTransfer, name, fault)
            report = sync(version)
        assert f"weight version {version} is wrong as it was loaded" in caplog.text
        assert report.probes[0].gap.mean < max(1e-5, 4 * first.mean)
    assert len(spoiled) > 2
    stack.step()
    monkeypatch.setattr(LinkTransfer, "receive_weights", receive_all)
    with pytest.raises(WeightSyncError, match=r"rollout engine 0: its log-probs|it has kept its old weights"):
        sync(9)
    with pytest.raises(StaleWeightsError):
        stack.pool.call(0, "generate", REQUEST).result(PATIENCE_S)


def test_settings_are_checked():
    for name, value in {"probe_every": -1, "probe_tokens": 1, "probe_limit": 0.0}.items():
        with pytest.raises(ConfigError, match=name):
            WeightSyncSection(**{name: value})
