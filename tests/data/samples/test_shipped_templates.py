"""Templates that come with mmtrain, and those of a file of one's own: tokens, labels, refusals, and
where they count.

The reference is LLaVA's own: `Conversation.get_prompt`, `tokenizer_image_token`, `preprocess_v1`
and `preprocess_llama_2` (conversation.py, mm_utils.py, train.py), told again here on stock
tokenizers.
"""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from chat_styles import sentencepiece_like
from tokenizers import Tokenizer, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE
from untrained_runs import make_checkpoint

from mmtrain.__main__ import main
from mmtrain.base.errors import UserError
from mmtrain.checkpoint.resume import find_start
from mmtrain.checkpoint.run_folder import run_folder
from mmtrain.config.load import dump_config, load_config, restore_config
from mmtrain.config.schema import RunConfig
from mmtrain.config.templates import SHIPPED
from mmtrain.data.samples.sample import IGNORE, IMAGE_POSITION, Sample
from mmtrain.data.samples.templates import ChatTemplate, make_template
from mmtrain.facts.tokenizer_files import text_fingerprint
from mmtrain.layouts.square import Square

CONFIGS = Path(__file__).parents[3] / "configs"
CONVERSATIONS = {
    "images": (
        "<image>\nWhat is this?",
        "A red circle.",
        "And <image>\nthis?",
        "No, left\n of it.",
    ),
    "words": ("What is this? ", " A red circle ", "Tell them apart.", "1. A\n2. é", "Why?", "So."),
}
VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
LLAMA_2 = (
    "You are a helpful language and vision assistant. "
    "You are able to understand the visual content that the user provides, "
    "and assist the user with a variety of tasks using natural language."
)


def current() -> PreTrainedTokenizerFast:
    """As transformers 5 builds Vicuna's: a text begins with a space, what stands behind special
    tokens does not.
    """
    content = json.loads(sentencepiece_like().backend_tokenizer.to_str())
    tokenizer = Tokenizer.from_str(json.dumps(content | {"normalizer": None}))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="▁", prepend_scheme="first", split=False
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def prompt_of(name: str, texts) -> str:
    if name == "llava_v1":
        turns = (
            f"{('USER', 'ASSISTANT')[i % 2]}: {text}{(' ', '</s>')[i % 2]}"
            for i, text in enumerate(texts)
        )
        return f"{VICUNA} {''.join(turns)}"
    texts = [f"<<SYS>>\n{LLAMA_2}\n<</SYS>>\n\n{texts[0]}", *texts[1:]]
    turns = (
        f" {text} </s>" if i % 2 else f"<s>[INST] {text} [/INST]" for i, text in enumerate(texts)
    )
    return "".join(turns).lstrip("<s>")


def tokens_of(tokenizer, text: str) -> list[int]:
    """`tokenizer_image_token`: the pieces between images are tokenized apart."""
    first, *others = [tokenizer(piece).input_ids for piece in text.split("<image>")]
    return first + [token for piece in others for token in (IMAGE_POSITION, *piece[1:])]


def llava(name: str, tokenizer, texts, spaced_after_marks: bool) -> tuple[list[int], list[int]]:
    """input_ids and labels that are not shifted."""
    prompt = prompt_of(name, texts)
    ids = tokens_of(tokenizer, prompt)
    labels = [IGNORE if token == IMAGE_POSITION else token for token in ids]
    separator = {"llava_v1": " ASSISTANT: ", "llama_2": "[/INST] "}[name]
    at = 1
    labels[:at] = [IGNORE]
    for number, turn in enumerate(prompt.split("</s>")[:-1]):
        asked, _ = turn.split(separator)
        length, question = (
            len(tokens_of(tokenizer, turn)),
            len(tokens_of(tokenizer, asked + separator)) - 2,
        )
        if number and name == "llava_v1" and not spaced_after_marks:  # `not tokenizer.legacy`
            length, question = length - 1, question - 1
        labels[at : at + question] = [IGNORE] * question
        at += length
    assert at == len(ids), "tokenization mismatch"
    return ids, labels


def sample_of(texts) -> Sample:
    turns = tuple((("human", "gpt")[i % 2], text) for i, text in enumerate(texts))
    return Sample("k", "s.tar", turns, (b"",) * sum(text.count("<image>") for text in texts))


@pytest.mark.parametrize("make", [sentencepiece_like, current])
@pytest.mark.parametrize("talk", CONVERSATIONS)
@pytest.mark.parametrize("name", ["llava_v1", "llama_2"])
def test_tokens_and_labels_are_llavas(name, talk, make):
    texts, tokenizer = CONVERSATIONS[talk], make()
    document = make_template(name, tokenizer, Square(1), sys.maxsize)(sample_of(texts))
    ids, labels = llava(name, tokenizer, texts, spaced_after_marks=make is sentencepiece_like)
    # no stock processor tokenizes the pieces between images apart: that puts a space behind each
    if make is current:
        kept = [t for t in range(len(ids)) if t == 0 or ids[t - 1] != IMAGE_POSITION]
        ids, labels = [ids[t] for t in kept], [labels[t] for t in kept]
    assert list(document.input_ids) == ids
    assert list(document.labels) == [*labels[1:], IGNORE]


def test_the_recipe_for_smolvlm_writes_what_its_own_template_writes(make_tiny):
    config = load_config(CONFIGS / "smolvlm_256m_lora.yaml")
    tokenizer = make_tiny.make_tokenizer()
    tokenizer.add_tokens(["<|im_start|>", "<end_of_utterance>"], special_tokens=True)
    template = make_template(config.data.template, tokenizer, Square(1), 10**6)
    roles = {"human": "user", "gpt": "assistant"}
    for texts in CONVERSATIONS.values():
        turns = sample_of(texts).turns
        pieces = [
            (speaker, [piece for piece in re.split("(<image>)", text) if piece])
            for speaker, text in turns
        ]
        kinds = {"<image>": {"type": "image"}}
        messages = [
            {
                "role": roles[speaker],
                "content": [kinds.get(one, {"type": "text", "text": one}) for one in said],
            }
            for speaker, said in pieces
        ]
        written, spans = template.chat.write(turns)
        assert written == tokenizer.apply_chat_template(
            messages, chat_template=DEFAULT_CHAT_TEMPLATE, tokenize=False
        )
        assert all(written[begin:end].endswith("<end_of_utterance>") for begin, end in spans)


@pytest.mark.parametrize("name", ["llava_v1", "llama_2", "chatml"])
def test_a_system_turn_takes_the_place_of_the_default_and_bos_is_written_where_the_tokenizer_writes_it(
    name,
):
    tokenizer = sentencepiece_like()
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    talk = (
        ("system", "Be brief."),
        ("human", "Tell"),
        ("gpt", "No"),
        ("human", "Why"),
        ("gpt", "So"),
    )
    text, _ = make_template(name, tokenizer, Square(1), 10**6).chat.write(talk)
    assert (
        text
        == {
            "llava_v1": "<s>Be brief. USER: Tell ASSISTANT: No</s>USER: Why ASSISTANT: So</s>",
            "llama_2": "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nTell [/INST] No </s><s>[INST] "
            "Why [/INST] So </s>",
            "chatml": "<s><|im_start|>system\nBe "
            "brief.<|im_end|>\n<|im_start|>user\nTell<|im_end|>\n"
            "<|im_start|>assistant\nNo<|im_end|>\n<|im_start|>user\nWhy<|im_end|>\n<|im_start|>assistant\nSo<|im_end|>\n",
        }[name]
    )
    tokenizer.backend_tokenizer.post_processor = None  # as Qwen's, which adds none
    without, _ = make_template(name, tokenizer, Square(1), 10**6).chat.write(talk)
    assert without == text.replace("<s>", "")


def test_a_file_of_ones_own_makes_what_the_same_template_makes_as_the_tokenizers_own(
    tmp_path, tiny, make_tiny
):
    jinja = (SHIPPED / "llava_v1.jinja").read_text().replace("USER", "Asked")
    (tmp_path / "mine.jinja").write_text(jinja)
    config = load_config(tiny / "config.yaml", [f"data.template={tmp_path / 'mine.jinja'}"])
    tokenizer = make_tiny.make_tokenizer()
    of_file = make_template(config.data.template, tokenizer, Square(3), 10**6)
    tokenizer.chat_template = jinja
    own = ChatTemplate(tokenizer, Square(3), 10**6)
    for texts in CONVERSATIONS.values():
        assert of_file(sample_of(texts)) == own(sample_of(texts))
    assert "Asked: " in of_file.chat.write(sample_of(CONVERSATIONS["words"]).turns)[0]


@pytest.mark.parametrize(
    "jinja",
    [
        "{{ bos_token }}\t\r\n{% if é %} \n\n 'x' \"y\" # {{ '😀\\n' }}",
        "{{ 1 }}\n\x85\x85 \u2028x\n",
    ],
)
def test_the_text_of_a_file_stands_in_the_configuration_whatever_its_path(tmp_path, tiny, jinja):
    for name in ("a.jinja", "b.jinja"):
        (tmp_path / name).write_text(jinja, newline="")
    one, other = (
        load_config(tiny / "config.yaml", [f"data.template={tmp_path / n}"])
        for n in ("a.jinja", "b.jinja")
    )
    assert one == other and one.data.template == jinja
    (tmp_path / "dumped.yaml").write_text(dump_config(one))
    assert (
        load_config(tmp_path / "dumped.yaml")
        == one
        == restore_config(one.model_dump(mode="json"), "here")
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff{{", "cannot be read as text"),
        (b"A chat", "not a Jinja template of a conversation"),
        (b"{{ 1 }}\0", "no null character"),
        (b"{{" + b"x" * 100_000, "at most 100,000 characters"),
        (b"x" * 400_001, "larger than 400,000 bytes"),
    ],
)
def test_a_file_that_is_no_template_is_one_line(tmp_path, tiny, content, message):
    (tmp_path / "mine.jinja").write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        load_config(tiny / "config.yaml", [f"data.template={tmp_path / 'mine.jinja'}"])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            "vicuna",
            r"'vicuna' is not allowed; it should be 'plain', 'chat', 'llava_v1', .* FILE\.jinja: ",
        ),
        ("mine.j2", r"'mine\.j2' is not allowed; it should be 'plain', .* FILE\.jinja: "),
        ("a{b}/none.jinja", r"^a\{b\}/none\.jinja: no such file"),
        ("~nobody-here/none.jinja", "^~nobody-here/none.jinja: no such file"),
    ],
)
def test_what_names_no_template_is_told_what_does(tiny, given, message):
    with pytest.raises(UserError, match=message):
        load_config(tiny / "config.yaml", [f"data.template={given}"])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("chatml", "ends an answer with .*, which is no special end token"),
        (
            "{% for m in messages %}{{ ' ' + m.content }}{% endfor %}",
            "which is no special end token",
        ),
        (
            "{{ messages[0].content }}",
            r"^data.template=FILE.jinja: .* changes the text of a turn: "
            r".* Set data\.template=llava_v1, or plain for",
        ),
        ("{{ messages[0].content", "fails: unexpected end"),
    ],
)
def test_a_template_that_does_not_fit_is_refused(make_tiny, template, message):
    with pytest.raises(UserError, match=message):
        make_template(template, make_tiny.make_tokenizer(), Square(1), 10**6)


def test_text_lengths_are_of_one_template_and_of_one_text_of_it(tiny):
    folder, mine = tiny / "llm", "{{ messages[0].content }}"
    found = [
        text_fingerprint(folder, one)
        for one in ("plain", "chat", "llava_v1", "chatml", mine, mine + " ")
    ]
    assert len(set(found)) == 6
    assert text_fingerprint(folder, mine) == found[4]


def test_commands_take_a_file_and_an_index_is_of_its_text(tiny, tmp_path, capsys):
    shutil.copy(min((tiny / "shards").glob("*.tar")), tmp_path)
    file = tmp_path / "mine.jinja"
    file.write_text((SHIPPED / "llava_v1.jinja").read_text().replace("USER", "Asked"))
    reading = ["index", str(tiny / "config.yaml"), str(tmp_path), "--workers", "1"]
    command = [*reading, f"data.template={file}"]
    assert main(command) == 0
    assert f"of {tiny / 'llm'}, FILE.jinja" in capsys.readouterr().out
    assert main(command) == 0
    assert "1 of 1 shards are ready" in capsys.readouterr().out
    file.write_text("{#- changed -#}\n" + file.read_text())
    assert main(command) == 0
    assert "are ready" not in capsys.readouterr().out
    for wrong, message in (("poem", "data.template"), ("x.jinja", "no such file")):
        assert main([*reading, f"data.template={wrong}"]) == 2
        assert message in capsys.readouterr().err


def test_a_run_goes_on_with_the_text_of_its_template_whatever_the_file_is_called(tiny, tmp_path):
    def configured(name: str) -> RunConfig:
        return load_config(
            tiny / "config.yaml", [f"run.dir={tmp_path}", f"data.template={tmp_path / name}"]
        )

    for name in ("a.jinja", "b.jinja"):
        (tmp_path / name).write_text("{{ 'one' }}" + 200 * ".")
    config = configured("a.jinja")
    make_checkpoint(run_folder(config), config)
    for name in ("config.yaml", "plan.json"):
        (run_folder(config) / name).touch()
    assert find_start(configured("b.jinja")).checkpoint.config.data.template.startswith(
        "{{ 'one' }}"
    )
    (tmp_path / "b.jinja").write_text("{{ 'one' }}" + 200 * "." + "new")
    with pytest.raises(UserError, match=r"data\.template: was \".*\.\", is now \".*\.new\""):
        find_start(configured("b.jinja"))
