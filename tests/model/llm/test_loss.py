import weakref

import pytest
import torch
import torch.nn.functional as F

import mmtrain.model.llm.loss as loss_module
from mmtrain.data.samples.sample import IGNORE
from mmtrain.model.llm.loss import count_answers, loss_sum_and_predictions, supervised_loss_sum, supervised_places

VOCAB, WIDTH = 50, 8


@pytest.fixture
def case():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 20, WIDTH, generator=generator)
    labels = torch.randint(0, VOCAB, (2, 20), generator=generator)
    labels[torch.rand(2, 20, generator=generator) < 0.5] = IGNORE
    weight = torch.nn.Parameter(torch.randn(VOCAB, WIDTH, generator=generator))
    return hidden, labels, weight


def supervised(hidden, labels):
    places = supervised_places(labels)
    return hidden.flatten(0, 1)[places], labels.flatten()[places]


def run(hidden, labels, weight, trains_head):
    weight.requires_grad_(trains_head)
    rows, targets = supervised(hidden, labels)
    return supervised_loss_sum(rows, targets, lambda rows: F.linear(rows, weight), VOCAB, [weight])


def test_supervised_places_are_those_with_a_label_row_by_row():
    x = IGNORE
    assert supervised_places(torch.tensor([[x, 5, 0], [x, x, x], [7, x, 9]])).tolist() == [1, 2, 6, 8]
    assert supervised_places(torch.full((2, 3), x)).shape == (0,)


@pytest.mark.parametrize("rows_per_chunk", [1, 3, 1000])
@pytest.mark.parametrize("trains_head,trains_below", [(False, True), (True, True), (True, False)])
def test_sum_and_gradients_equal_torch_cross_entropy(case, monkeypatch, rows_per_chunk, trains_head, trains_below):
    monkeypatch.setattr(loss_module, "LOGITS_PER_CHUNK", rows_per_chunk * VOCAB)
    hidden, labels, weight = case
    ours, reference = (hidden.clone().requires_grad_(trains_below) for _ in range(2))
    total = run(ours, labels, weight, trains_head)
    (total * 0.25).backward()
    head_gradient, weight.grad = weight.grad, None
    expected = F.cross_entropy(F.linear(reference, weight).flatten(0, 1), labels.flatten(), reduction="sum")
    (expected * 0.25).backward()
    torch.testing.assert_close(total, expected.detach())
    if trains_below:
        torch.testing.assert_close(ours.grad, reference.grad)
    if trains_head:
        torch.testing.assert_close(head_gradient, weight.grad)
    else:
        assert head_gradient is None


def test_without_a_label_the_loss_is_zero_with_zero_gradients(case):
    hidden, labels, weight = case
    hidden.requires_grad_()
    total = run(hidden, torch.full_like(labels, IGNORE), weight, trains_head=True)
    assert total == 0
    total.backward()
    assert hidden.grad is not None and not hidden.grad.any()
    assert weight.grad is not None and not weight.grad.any()


@pytest.mark.parametrize("rows_per_chunk", [1, 3, 1000])
def test_predictions_are_the_arg_max_at_supervised_positions_in_order(case, monkeypatch, rows_per_chunk):
    monkeypatch.setattr(loss_module, "LOGITS_PER_CHUNK", rows_per_chunk * VOCAB)
    hidden, labels, weight = case
    with torch.no_grad():
        total, predicted = loss_sum_and_predictions(
            *supervised(hidden, labels), lambda rows: F.linear(rows, weight), VOCAB
        )
        logits = F.linear(hidden, weight)
    torch.testing.assert_close(total, F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"))
    assert torch.equal(predicted, logits.argmax(-1)[labels != IGNORE])


def test_answers_are_runs_of_labels_and_exact_if_every_token_is():
    x = IGNORE
    labels = torch.tensor([[x, 1, 2, 3, x, 4, x, x], [5, x, x, 6, 7, x, 8, 9]])
    #         answers: (1, 2, 3), (4), and in the next row, although nothing lies between, (5), (6, 7), (8, 9)
    for predicted, expected in (
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], [9, 5, 5]),
        ([1, 0, 3, 4, 5, 6, 7, 8, 0], [7, 5, 3]),
        ([0, 2, 3, 0, 0, 0, 7, 8, 0], [4, 5, 0]),
    ):
        assert count_answers(labels, torch.tensor(predicted)).tolist() == expected
    rows_that_touch = torch.tensor([[x, 1], [2, x]])
    assert count_answers(rows_that_touch, torch.tensor([1, 0])).tolist() == [1, 2, 1]
    nothing = torch.full((2, 3), x)
    assert count_answers(nothing, torch.empty(0, dtype=torch.int64)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("evaluates", [False, True])
def test_logits_never_outlive_a_chunk(case, monkeypatch, evaluates):
    monkeypatch.setattr(loss_module, "LOGITS_PER_CHUNK", 4 * VOCAB)
    hidden, labels, weight = case
    alive = []

    def logits_of(rows):
        assert rows.shape[0] <= 4
        assert all(reference() is None for reference in alive), "an earlier chunk's logits are still there"
        logits = F.linear(rows, weight)
        alive.append(weakref.ref(logits))
        return logits

    weight.requires_grad_(False)
    if evaluates:
        loss_sum_and_predictions(*supervised(hidden, labels), logits_of, VOCAB)
    else:
        supervised_loss_sum(*supervised(hidden.requires_grad_(), labels), logits_of, VOCAB, [weight])
    assert len(alive) == -(-int((labels != IGNORE).sum()) // 4)
    assert all(reference() is None for reference in alive)
