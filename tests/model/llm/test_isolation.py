"""No document of a pack reaches another one's loss: gradients through real layers are zero, not
merely small.
"""

import itertools

import pytest
import torch
from sweeps import sweep
from transformers import CONFIG_MAPPING

from mmtrain.data.samples.sample import IGNORE, IMAGE_POSITION, Document, Sample
from mmtrain.data.stream.packs import Pack, make_batch
from mmtrain.layouts.layout import Tiling
from mmtrain.model.llm.language import DecoderLayers, slice_of
from mmtrain.model.llm.tiny import VOCABULARY, tiny_model

PACK_LENGTH = 48  # tokens; windows are 8 (tiny.py), so documents of 20 reach beyond them
LAYERS = 4
ONE = Tiling(0, 0, 3)
FAMILIES = ["llama", "gemma2", "qwen2", "gpt2", "gpt_oss"]


def document(length: int, images: int, draw: torch.Generator) -> Document:
    """A document whose every token behind its images, three positions each, is supervised."""
    words = torch.randint(1, VOCABULARY, (length - 3 * images,), generator=draw).tolist()
    ids = [*[IMAGE_POSITION] * (3 * images), *words]
    labels = [*[IGNORE] * (3 * images), *words]
    return Document(
        Sample("k", "s.tar", (), (b"",) * images),
        tuple(ids),
        (*labels[1:], IGNORE),
        (ONE,) * images,
    )


def batch_of(lengths: tuple[int, ...], draw: torch.Generator):
    """A row with these documents, and a second row with them in reverse, as the data layer packs
    them.
    """
    rows = [
        [document(length, number % 2, draw) for number, length in enumerate(lengths)]
        for _ in range(2)
    ]
    packs = [Pack(tuple(rows[0])), Pack(tuple(reversed(rows[1])))]
    return make_batch(packs, PACK_LENGTH, decode=lambda *_: torch.zeros(1, 3, 2, 2))


@pytest.fixture(scope="module", params=sweep(FAMILIES, ("llama", "gpt_oss")))
def slices(request) -> list[DecoderLayers]:
    model = tiny_model(CONFIG_MAPPING[request.param](num_hidden_layers=LAYERS), seed=0)
    parts = [
        slice_of(model, 0, 2, embedding=True, head=False),
        slice_of(model, 2, LAYERS, embedding=False, head=True),
    ]
    parts[0].recompute(1)
    return parts


@pytest.mark.parametrize("lengths", [(20, 28), (20, 17), (9, 20, 11), (1, 30, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_documents_loss_has_no_gradient_in_any_other_documents_inputs(slices, dtype, lengths):
    draw = torch.Generator().manual_seed(0)
    batch = batch_of(lengths, draw)
    inputs = torch.randn(
        *batch.labels.shape, slices[0].hidden_size, generator=draw, dtype=torch.float32
    ).to(dtype)
    inputs.requires_grad_()
    hidden = inputs
    for part in slices:
        hidden = part.to(dtype)(hidden, batch.position_ids)
    logits = slices[-1].logits(hidden.flatten(0, 1)).unflatten(0, batch.labels.shape).float()
    for row, ordered in enumerate((lengths, lengths[::-1])):
        for begin, end in itertools.pairwise(itertools.accumulate(ordered, initial=0)):
            labels = batch.labels[row, begin:end]
            loss = torch.nn.functional.cross_entropy(
                logits[row, begin:end], labels, ignore_index=IGNORE, reduction="sum"
            )
            (gradient,) = torch.autograd.grad(loss, inputs, retain_graph=True)
            own = gradient[row, begin:end].clone()
            gradient[row, begin:end] = 0
            assert torch.equal(gradient, torch.zeros_like(gradient))
            # Its last token predicts nothing; every one before it is read by the loss.
            learnt = (labels != IGNORE).nonzero()
            last = int(learnt.max()) + 1 if len(learnt) else 0
            assert last == max(end - begin - 1, 0)
            assert (own[:last].abs().amax(-1) > 0).all() and torch.equal(
                own[last:], torch.zeros_like(own[last:])
            )


def test_the_check_sees_a_leak_where_positions_do_not_restart(slices):
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(1, 24, slices[0].hidden_size, generator=draw).requires_grad_()
    hidden = inputs
    for part in slices:
        hidden = part.float()(hidden, torch.arange(24)[None])
    loss = slices[-1].logits(hidden[0, 12:]).square().sum()
    (gradient,) = torch.autograd.grad(loss, inputs)
    assert (gradient[0, 8:12].abs().amax(-1) > 0).all()  # within the window of 8
