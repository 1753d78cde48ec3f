from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from rlhf_algos.torch_engine.engine import TorchEngine
from rlhf_core import (
    Batch,
    CheckpointError,
    ConfigError,
    EngineConfig,
    LoraConfig,
    Loss,
    LossTerms,
    OptimizerConfig,
    ResourceError,
    RewardScale,
    TrainEngine,
    TrainingDivergedError,
)
from rlhf_core.testing.tiny import save_tiny_model
from transformers import BertConfig, BertLMHeadModel


def likelihood(outputs, batch, config):
    return LossTerms(total=-outputs.log_probs.sum(), weight=batch.response_mask.sum().float())


def squared_score(outputs, batch, config):
    return LossTerms(total=((outputs.scores - 1) ** 2).sum(), weight=torch.tensor(float(batch.rows)))


def squared_values(outputs, batch, config):
    return LossTerms(
        total=((outputs.values - 1) ** 2 * batch.response_mask).sum(), weight=batch.response_mask.sum().float()
    )


SFT = Loss(function=likelihood)


def make_batch(rows: int = 6, seed: int = 0) -> Batch:
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(5, 12, (rows,), generator=random)
    mask = torch.arange(12) < lengths[:, None]
    ids = torch.randint(5, 200, (rows, 12), generator=random).masked_fill(~mask, 0)
    response = mask & (torch.arange(12) >= 3)
    return Batch(
        token_ids=ids,
        attention_mask=mask,
        response_mask=response,
        sample_ids=tuple(f"s{i}" for i in range(rows)),
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), hidden_size=32)


@pytest.fixture
def config(model):
    return EngineConfig(model=model, optimizer=OptimizerConfig(learning_rate=1e-2))


def all_weights(engine) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in engine.model.named_parameters()}


def same(left, right) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_it_is_a_train_engine(config):
    assert isinstance(TorchEngine(config), TrainEngine)


def test_steps_reduce_the_loss(config):
    engine, batch = TorchEngine(config), make_batch()
    losses = [engine.step(batch, SFT).loss for _ in range(8)]
    assert losses[-1] < 0.7 * losses[0]


def test_micro_batches_do_not_change_the_step(config):
    whole, cut = TorchEngine(config), TorchEngine(replace(config, max_tokens_per_micro_batch=13))
    batch = make_batch()
    first, second = whole.step(batch, SFT), cut.step(batch, SFT)
    assert first.loss == pytest.approx(second.loss, rel=1e-5)
    assert first.grad_norm == pytest.approx(second.grad_norm, rel=1e-4)
    assert torch.allclose(whole.score(batch).log_probs, cut.score(batch).log_probs, atol=1e-4)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_trial_of_micro_batches_leaves_no_trace(config, dropout):
    config = replace(config, options={"model_arguments": {"attention_dropout": dropout}}, longest_row=30)
    tried = TorchEngine(replace(config, max_tokens_per_micro_batch="auto"))
    torch.manual_seed(7)
    outside = torch.get_rng_state()
    reports = [tried.step(make_batch(seed=seed), SFT) for seed in range(2)]
    assert torch.equal(torch.get_rng_state(), outside)
    tokens = tried.fitted_tokens()["step"].tokens
    written = TorchEngine(replace(config, max_tokens_per_micro_batch=tokens))
    assert [written.step(make_batch(seed=seed), SFT) for seed in range(2)] == reports
    assert same(all_weights(tried), all_weights(written))
    tried.scoring_budget(make_batch())
    assert all(parameter.grad is None for parameter in tried.model.parameters())


def test_micro_batches_are_cut_where_memory_is_short(config, monkeypatch, tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 1048576 kB\nMemAvailable: 20480 kB\n")
    monkeypatch.setattr("rlhf_core.training.memory_meter._MEMINFO", meminfo)
    engine = TorchEngine(replace(config, max_tokens_per_micro_batch="auto", longest_row=30))
    engine.step(make_batch(), SFT)
    fitted = engine.fitted_tokens()["step"]
    parameters = sum(p.numel() * p.element_size() for p in engine.model.parameters())
    assert fitted.free == (20 << 20) - 2 * parameters, "the optimizer's moments come with the first step"
    assert fitted.tokens == int((fitted.free / 2 - fitted.fixed) / fitted.per_token) // 256 * 256
    assert 256 <= fitted.tokens < 16_384
    meminfo.write_text("MemTotal: 1048576 kB\nMemAvailable: 1024 kB\n")
    engine = TorchEngine(replace(config, max_tokens_per_micro_batch="auto", longest_row=3000))
    with pytest.raises(ResourceError, match="not even one micro-batch of the longest rows fits: 3000 tokens need"):
        engine.step(make_batch(), SFT)


def test_step_is_adamw_on_the_mean_loss(config, model):
    from transformers import AutoModelForCausalLM

    engine, batch = TorchEngine(config), make_batch()
    plain = AutoModelForCausalLM.from_pretrained(model)
    logits = plain(input_ids=batch.token_ids, attention_mask=batch.attention_mask.long()).logits.log_softmax(-1)
    picked = logits[:, :-1].gather(-1, batch.token_ids[:, 1:, None]).squeeze(-1)
    loss = -(picked * batch.response_mask[:, 1:]).sum() / batch.response_mask.sum()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    torch.optim.AdamW(plain.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0).step()
    report = engine.step(batch, SFT)
    assert report.loss == pytest.approx(float(loss.detach()), rel=1e-5)
    assert report.grad_norm == pytest.approx(float(norm), rel=1e-4)
    for (name, ours), theirs in zip(engine.model.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=2e-4), name


@pytest.mark.parametrize(
    ("role", "loss"),
    [
        ("reward", Loss(function=squared_score, outputs=("scores",))),
        ("critic", Loss(function=squared_values, outputs=("values",))),
    ],
)
def test_scalar_roles_train(config, role, loss):
    engine, batch = TorchEngine(replace(config, role=role)), make_batch()
    losses = [engine.step(batch, loss).loss for _ in range(10)]
    assert losses[-1] < 0.5 * losses[0]


def test_a_scale_in_the_model_s_config_is_taken_out_of_its_scores(tmp_path):
    path = save_tiny_model(tmp_path / "reward", head="scalar")
    plain = EngineConfig(model=path, role="reward", device="cpu")
    raw = TorchEngine(plain).score(make_batch(), ("scores",)).scores
    settings = json.loads((tmp_path / "reward" / "config.json").read_text())
    settings |= RewardScale(mean=0.5, std=4.0).as_config()
    (tmp_path / "reward" / "config.json").write_text(json.dumps(settings))
    engine = TorchEngine(plain)
    assert torch.allclose(engine.score(make_batch(), ("scores",)).scores, (raw - 0.5) / 4, atol=1e-5)
    engine.export(tmp_path / "again")
    assert RewardScale.of_config(json.loads((tmp_path / "again" / "config.json").read_text())) is not None


def test_a_fresh_critic_says_zero(config):
    engine = TorchEngine(replace(config, role="critic"))
    assert engine.score(make_batch(), ("values",)).values.abs().max() == 0


def test_a_language_model_is_no_frozen_reward_model(config):
    """Its scores would be those of a random head."""
    with pytest.raises(ConfigError, match="no trained scalar head"):
        TorchEngine(replace(config, role="reward", optimizer=None))


def test_a_model_is_tried_when_it_is_loaded(config, model, tmp_path, caplog):
    engine = TorchEngine(config)
    assert engine.trial.packing
    assert max(engine.trial.differences.values()) < 1e-4
    assert not caplog.records
    chosen = TorchEngine(replace(config, attention="eager"))
    assert not chosen.packing
    (said,) = caplog.records
    assert "rows run padded, not packed: its attention was chosen to be 'eager'" in said.getMessage()
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertLMHeadModel(BertConfig(vocab_size=64, initializer_range=0.5, **sizes)).save_pretrained(tmp_path / "encoder")
    with pytest.raises(ConfigError, match=r"\(bert\) cannot be used as policy: a token's logits depend on later"):
        TorchEngine(replace(config, model=str(tmp_path / "encoder")))


def test_a_frozen_engine_scores_and_refuses_to_step(config):
    engine = TorchEngine(replace(config, role="reference", optimizer=None))
    assert engine.score(make_batch()).log_probs.shape == (6, 12)
    assert not any(p.requires_grad for p in engine.model.parameters())
    with pytest.raises(ConfigError, match="frozen"):
        engine.step(make_batch(), SFT)


def test_a_bad_row_skips_the_step_and_is_named(config):
    engine = TorchEngine(replace(config, max_tokens_per_micro_batch=1, max_skipped_steps=1))
    before = all_weights(engine)
    poison = torch.zeros(6)
    poison[4] = float("nan")
    bad = make_batch().with_columns(poison=poison)

    report = engine.step(bad, Loss(function=nan_rows))
    assert report.skipped
    assert report.bad_sample_ids == ("s4",)
    assert same(before, all_weights(engine))
    assert not engine.step(make_batch(), SFT).skipped
    engine.step(bad, Loss(function=nan_rows))
    with pytest.raises(TrainingDivergedError, match="s4"):
        engine.step(bad, Loss(function=nan_rows))


def nan_rows(outputs, batch, config):
    return LossTerms(
        total=(outputs.log_probs.sum(1) * (1 + batch["poison"])).sum(), weight=torch.tensor(float(batch.rows))
    )


@pytest.mark.parametrize("change", [{}, {"dtype": "bfloat16"}, {"role": "critic"}])
def test_save_and_load_continue_bit_for_bit(config, tmp_path, change):
    config = replace(
        config,
        optimizer=OptimizerConfig(learning_rate=1e-2, schedule="cosine", warmup_steps=2, total_steps=9),
        **change,
    )
    loss = Loss(function=squared_values, outputs=("values",)) if config.role == "critic" else SFT
    engine = TorchEngine(config)
    for seed in range(3):
        engine.step(make_batch(seed=seed), loss)
    engine.save(tmp_path)
    after = [engine.step(make_batch(seed=seed), loss) for seed in (3, 4)]
    resumed = TorchEngine(config)
    resumed.load(tmp_path)
    again = [resumed.step(make_batch(seed=seed), loss) for seed in (3, 4)]
    assert [r.loss for r in after] == [r.loss for r in again]
    assert [r.learning_rate for r in after] == [r.learning_rate for r in again]
    assert same(all_weights(engine), all_weights(resumed))


def test_dropout_resumes_and_engines_do_not_share_random_numbers(config, tmp_path, model):
    config = replace(config, options={"model_arguments": {"attention_dropout": 0.3}})
    engine = TorchEngine(config)
    engine.step(make_batch(), SFT)
    engine.save(tmp_path)
    expected = engine.step(make_batch(), SFT).loss
    resumed = TorchEngine(config)
    resumed.load(tmp_path)
    torch.rand(3)
    assert resumed.step(make_batch(), SFT).loss == expected
    scores = [engine.score(make_batch()).log_probs for _ in range(2)]
    assert torch.equal(*scores)


def test_loading_nothing_or_another_model_is_a_clear_error(config, tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint"):
        TorchEngine(config).load(tmp_path)
    other = save_tiny_model(tmp_path / "other", hidden_size=16)
    (tmp_path / "ck").mkdir()
    TorchEngine(replace(config, model=other)).save(tmp_path / "ck")
    with pytest.raises(CheckpointError, match="another model"):
        TorchEngine(config).load(tmp_path / "ck")


@pytest.mark.parametrize("name", ["weights.safetensors", "engine.pt"])
def test_a_damaged_checkpoint_names_its_file(config, tmp_path, name):
    TorchEngine(config).save(tmp_path)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-50])
    with pytest.raises(CheckpointError, match=f"{name}' is damaged"):
        TorchEngine(config).load(tmp_path)


def test_export_is_a_transformers_directory(config, tmp_path):
    engine, batch = TorchEngine(config), make_batch()
    engine.step(batch, SFT)
    engine.export(tmp_path)
    again = TorchEngine(replace(config, model=str(tmp_path), optimizer=None))
    assert torch.equal(engine.score(batch).log_probs, again.score(batch).log_probs)


def test_bfloat16_keeps_float32_masters(config):
    # 1e-4 is far below bfloat16's resolution at these weights; only masters add such steps up.
    config = replace(config, dtype="bfloat16", optimizer=OptimizerConfig(learning_rate=1e-4))
    engine, batch = TorchEngine(config), make_batch()
    first = engine.step(batch, SFT).loss
    for _ in range(30):
        last = engine.step(batch, SFT).loss
    assert engine.model.dtype is torch.bfloat16
    assert last < first - 0.05


def test_gradient_checkpointing_changes_nothing(config):
    plain, thrifty = TorchEngine(config), TorchEngine(replace(config, gradient_checkpointing=True))
    a, b = plain.step(make_batch(), SFT), thrifty.step(make_batch(), SFT)
    assert a.loss == pytest.approx(b.loss, rel=1e-6)
    assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-5)


def test_tiles_of_mlps_change_nothing(config):
    whole, tiled = TorchEngine(config), TorchEngine(replace(config, max_tokens_per_mlp_tile=5))
    torch.testing.assert_close(tiled.score(make_batch()).log_probs, whole.score(make_batch()).log_probs)
    a, b = whole.step(make_batch(), SFT), tiled.step(make_batch(), SFT)
    assert a.loss == pytest.approx(b.loss, rel=1e-6)
    assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-5)


class TestLora:
    @pytest.fixture
    def engine(self, config):
        pytest.importorskip("peft")
        return TorchEngine(replace(config, lora=LoraConfig(rank=4)))

    def test_only_adapters_change_and_export_is_merged(self, engine, config, tmp_path):
        batch = make_batch()
        before = all_weights(engine)
        losses = [engine.step(batch, SFT).loss for _ in range(5)]
        assert losses[-1] < losses[0]
        changed = {n for n, p in all_weights(engine).items() if not torch.equal(p, before[n])}
        assert changed
        assert all("lora_" in name for name in changed)
        engine.export(tmp_path)
        merged = TorchEngine(replace(config, model=str(tmp_path), optimizer=None))
        assert torch.allclose(engine.score(batch).log_probs, merged.score(batch).log_probs, atol=1e-5)

    def test_weights_have_the_names_of_the_checkpoint(self, engine, config):
        plain = TorchEngine(config).weights().manifest(0)
        assert [t.name for t in engine.weights().manifest(0).tensors] == [t.name for t in plain.tensors]

    def test_resume(self, engine, config, tmp_path):
        engine.step(make_batch(), SFT)
        engine.save(tmp_path)
        expected = engine.step(make_batch(), SFT)
        resumed = TorchEngine(engine.config)
        resumed.load(tmp_path)
        assert resumed.step(make_batch(), SFT).loss == expected.loss


class TestQuantizedLora:
    @pytest.fixture
    def engine(self, config):
        pytest.importorskip("bitsandbytes")
        pytest.importorskip("peft")
        return TorchEngine(replace(config, lora=LoraConfig(rank=4, quantize="nf4")))

    def test_trains_exports_in_full_precision_and_resumes(self, engine, config, tmp_path):
        batch = make_batch()
        frozen = TorchEngine(replace(engine.config, optimizer=None, role="reference"))
        assert torch.equal(frozen.score(batch).log_probs, engine.score(batch).log_probs)
        losses = [engine.step(batch, SFT).loss for _ in range(5)]
        assert losses[-1] < losses[0]
        for folder in ("saved", "exported"):
            (tmp_path / folder).mkdir()
        engine.save(tmp_path / "saved")
        engine.export(tmp_path / "exported")
        merged = TorchEngine(replace(config, model=str(tmp_path / "exported"), optimizer=None))
        assert torch.allclose(engine.score(batch).log_probs, merged.score(batch).log_probs, atol=1e-4)
        expected = engine.step(batch, SFT)
        resumed = TorchEngine(engine.config)
        resumed.load(tmp_path / "saved")
        assert resumed.step(batch, SFT).loss == expected.loss

    def test_weights_are_those_of_the_checkpoint_in_name_shape_and_dtype(self, engine, config):
        plain = TorchEngine(config).weights().manifest(0)
        assert engine.weights().manifest(0).tensors == plain.tensors


def test_a_model_that_does_not_exist_is_refused(config):
    with pytest.raises(ConfigError, match="does not exist"):
        TorchEngine(replace(config, model="./nowhere/model"))


def test_unknown_option(config):
    with pytest.raises(ConfigError, match=r"unknown key 'model_argument'; did you mean 'model_arguments'"):
        TorchEngine(replace(config, options={"model_argument": {}}))


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"average_decay": 0.9}, "keeps no average"),
        ({"sequence_parallel_size": 2}, "sequence_parallel_size=2"),
        ({"optimizer": OptimizerConfig(kind="muon")}, "adamw only, got optimizer kind 'muon'"),
        ({"dtype": "float16"}, "write dtype: bfloat16"),
        ({"options": {"lora": {}}}, "'lora' is a setting of every engine"),
    ],
)
def test_what_it_cannot_honour_is_refused_before_anything_is_loaded(config, fields, complaint):
    asked = replace(config, model="nowhere/at/all", **fields)
    for refuse in (TorchEngine, TorchEngine.capabilities):
        with pytest.raises(ConfigError, match=complaint):
            refuse(asked)


RANK_SCRIPT = """
import sys, torch, importlib.util
spec = importlib.util.spec_from_file_location("test_engine", sys.argv[1]); t = importlib.util.module_from_spec(spec)
sys.modules["test_engine"] = t; spec.loader.exec_module(t)
from pathlib import Path
import torch.distributed as dist
config = t.EngineConfig(model=sys.argv[2], max_tokens_per_micro_batch=24,
                        optimizer=t.OptimizerConfig(learning_rate=1e-2))
engine = t.TorchEngine(config)
rows = [0, 1, 2, 3] if dist.get_rank() == 0 else [4, 5]
reports = [engine.step(t.make_batch(seed=s).select(rows), t.SFT) for s in range(3)]
out = Path(sys.argv[3])
engine.save(out)
if dist.get_rank() == 0:
    torch.save({"losses": [r.loss for r in reports], "norms": [r.grad_norm for r in reports],
                "tokens": reports[-1].tokens}, out / "reports.pt")
"""


@pytest.mark.stack
def test_two_data_parallel_ranks_equal_one(config, model, tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(RANK_SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    subprocess.run(
        [*command, __file__, model, str(tmp_path)],
        check=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    together = torch.load(tmp_path / "reports.pt", weights_only=True)
    engine = TorchEngine(config)
    reports = [engine.step(make_batch(seed=seed), SFT) for seed in range(3)]
    assert together["losses"] == pytest.approx([r.loss for r in reports], rel=1e-4)
    assert together["norms"] == pytest.approx([r.grad_norm for r in reports], rel=1e-3)
    assert together["tokens"] == reports[-1].tokens
