"""Held-out scores, the control and the written answers are those of a stock LLaVA, whatever the
layout.
"""

from __future__ import annotations

import io
import json
import random
import shutil
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image
from ranks import run_ranks
from scenes import (
    IMAGE_SIZE,
    IMAGE_TOKEN,
    TOKENS_PER_IMAGE,
    join,
    make_config,
    make_engine,
    save_parts,
    stock_llava,
)
from tiers import nightly
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlavaForConditionalGeneration, PreTrainedTokenizerFast

from mmtrain.base.errors import UserError
from mmtrain.data.samples.sample import IGNORE
from mmtrain.data.stream.images import image_transform
from mmtrain.data.stream.loader import PackedBatches
from mmtrain.data.stream.packs import Pack
from mmtrain.plan.instructions import Op
from mmtrain.training.console import Console
from mmtrain.training.evaluations import Evaluations
from mmtrain.training.held_out import HeldOut, permute_images

EOS = 110  # a token that the stock model, with these weights, says after many of the images
PACK_LENGTH = 32


@dataclass(frozen=True)
class Held:
    """One held-out sample as the test made it."""

    key: str
    question: str
    caption: tuple[int, ...]
    pngs: tuple[bytes, ...]

    @property
    def prompt(self) -> list[int]:
        return [IMAGE_TOKEN] * (TOKENS_PER_IMAGE * len(self.pngs))

    @property
    def truth(self) -> list[int]:
        return [*self.caption, EOS]


@dataclass(frozen=True)
class Scene:
    folder: Path
    samples: tuple[Held, ...]
    model: LlavaForConditionalGeneration

    def pixels(self, pngs: Sequence[bytes]) -> torch.Tensor | None:
        transform = image_transform(str(self.folder / "vision"))
        fitted = [transform.fitted(Image.open(io.BytesIO(png))) for png in pngs]
        return transform.normalise(torch.stack(fitted)) if pngs else None


def stock_logits(model, ids, pixels):
    with torch.no_grad():
        return (
            model(input_ids=torch.tensor([ids]), pixel_values=pixels, use_cache=False)
            .logits[0]
            .float()
        )


def stock_says(
    scene: Scene, sample: Held, limit: int, prompt: Sequence[int] | None = None
) -> list[int]:
    """Greedy decoding by the stock model, one full forward a token; its image mark, fed back, would
    want an image.
    """
    ids, pixels = list(prompt or sample.prompt), scene.pixels(sample.pngs)
    said: list[int] = []
    while not (said and said[-1] in (EOS, IMAGE_TOKEN)) and len(said) < limit:
        said.append(int(stock_logits(scene.model, ids + said, pixels)[-1].argmax()))
    return said


def png(draw: random.Random) -> bytes:
    stream = io.BytesIO()
    Image.frombytes("RGB", (IMAGE_SIZE, IMAGE_SIZE), draw.randbytes(3 * IMAGE_SIZE**2)).save(
        stream, "PNG"
    )
    return stream.getvalue()


def write_shard(path: Path, samples: Sequence[Held]) -> None:
    with tarfile.open(path, "w") as tar:
        for s in samples:
            turns = [("human", s.question), ("gpt", " ".join(f"w{token}" for token in s.caption))]
            record = {
                "conversations": [{"from": speaker, "value": text} for speaker, text in turns]
            }
            files = [("json", json.dumps(record).encode())]
            files += [
                (f"{n}.png" if len(s.pngs) > 1 else "png", content)
                for n, content in enumerate(s.pngs)
            ]
            for suffix, content in files:
                add(tar, f"{s.key}.{suffix}", content)


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


@pytest.fixture(scope="module")
def scene(tmp_path_factory) -> Scene:
    """28 samples: captions that the stock model would say itself, ones with a wrong token, and ones
    that end early.
    """
    folder = tmp_path_factory.mktemp("evaluation")
    save_parts(folder)
    words = {f"w{token}": token for token in range(IMAGE_TOKEN)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=f"w{EOS}").save_pretrained(
        folder / "llm"
    )
    facts = {"image_mean": [0.5] * 3, "image_std": [0.25] * 3}
    (folder / "vision" / "preprocessor_config.json").write_text(json.dumps(facts))

    scene = Scene(folder, (), stock_llava(folder, seed=0))
    draw = random.Random(0)
    samples: list[Held] = []
    while len(samples) < 28:
        number = len(samples)
        images = {5: 3, 10: 0}.get(number, 2 if number % 8 == 3 else 1)
        pngs = tuple(png(draw) for _ in range(images))
        sample = Held(f"{number:06d}", "<image>\n" * images + f"What is in {number}?", (), pngs)
        if images == 0:
            samples.append(replace(sample, caption=(7, 8, 9)))
            continue
        if number % 3 == 0:
            said = stock_says(scene, sample, 9)
            if said[-1] != EOS or len(said) == 1:
                continue
            caption = said[:-1]
        else:
            said = stock_says(scene, sample, 30)
            caption = said[: 2 + number % 5]
            if IMAGE_TOKEN in said or EOS in caption:  # a caption of words alone
                continue
            if number % 3 == 1:
                caption[-1] = 1 + caption[-1] % 100
        samples.append(replace(sample, caption=tuple(caption)))
    (folder / "held").mkdir()
    write_shard(folder / "held" / "a.tar", samples[:18])
    write_shard(folder / "held" / "b.tar", samples[18:])
    return replace(scene, samples=tuple(samples))


@dataclass(frozen=True)
class Expected:
    loss: float
    token_accuracy: float
    exact_match: float
    answers: int


def stock_scores(scene: Scene, samples: Sequence[Held]) -> Expected:
    """Each sample on its own through the stock model."""
    loss, correct, exact = 0.0, 0, 0
    tokens = 0
    for sample in samples:
        ids = [*sample.prompt, *sample.truth]
        logits = stock_logits(scene.model, ids, scene.pixels(sample.pngs))
        # the first token of all is never predicted
        truth = torch.tensor(ids[max(len(sample.prompt), 1) :])
        said = logits[len(ids) - len(truth) - 1 : -1]
        loss += float(F.cross_entropy(said, truth, reduction="sum"))
        hits = said.argmax(-1) == truth
        correct, exact, tokens = (
            correct + int(hits.sum()),
            exact + bool(hits.all()),
            tokens + len(truth),
        )
    return Expected(loss / tokens, correct / tokens, exact / len(samples), len(samples))


def config_of(scene: Scene, pipeline: int = 1, data: int = 1, **overrides):
    fixed = {
        "parallel__pipeline": pipeline,
        "parallel__data": data,
        "data__shards": str(scene.folder / "held" / "*.tar"),
        "data__pack_length": PACK_LENGTH,
        "data__workers": 0,
        "eval__shards": str(scene.folder / "held" / "*.tar"),
    }
    return make_config(scene.folder, **(fixed | overrides))


class Shown(Console):
    """Prints nothing, and keeps how far evaluations are."""

    def __init__(self):
        super().__init__(None, max_steps=1)
        self.progress = []

    def evaluating(self, done, total):
        self.progress.append((done, total))


def build(config):
    engine = make_engine(config)
    mine = engine.plan.ranks[engine.global_rank]
    packed = PackedBatches(config, mine.data, engine.plan.data) if mine.pipeline == 0 else None
    held_out, console = None if packed is None else HeldOut(packed), Shown()
    evaluations = Evaluations(config.eval, engine, held_out, None, console, None)
    return engine, None if packed is None else iter(packed), evaluations, console.progress


def change(constants):
    """Change constants of mmtrain in this rank's process."""
    for name, value in constants.items():
        pytest.MonkeyPatch().setattr(f"mmtrain.training.{name}", value)


SHORT_ROUNDS = {"evaluations.EVALUATION_ROUND": 1}  # several for the little there is


def evaluate(configs, questions, constants=None):
    """One rank's part (called by run_ranks): per config scores, control, answers, progress."""
    change(constants or {})
    results = []
    for config in configs:
        _, _, evaluations, shown = build(config)
        scores, control = evaluations.scores(), evaluations.scores(permuted=True)
        results.append((scores, control, evaluations.answers(questions), shown, evaluations.extent))
    return results


def close_to(scores, expected: Expected, samples: int) -> None:
    assert scores.loss == pytest.approx(expected.loss, rel=1e-5)
    assert (scores.token_accuracy, scores.exact_match) == (
        expected.token_accuracy,
        expected.exact_match,
    )
    assert (scores.answers, scores.samples) == (expected.answers, samples)


def without_seconds(scores):
    return replace(scores, seconds=0.0)


@pytest.fixture(scope="module")
def permuted(scene) -> list[Held]:
    """The images rotated by hand: half of those with as many images further on, in the order that
    packs have them.
    """
    packed = PackedBatches(config_of(scene), 0, 1)
    order = [document.sample.key for pack in HeldOut(packed).packs for document in pack.entries]
    samples = sorted(scene.samples, key=lambda sample: order.index(sample.key))
    result = []
    for sample in samples:
        group = [other for other in samples if len(other.pngs) == len(sample.pngs)]
        other = group[(group.index(sample) + max(1, len(group) // 2)) % len(group)]
        result.append(replace(sample, pngs=other.pngs))
    return result


@pytest.mark.parametrize(("pipeline", "data"), [(1, 2), nightly(2, 2), nightly(4, 1)])
def test_scores_control_and_answers_are_those_of_a_stock_llava(scene, permuted, pipeline, data):
    whole = config_of(scene, pipeline, data)
    pairs = config_of(scene, pipeline, data, train__packs_per_microbatch=2)
    by_rank = run_ranks(pipeline * data, evaluate, [whole, pairs], 12, SHORT_ROUNDS)

    expected, control = stock_scores(scene, scene.samples), stock_scores(scene, permuted)
    assert 0.2 < expected.exact_match < 0.8 and control.exact_match < expected.exact_match
    for result in (result for rank in by_rank for result in rank):
        close_to(result[0], expected, 28)
        close_to(result[1], control, 28)
        assert result[4].permuted == 26, "not the ones with 0 and with 3 images"
    for first, second in by_rank:
        assert without_seconds(first[0]) == without_seconds(by_rank[0][0][0]), (
            "the same on every rank"
        )
        assert without_seconds(second[0]) == without_seconds(by_rank[0][1][0])
        total = first[3][-1][0]
        assert first[3][0] == (0, total) and first[3][-1] == (total, total) and len(first[3]) > 4, (
            "several rounds"
        )

    questions = [scene.samples[i] for i in asked_in(by_rank[0][0][2])]
    assert len({q.key for q in questions}) == 12
    for place, rank in enumerate(by_rank):
        for result in rank:
            check_answers(scene, questions, result[2]) if place < data else check_answers(
                scene, [], result[2]
            )


def stop_on_the_way(config, at):
    """The last rank is asked to stop in round `at` of scores, then of answers; all take a step
    after that.
    """
    change(SHORT_ROUNDS)
    join()
    mine = dist.get_rank() == dist.get_world_size() - 1
    found = []
    for questions in (0, 12):
        engine, batches, evaluations, _ = build(config)
        rounds = []

        def listen(step, instruction, engine=engine, rounds=rounds):
            if instruction.op is Op.REDUCE_STATISTICS:
                rounds.append(instruction)
                if mine and len(rounds) == at:
                    engine.request_stop()

        engine.on_instruction = listen
        outcome = evaluations.answers(questions) if questions else evaluations.scores()
        found.append((outcome, len(rounds), engine.requested_stop, engine.train_step(batches).loss))
    return found


def test_a_request_to_stop_ends_scores_and_answers_on_every_rank_in_the_same_round(scene):
    by_rank = run_ranks(4, stop_on_the_way, config_of(scene, 2, 2), 2)
    ((none, rounds, stopped, loss), (answers, tokens, stopped_too, _)) = by_rank[0]
    assert none is None and answers == [] and stopped and stopped_too
    assert rounds == tokens == 2
    assert loss > 0 and all(found == by_rank[0] for found in by_rank), "all are in step after it"


def asked_in(answers):
    return [int(answer.key) for answer in answers]


def check_answers(scene, questions, answers):
    """The stock model's own words, ended by EOS, 16 tokens beyond the truth, or the pack's end."""
    assert [answer.key for answer in answers] == [question.key for question in questions]
    ends = set()
    for question, answer in zip(questions, answers, strict=True):
        room = PACK_LENGTH + 1 - len(question.prompt)
        said = stock_says(scene, question, min(len(question.truth) + 16, room))
        words = lambda tokens: " ".join(f"w{token}" for token in tokens if token != EOS)  # noqa: E731
        assert answer.given == words(said)
        assert answer.truth == words(question.caption)
        assert answer.question == f"What is in {int(question.key)}?"
        assert answer.right == (said == question.truth)
        ends.add("EOS" if said[-1] == EOS else "limit")
    if questions:
        assert {answer.right for answer in answers} == {True, False} and ends == {"EOS", "limit"}


CHAT = (
    "{% for m in messages %}{{ 'w1 ' + m.content + ' w2 ' if m.role == 'user' else 'w3 ' + "
    "m.content + ' w110 ' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'w3 ' }}{% endif %}"
)


def test_of_a_conversation_every_answer_is_scored_and_the_first_question_is_asked(scene, tmp_path):
    for name in ("llm", "vision"):
        shutil.copytree(scene.folder / name, tmp_path / name)
    (tmp_path / "llm" / "chat_template.jinja").write_text(CHAT)
    talks = []
    for number, sample in enumerate(
        s for s in scene.samples if len(s.pngs) == 1 and EOS not in s.caption
    ):
        ids = [1, *sample.prompt, 5, 6, 2, 3]
        said = int(stock_logits(scene.model, ids, scene.pixels(sample.pngs))[-1].argmax())
        if said not in (EOS, IMAGE_TOKEN) and len(talks) < 6:
            talks.append((replace(sample, caption=(said, 9)), ids, (20 + number, said)))
    with tarfile.open(tmp_path / "talks.tar", "w") as tar:
        for sample, _, second in talks:
            words = [
                " ".join(f"w{token}" for token in caption) for caption in (sample.caption, second)
            ]
            texts = ["<image>\nw5 w6", words[0], "w7 <image>", words[1]]
            turns = [
                {"from": ("human", "gpt")[n % 2], "value": text} for n, text in enumerate(texts)
            ]
            add(tar, f"{sample.key}.json", json.dumps({"conversations": turns}).encode())
            for n, content in enumerate((sample.pngs[0], talks[0][0].pngs[0])):
                add(tar, f"{sample.key}.{n}.png", content)
    config = config_of(scene, 2, 1, eval__shards=str(tmp_path / "talks.tar"), data__template="chat")
    config = config.model_copy(update={"model": make_config(tmp_path).model})
    ((scores, _, answers, _, _), *_), _ = run_ranks(2, evaluate, [config], 3)

    loss, correct, exact = 0.0, 0, 0
    for sample, prompt, second in talks:
        later = [*prompt, *sample.caption, EOS, 1, 7, *[IMAGE_TOKEN] * TOKENS_PER_IMAGE, 2, 3]
        both = (*sample.pngs, talks[0][0].pngs[0])
        for before, truth, pngs in (
            (prompt, [*sample.caption, EOS], sample.pngs),
            (later, [*second, EOS], both),
        ):
            logits = stock_logits(scene.model, [*before, *truth], scene.pixels(pngs))[
                len(before) - 1 : -1
            ]
            loss += float(F.cross_entropy(logits, torch.tensor(truth), reduction="sum"))
            hits = logits.argmax(-1) == torch.tensor(truth)
            correct, exact = correct + int(hits.sum()), exact + bool(hits.all())
    close_to(scores, Expected(loss / 36, correct / 36, exact / 12, 12), samples=6)
    asked = {talk[0].key: talk for talk in talks}
    assert len({answer.key for answer in answers}) == 3
    for answer in answers:
        sample, prompt, _ = asked[answer.key]
        said = stock_says(scene, sample, 3 + 16, prompt)
        assert answer.question == "w5 w6" and answer.truth == f"w{sample.caption[0]} w9"
        assert (
            answer.given.split()
            == [f"w{token}" for token in said if token != EOS][: PACK_LENGTH + 1 - len(prompt)]
        )


def test_the_control_permutes_images_and_nothing_else(scene):
    held_out = HeldOut(PackedBatches(config_of(scene), 0, 1))
    packs, permuted = permute_images(held_out.packs)
    pairs = [
        (one, other)
        for before, after in zip(held_out.packs, packs, strict=True)
        for one, other in zip(before.entries, after.entries, strict=True)
    ]
    for one, other in pairs:
        assert (one.input_ids, one.labels) == (other.input_ids, other.labels)
        assert replace(one.sample, images=()) == replace(other.sample, images=())
        assert len(one.sample.images) == len(other.sample.images)
    assert sum(one.sample.images != other.sample.images for one, other in pairs) == permuted == 26
    before, after = (
        sorted(image for pair in pairs for image in pair[i].sample.images) for i in (0, 1)
    )
    assert before == after, "each image is still used once"
    listed_twice = [one for one, _ in pairs if len(one.sample.images) == 1][:4] * 2
    assert permute_images([Pack((document,)) for document in listed_twice])[1] == 8


def test_an_answer_without_an_end_is_cut_after_64_tokens(scene):
    config = config_of(scene)
    ((_, _, answers, *_),) = run_ranks(1, evaluate, [config], 12, {"answers.LONGEST_ANSWER": 3})[0]
    lengths = {len(answer.given.split()) for answer in answers}
    assert max(lengths) == 3 and all(len(answer.truth.split()) <= 4 for answer in answers)
    cut = [answer for answer in answers if answer.truth.endswith(" ...")]
    assert any(answer.right for answer in cut), "as far as it was written"


def test_replicas_share_the_packs_and_are_filled_up_with_empty_ones(scene):
    config = config_of(scene, data=3, train__packs_per_step=6, train__packs_per_microbatch=2)
    replicas = [HeldOut(PackedBatches(config, replica, 3)) for replica in range(3)]
    shares = [held_out.share(held_out.packs) for held_out in replicas]
    assert len({len(share) for share in shares}) == 1
    assert all(len(microbatch) == 2 for share in shares for microbatch in share)
    together = [pack for share in shares for microbatch in share for pack in microbatch]
    count = len(replicas[0].packs)
    assert together[:count] == replicas[0].packs
    assert all(pack.entries == () for pack in together[count:])
    few = [held_out.share(held_out.packs[:1]) for held_out in replicas]
    assert [[len(members.entries) > 0 for members in share[0]] for share in few] == [
        [True, False],
        [False, False],
        [False, False],
    ]
    empty = next(replicas[2].batches(few[2]))
    assert empty.tiles is None and empty.samples == 0 and bool((empty.labels == IGNORE).all())


def test_the_first_samples_in_shard_order_are_held_out_and_longer_ones_counted(scene):
    first = HeldOut(PackedBatches(config_of(scene, eval__max_samples=7), 0, 1))
    assert sorted(document.sample.key for document in first.documents) == [
        f"{n:06d}" for n in range(7)
    ]
    assert "; 21 beyond eval.max_samples left out" in first.extent.summary
    whole = HeldOut(PackedBatches(config_of(scene, eval__max_samples=None), 0, 1)).extent
    assert (whole.samples, whole.beyond) == (28, 0) and "beyond" not in whole.summary
    short = HeldOut(PackedBatches(config_of(scene, data__pack_length=13), 0, 1))
    longer = sum(len(sample.prompt) + len(sample.truth) > 13 for sample in scene.samples)
    assert (short.extent.overlong, short.extent.samples) == (longer, 28 - longer) and longer > 0
    assert f"{28 - longer} held-out samples" in short.extent.summary
    assert f"; {longer} too long for a pack left out" in short.extent.summary


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"eval__shards": "nowhere.tar"}, r"^eval\.shards: no file nowhere\.tar$"),
        (
            {"eval__shards": None, "eval__fraction": 1e-9},
            r"^eval\.fraction: none of 1 usable samples is held out\. Set 0\.5, ",
        ),
        (
            {},
            r"^eval\.shards: none of 27 held-out samples can be used: "
            r"0 are damaged, .* data\.pack_length=",
        ),
        (
            {"data__overlong": "refuse"},
            r"^eval\.shards: .*long\.tar: sample 00000\d: \d+ tokens and ",
        ),
    ],
)
def test_wrong_held_out_shards_are_named(scene, tmp_path, overrides, message):
    shortest = min(scene.samples, key=lambda sample: len(sample.prompt) + len(sample.truth))
    write_shard(tmp_path / "short.tar", [shortest])
    write_shard(
        tmp_path / "long.tar", [sample for sample in scene.samples if sample is not shortest]
    )
    shards = {
        "data__shards": str(tmp_path / "short.tar"),
        "eval__shards": str(tmp_path / "long.tar"),
    }
    length = len(shortest.prompt) + len(shortest.truth)
    with pytest.raises(UserError, match=message):
        HeldOut(
            PackedBatches(
                config_of(scene, **({"data__pack_length": length} | shards | overrides)), 0, 1
            )
        )


def test_samples_that_the_template_cannot_hold_are_named_where_none_of_the_others_is_held_out(
    scene, tmp_path
):
    path, turns = (
        tmp_path / "talk.tar",
        [{"from": speaker, "value": "w7"} for speaker in ("human", "gpt")],
    )
    with tarfile.open(path, "w") as tar:
        for number in range(30):
            record = {"conversations": turns if number == 0 else 2 * turns}
            add(tar, f"{number:06d}.json", json.dumps(record).encode())
    config = config_of(scene, data__shards=str(path), eval__shards=None, eval__fraction=0.001)
    said = (
        r"^eval\.fraction: none of 1 usable samples \(29 template: "
        r".* data\.template cannot hold\) is held out\."
    )
    with pytest.raises(UserError, match=said):
        HeldOut(PackedBatches(config, 0, 1))


def test_a_held_out_fraction_is_evaluated_on_without_being_trained_on(scene):
    packed = PackedBatches(config_of(scene, eval__shards=None, eval__fraction=0.3), 0, 1)
    held_out = {document.sample.key for document in HeldOut(packed).documents}
    packs = packed.order.packs(0, packed.order.first_pack(1))
    trained = {packed.catalog.find(number).key for pack in packs for number in pack.samples}
    assert 4 < len(held_out) < 24
    assert held_out | trained == {sample.key for sample in scene.samples} and not held_out & trained


def test_damaged_held_out_images_are_named(scene, tmp_path):
    png = scene.samples[1].pngs[0]
    for name, content in (("nonsense", b"nonsense"), ("half", png[: len(png) // 2])):
        write_shard(
            tmp_path / f"{name}.tar", [scene.samples[0], replace(scene.samples[1], pngs=(content,))]
        )
    message = r"^eval\.shards: .*{}\.tar: sample 000001: undecodable_image: "
    with pytest.raises(UserError, match=message.format("nonsense")):
        HeldOut(PackedBatches(config_of(scene, eval__shards=str(tmp_path / "nonsense.tar")), 0, 1))
    held_out = HeldOut(
        PackedBatches(config_of(scene, eval__shards=str(tmp_path / "half.tar")), 0, 1)
    )
    with pytest.raises(UserError, match=message.format("half")):
        list(held_out.batches(held_out.share(held_out.packs)))


def test_damage_among_samples_that_are_held_out_by_fraction_is_left_out_and_listed(scene, tmp_path):
    for name in ("a.tar", "b.tar"):
        shutil.copy(scene.folder / "held" / name, tmp_path / name)
    config = config_of(
        scene, data__shards=f"{tmp_path}/*.tar", eval__shards=None, eval__fraction=0.5
    )
    sound = HeldOut(PackedBatches(config, 0, 1))
    pictured = [
        d.sample for d in sound.documents if d.sample.images and d.sample.shard.endswith("a.tar")
    ][:2]
    content = bytearray((tmp_path / "a.tar").read_bytes())
    for sample in pictured:
        content[content.index(sample.images[0]) + 40] ^= 1
    (tmp_path / "a.tar").write_bytes(content)
    damaged = HeldOut(PackedBatches(config, 0, 1))
    assert [(fault.key, fault.reason) for fault in damaged.faults] == [
        (s.key, "checksum") for s in pictured
    ]
    left = [document.sample.key for document in damaged.documents]
    assert left == [
        d.sample.key for d in sound.documents if d.sample.key not in {s.key for s in pictured}
    ]
    assert damaged.extent.damaged == 2 and "; 2 damaged left out" in damaged.extent.summary


def evaluate_other_files(config, other):
    join()
    try:
        build(config if dist.get_rank() == 0 else other)
    except UserError as error:
        return str(error)
    return None


def test_replicas_that_read_different_images_are_refused_on_every_rank(scene, tmp_path):
    configs = []
    for number, sample in enumerate(
        (scene.samples[0], replace(scene.samples[0], pngs=scene.samples[1].pngs))
    ):
        write_shard(tmp_path / f"{number}.tar", [sample])
        configs.append(config_of(scene, data=2, eval__shards=str(tmp_path / f"{number}.tar")))
    for said in run_ranks(2, evaluate_other_files, *configs):
        assert said.startswith("eval.shards: ranks 0 and 1 have read different samples (1 and 1)")
