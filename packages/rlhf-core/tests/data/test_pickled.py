"""Batches and outputs on their way to another process."""

import copy
import pickle

import torch
from rlhf_core import Batch, ModelOutputs


def batch():
    ids = torch.arange(12).view(3, 4)
    return Batch(
        token_ids=ids,
        attention_mask=ids >= 0,
        response_mask=ids % 4 > 1,
        columns={
            "advantages": torch.randn(3, 4).bfloat16(),
            "scores": torch.randn(3),
            "hidden": torch.ones(3, 4, 2),
        },
        temperature=0.5,
        sample_ids=("a", "b", "c"),
    )


def same(one, other):
    assert (one.temperature, one.sample_ids, one.rows_per_unit) == (
        other.temperature,
        other.sample_ids,
        other.rows_per_unit,
    )
    for name in ("token_ids", "attention_mask", "response_mask"):
        assert torch.equal(getattr(one, name), getattr(other, name))
    assert list(one.columns) == list(other.columns)
    for name, column in one.columns.items():
        assert column.dtype == other[name].dtype
        assert torch.equal(column, other[name])


def test_a_batch_comes_back():
    one = batch()
    for protocol in (2, 5):
        same(pickle.loads(pickle.dumps(one, protocol=protocol)), one)
    same(copy.deepcopy(one), one)


def test_a_part_of_a_batch_is_sent_without_the_rest_of_it():
    whole = batch()
    view = Batch(
        token_ids=whole.token_ids[1:2, :3],
        attention_mask=whole.attention_mask[1:2, :3],
        response_mask=whole.response_mask[1:2, :3],
    )
    buffers = []
    sent = pickle.dumps(view, protocol=5, buffer_callback=buffers.append)
    assert sorted(len(buffer.raw()) for buffer in buffers) == [3, 3, 24]
    same(pickle.loads(sent, buffers=[buffer.raw().tobytes() for buffer in buffers]), view)


def test_what_was_received_may_be_written():
    buffers = []
    sent = pickle.dumps(batch(), protocol=5, buffer_callback=buffers.append)
    received = pickle.loads(sent, buffers=[buffer.raw().tobytes() for buffer in buffers])
    received["scores"].zero_()
    assert received["scores"].tolist() == [0.0, 0.0, 0.0]


def test_outputs_come_back_scalars_and_gradients_among_them():
    learned = torch.ones(2, requires_grad=True)
    found = pickle.loads(pickle.dumps(ModelOutputs(aux_loss=torch.tensor(3.0), scores=learned)))
    assert found.aux_loss == 3
    assert found.log_probs is None
    assert found.scores.requires_grad
    assert found.scores.tolist() == [1.0, 1.0]


def test_one_number_cut_out_of_a_matrix_is_sent():
    # A reward model's score of a single row: contiguous, since it is one number, and yet with the matrix's stride.
    column = torch.arange(16.0).view(1, 16)[:, 3]
    assert column.stride() == (16,)
    sent = pickle.loads(pickle.dumps(ModelOutputs(scores=column), protocol=5))
    assert sent.scores.tolist() == [3.0]


def test_nothing_is_sent():
    sent = pickle.loads(pickle.dumps(ModelOutputs(log_probs=torch.zeros(0, 4)), protocol=5))
    assert sent.log_probs.shape == (0, 4)
