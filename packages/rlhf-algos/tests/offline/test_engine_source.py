from __future__ import annotations

import json
from dataclasses import replace

import pytest
from rlhf_algos import (
    CheckpointSection,
    DataSection,
    DataSource,
    EngineFactory,
    ModelSection,
    OfflineAlgorithmSection,
    OfflineConfig,
    OfflineEvaluationSection,
    OfflineTrainSection,
    OptimizerSection,
    TorchEngine,
    read_metrics,
    train,
)
from rlhf_core import ConfigError
from rlhf_core.testing.tiny import save_tiny_model


class SeamOnly:
    """A TrainEngine of which nothing but the protocol can be seen, as of one that lives elsewhere.

    Refuses a step with fewer units than ranks, as a group of ranks does.
    """

    opened = ()

    def __init__(self, config, ranks=1):
        self._inner, self._ranks = TorchEngine(config), ranks
        SeamOnly.opened = (*SeamOnly.opened, (config.role, config.optimizer is not None))

    def step(self, batch, loss):
        assert batch.units >= self._ranks
        return self._inner.step(batch, loss)

    def score(self, batch, outputs=("log_probs",)):
        return self._inner.score(batch, outputs)

    def save(self, path):
        self._inner.save(path)

    def load(self, path):
        self._inner.load(path)

    def export(self, path):
        self._inner.export(path)

    def close(self):
        self._inner.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), hidden_size=32)


@pytest.fixture
def config(tmp_path, model):
    rows = [{"prompt": f"{i}: ", "chosen": "yes" * (1 + i % 3), "rejected": "no"} for i in range(9)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = (DataSource(path=str(tmp_path / "pairs.jsonl")),)
    return OfflineConfig(
        model=ModelSection(path=model),
        data=DataSection(train=pairs),
        evaluation=OfflineEvaluationSection(data=pairs),
        output=tmp_path / "out",
        reference_cache=tmp_path / "references",
        train=OfflineTrainSection(batch_size=4, optimizer=OptimizerSection(learning_rate=3e-3, schedule="cosine")),
        tensorboard=False,
    )


def losses(config):
    return [row["loss"] for row in read_metrics(config.output / "metrics.jsonl")]


@pytest.mark.parametrize("method", ["dpo", "kto", "rm"])
def test_any_train_engine_gives_the_same_run(config, tmp_path, method):
    config = replace(config, algorithm=OfflineAlgorithmSection(name=method))
    train(config)
    elsewhere = replace(config, output=tmp_path / "elsewhere", reference_cache=tmp_path / "other-references")
    SeamOnly.opened = ()
    train(elsewhere, engines=EngineFactory(open=SeamOnly))
    assert losses(elsewhere) == losses(config)
    trained = ("reward" if method == "rm" else "policy", True)
    assert SeamOnly.opened == ((trained,) if method == "rm" else (("reference", False), trained))
    assert json.loads((elsewhere.output / "model" / "config.json").read_text())["pad_token_id"] is not None


def test_it_resumes_bit_for_bit(config, tmp_path):
    engines = EngineFactory(open=SeamOnly)
    train(config, engines=engines)
    stopped = replace(config, output=tmp_path / "stopped", checkpoint=CheckpointSection(every=1))

    class Killed(Exception):
        pass

    def kill(kind, step, values):
        if kind == "train" and step == 3:
            raise Killed

    with pytest.raises(Killed):
        train(stopped, engines=engines, on_event=kill)
    train(stopped, resume=True, engines=engines)
    assert losses(stopped) == losses(config)


def test_every_rank_behind_an_engine_gets_an_example(config):
    engines = EngineFactory(open=lambda engine_config: SeamOnly(engine_config, ranks=3), ranks=3)
    assert train(config, engines=engines).steps == 3  # 4, 4 and 1 + 2 examples
    with pytest.raises(ConfigError, match="fewer than the 5 processes"):
        train(replace(config, output=config.output / "b"), engines=EngineFactory(ranks=5))
    with pytest.raises(ConfigError, match="at least 1"):
        EngineFactory(ranks=0)


def test_an_engine_that_cannot_measure_needs_a_number(config):
    auto = replace(config, train=replace(config.train, max_tokens_per_micro_batch="auto"))
    with pytest.raises(ConfigError, match=r"SeamOnly cannot find out .* train\.max_tokens_per_micro_batch"):
        train(auto, engines=EngineFactory(open=SeamOnly))
