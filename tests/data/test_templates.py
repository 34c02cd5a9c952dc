import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mmtrain.data.samples import IGNORE, IMAGE_POSITION, Sample
from mmtrain.data.templates import PlainTemplate
from mmtrain.errors import UserError


def caption(text: str, images: int = 1, question: str = "<image>\nDescribe what you see.") -> Sample:
    return Sample("k", "s.tar", (("human", question), ("gpt", text)), (b"",) * images)


@pytest.fixture
def tokenizer(tiny):
    return AutoTokenizer.from_pretrained(tiny / "llm")


def test_plain_is_images_then_caption_then_eos_with_labels_on_the_caption_and_eos(tokenizer):
    words = tokenizer("a red circle", add_special_tokens=False).input_ids
    document = PlainTemplate(tokenizer, tokens_per_image=3, vocab_size=320)(caption("a red circle", images=2))
    assert document.input_ids == (1, *[IMAGE_POSITION] * 6, *words, 2)
    assert document.labels == (*[IGNORE] * 6, *words, 2, IGNORE)


def test_plain_drops_the_words_of_the_human_turn(tokenizer):
    template = PlainTemplate(tokenizer, 3, 320)
    assert template(caption("x")).input_ids == template(caption("x", question="<image> Be brief.")).input_ids


def test_a_text_only_sample_is_text_alone(tokenizer):
    words = tokenizer("a red circle", add_special_tokens=False).input_ids
    document = PlainTemplate(tokenizer, 3, 320)(caption("a red circle", images=0, question="Say something."))
    assert document.input_ids == (1, *words, 2)
    assert document.labels == (*words, 2, IGNORE)


def test_a_tokenizer_that_adds_no_bos_gets_none(tokenizer):
    tokenizer.backend_tokenizer.post_processor = None
    document = PlainTemplate(tokenizer, 2, 320)(caption("x"))
    assert document.input_ids == (IMAGE_POSITION, IMAGE_POSITION, *tokenizer("x").input_ids, 2)


def test_shifted_labels_give_the_loss_that_transformers_computes_from_unshifted_ones(tiny, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(tiny / "llm")
    document = PlainTemplate(tokenizer, 3, 320)(caption("a red circle on a blue background.", images=0))
    input_ids = torch.tensor([document.input_ids])
    with torch.no_grad():
        stock = model(input_ids, labels=input_ids)
    ours = torch.nn.functional.cross_entropy(stock.logits[0], torch.tensor(document.labels), ignore_index=IGNORE)
    torch.testing.assert_close(ours, stock.loss)


def test_what_the_plain_template_cannot_hold_is_refused(tokenizer):
    template = PlainTemplate(tokenizer, 3, 320)
    talk = Sample("k", "s.tar", (("human", "a"), ("gpt", "b"), ("human", "c"), ("gpt", "d")), ())
    with pytest.raises(UserError, match=r"s\.tar: sample k: .* it has human, gpt, human, gpt"):
        template(talk)
    with pytest.raises(UserError, match="<image> in the caption"):
        template(caption("see <image>"))
    tokenizer.eos_token = None
    with pytest.raises(UserError, match=r"tokenizer of .*llm has none"):
        PlainTemplate(tokenizer, 3, 320)


def test_a_token_beyond_the_embedding_is_refused_before_the_model_sees_it(tokenizer):
    with pytest.raises(UserError, match=r"makes token \d+, but the model's embedding has 5 rows"):
        PlainTemplate(tokenizer, 3, 5)(caption("a red circle"))
