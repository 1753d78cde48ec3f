import math

import pytest
import torch
from rlhf_algos.losses.offline.sft import SFTConfig, sft
from rlhf_core import Batch, ConfigError, ModelOutputs

MASK = torch.tensor([[0, 1, 1], [0, 1, 0]]).bool()
LOG_PROBS = torch.tensor([[0, -1.0, -3.0], [0, -0.5, 0]])


def run(config, **columns):
    batch = Batch(
        token_ids=torch.zeros(2, 3, dtype=torch.long),
        attention_mask=torch.ones(2, 3, dtype=torch.bool),
        response_mask=MASK,
        columns=columns,
    )
    log_probs = LOG_PROBS.clone().requires_grad_()
    return log_probs, sft(ModelOutputs(log_probs=log_probs), batch, config)


def test_nll_by_hand():
    _, terms = run(SFTConfig())
    assert float(terms.total.detach()) == pytest.approx(4.5)
    assert float(terms.weight) == 3
    _, rows = run(SFTConfig(aggregation="seq_mean_token_mean"))
    assert float(rows.total.detach()) == pytest.approx(2.0 + 0.5)
    assert float(rows.weight) == 2


def test_dft_takes_the_probability_out_of_the_gradient():
    log_probs, terms = run(SFTConfig(loss="dft"))
    terms.total.backward()
    assert float(terms.total.detach()) == pytest.approx(math.exp(-1) + 3 * math.exp(-3) + 0.5 * math.exp(-0.5))
    torch.testing.assert_close(log_probs.grad, -LOG_PROBS.exp() * MASK)
    assert terms.metrics["sft_loss"].value == pytest.approx(1.5)


def test_token_weights():
    _, terms = run(SFTConfig(), token_weights=torch.tensor([[9, 0.5, 0.0], [9, 2.0, 9]]))
    assert float(terms.total.detach()) == pytest.approx(0.5 + 1.0)
    assert float(terms.weight) == 3


def test_refused():
    with pytest.raises(ConfigError, match="nll, dft"):
        SFTConfig(loss="ce")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="log_probs"):
        sft(ModelOutputs(), None, SFTConfig())  # type: ignore[arg-type]
