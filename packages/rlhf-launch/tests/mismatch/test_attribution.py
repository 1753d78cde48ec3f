"""Each cause of a log-prob mismatch, planted and found."""

from dataclasses import replace

import pytest
import torch
from rich.console import Console
from rlhf_algos import TorchEngine
from rlhf_core import EngineConfig, GenerationRequest, LogProbMeaning, RolloutConfig, SamplingConfig, collate
from rlhf_core.testing.tiny import byte_tokenizer, save_tiny_model
from rlhf_launch.mismatch.attribution import Gap, Scored, check_tokens, diagnose, readings
from rlhf_launch.mismatch.run import check_mismatch, forward_of
from rlhf_launch.samples.prompts import Prompt
from rlhf_launch.samples.sampling import trajectories_of
from rlhf_rollout import TransformersBackend
from typer.testing import CliRunner

PROMPT = Prompt(prompt_id="0", text="1+1=", token_ids=(20, 15, 20, 33))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("other"), seed=9)


@pytest.fixture(scope="module")
def trainer(folder):
    engine = TorchEngine(EngineConfig(model=str(folder / "policy")))
    yield engine
    engine.close()


@pytest.fixture
def sample():
    """Trajectories of a Transformers backend, drawn with the settings that are given."""

    def sample(model, *, dtype="float32", **settings):
        import asyncio

        backend = TransformersBackend(RolloutConfig(model=str(model), dtype=dtype, max_model_len=128))
        sampling = SamplingConfig(max_tokens=24, **settings)
        request = GenerationRequest(
            request_id="0", prompt_token_ids=PROMPT.token_ids, sampling=sampling, n=8, seed=1
        )
        result = asyncio.run(backend.generate(request))
        backend.close()
        return trajectories_of(PROMPT, result), sampling

    return sample


@pytest.fixture
def examine(folder, trainer):
    """The diagnosis of trajectories whose stated log-probs may be wrong."""

    def examine(trajectories, sampling, *, dtype="float32", trained=None, **evidence):
        logits = {False: forward_of(str(folder / "policy"), "float32")}
        if dtype != "float32":
            logits[True] = forward_of(str(folder / "policy"), dtype)
        batch = collate(trajectories)
        flat = [p for t in trajectories for p, m in zip(t.rollout_log_probs, t.response_mask, strict=True) if m]
        scored = Scored(
            sampler=torch.tensor(flat),
            trainer=trainer.score(batch).log_probs[batch.response_mask],
            readings=readings(trajectories, sampling, logits),
        )
        rows = trained or [t.token_ids for t in trajectories]
        tokens = check_tokens(byte_tokenizer(), trajectories, rows)
        return diagnose(scored, tokens=tokens, **evidence)

    return examine


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_agreement_in_float32_is_below_one_in_ten_thousand(folder, sample, examine, temperature):
    diagnosis = examine(*sample(folder / "policy", temperature=temperature))
    assert diagnosis.causes == []
    assert diagnosis.gap.largest < 1e-4
    assert diagnosis.trainer_error.largest < 1e-4


def test_log_probs_that_ignore_the_temperature(folder, sample, examine):
    trajectories, sampling = sample(folder / "policy", temperature=1.0)
    # Raw log-probs that claim to be those of the temperature that was sampled at.
    claimed = [replace(t, meaning=LogProbMeaning(temperature=0.6)) for t in trajectories]
    diagnosis = examine(claimed, replace(sampling, temperature=0.6))
    assert diagnosis.causes == ["temperature"]
    assert diagnosis.gap.mean > 0.1
    assert diagnosis.unexplained.largest < 1e-4


@pytest.mark.parametrize("truncation", [{"top_p": 0.7}, {"top_k": 20}, {"min_p": 0.2}], ids=str)
def test_truncation(folder, sample, examine, truncation):
    diagnosis = examine(*sample(folder / "policy", **truncation))
    assert diagnosis.causes == ["truncation"]
    assert diagnosis.gap.mean > 0.05
    assert diagnosis.unexplained.largest < 1e-4


def test_temperature_and_truncation_together(folder, sample, examine):
    trajectories, sampling = sample(folder / "policy", temperature=0.6, top_k=20)
    claimed = [replace(t, meaning=LogProbMeaning()) for t in trajectories]
    assert examine(claimed, sampling).causes == ["temperature", "truncation"]


def test_precision(folder, sample, examine):
    trajectories, sampling = sample(folder / "policy", dtype="bfloat16")
    diagnosis = examine(trajectories, sampling, dtype="bfloat16")
    assert diagnosis.causes == ["precision"]
    assert diagnosis.gap.mean > 1e-3


def test_precision_and_truncation_together(folder, sample, examine):
    trajectories, sampling = sample(folder / "policy", dtype="bfloat16", top_k=20)
    assert examine(trajectories, sampling, dtype="bfloat16").causes == ["truncation", "precision"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_weights(other, sample, examine, dtype):
    trajectories, sampling = sample(other, dtype=dtype, temperature=0.8)
    diagnosis = examine(trajectories, sampling, dtype=dtype)
    assert diagnosis.causes == ["weights"]
    assert diagnosis.unexplained.mean > 0.5


def test_an_older_version_is_named_even_if_the_numbers_agree(folder, sample, examine):
    assert examine(*sample(folder / "policy"), versions_differ=True).causes == ["weights"]


def test_re_tokenised_text(folder, sample, examine):
    trajectories, sampling = sample(folder / "policy")
    tokenizer = byte_tokenizer()
    trained = [
        [*PROMPT.token_ids, *tokenizer(tokenizer.decode(list(t.response_token_ids)))["input_ids"]]
        for t in trajectories
    ]
    # What the sampler said of its tokens, beside what the trainer makes of others.
    shuffled = [
        replace(t, rollout_log_probs=tuple(p and p - 1.0 for p in t.rollout_log_probs)) for t in trajectories
    ]
    diagnosis = examine(shuffled, sampling, trained=trained)
    assert diagnosis.causes == ["re-tokenisation"]
    assert "8 of 8" in diagnosis.findings[-1].detail


def test_text_that_survives_is_not_counted(sample, folder):
    trajectories, _ = sample(folder / "policy")
    plain = replace(
        trajectories[0],
        token_ids=(20, *byte_tokenizer()("fine")["input_ids"]),
        response_mask=(False, True, True, True, True),
        rollout_log_probs=(0.0,) * 5,
        weight_versions=(-1, 0, 0, 0, 0),
    )
    check = check_tokens(byte_tokenizer(), [plain], [plain.token_ids])
    assert (check.samples, check.changed, check.fragile) == (1, 0, 0)


def test_gap_of_nothing():
    assert Gap.between(torch.zeros(0), torch.zeros(0)) == Gap(mean=0.0, largest=0.0, tokens=0)


# ---------------------------------------------------------------- the whole check


def test_the_check_of_a_healthy_run(settings, make_config):
    report = check_mismatch(make_config(settings), prompts=2, console=Console(quiet=True))
    assert report.diagnosis.causes == []
    assert report.diagnosis.gap.largest < 1e-4
    assert report.after_sync.largest < 1e-4
    assert report.samples == 8


def test_a_sync_mends_wrong_weights_and_shows_it(settings, other, tmp_path):
    import yaml
    from rlhf_launch.cli.main import app

    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    result = CliRunner().invoke(app, ["doctor", "mismatch", str(path), "--prompts", "2", "--sampler-model", other])
    assert result.exit_code == 0
    weights = next(line for line in result.output.splitlines() if line.strip().startswith("weights"))
    assert "yes" in weights
    assert "after a weight sync" in result.output


def test_a_missing_sampler_model(settings, make_config):
    from rlhf_core import ConfigError

    with pytest.raises(ConfigError, match="--sampler-model"):
        check_mismatch(make_config(settings), prompts=2, sampler_model="./nowhere")
