"""Compute what the golden files record, a case of cases.yaml at a time. mmtrain is imported here
alone.
"""

import functools
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from archives import conversation, picture, write_tar
from chat_styles import STYLES, sentencepiece_like
from safetensors.torch import load_file
from scenes import perturb
from stock_encoders import DINO_SIZES, HF_SIZES
from tiny_models import make_tiny_llm, make_tokenizer
from tokenizers import AddedToken
from untrained_runs import drawn_adapters, make_checkpoint, make_tower
from whole_models import save_whole

import mmtrain
from mmtrain.__main__ import main
from mmtrain.data.samples.records import BadSample
from mmtrain.data.samples.sample import IGNORE, Sample
from mmtrain.data.stream.loader import PackedBatches
from mmtrain.data.stream.packs import Processor

CASES: dict[str, dict[str, Any]] = yaml.safe_load(
    (Path(__file__).parent / "cases.yaml").read_text()
)
RESUMED = "resumed after step 20"
WORDS = (
    "a",
    "red",
    "circle,",
    "東京",
    "😀",
    "e\u0301",
    "1. é\n",
    "\t{{x}}",
    "What",
    "<b>",
    "",
    " \\n",
    "لا",
    "Ünï",
)
MARKS = ("<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<image>")
# of JSON: versions, and the weights' bits
LEFT_OUT = ("transformers_version", "peft_version", "versions", "sha256")


def digest(content: str) -> str:
    """Return the first 16 digits of the SHA-256."""
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def load_config(folder: Path, model: dict[str, Any], overrides: list[str]) -> Any:
    """Return the configuration of a small run on `model`."""
    content = {
        "run": {"name": "golden", "dir": str(folder / "runs")},
        "model": model,
        "data": {"shards": "none.tar", "pack_length": 128, "workers": 0},
        "train": {"packs_per_step": 8, "max_steps": 20},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    return mmtrain.load_config(folder / "config.yaml", overrides)


def model_of(folder: Path, llm: str = "llama", vision: str | None = "siglip") -> dict[str, Any]:
    """Return the section `model` of a run with one of the LLMs and one of the encoders, or none."""
    name = None if vision is None else {"name": str(encoder(folder, vision))}
    return {"llm": {"path": str(language_model(folder, llm)), "dtype": "float32"}, "vision": name}


@functools.cache
def language_model(folder: Path, name: str) -> Path:
    """Make a random LLM of two layers whose tokenizer has a chat template and the marks of every
    layout.
    """
    made = make_tiny_llm(folder / f"plain {name}", layers=2, **CASES["llms"][name])
    template, marks, *_ = STYLES["qwen2.5"]
    return with_tokenizer(made, folder / name, make_tokenizer(), template, [*MARKS, *marks])


@functools.cache
def encoder(folder: Path, name: str) -> Path:
    """Make a random encoder of 16 patches, by timm or transformers."""
    asked, made = dict(CASES["encoders"][name]), folder / name
    if "timm" in asked:
        return make_tower(made, asked["timm"], {"num_heads": 2})
    family = asked.pop("class")
    sizes = DINO_SIZES if family == "Dinov2" else HF_SIZES
    model = getattr(transformers, f"{family}Model")(
        getattr(transformers, f"{family}Config")(**sizes | asked)
    )
    perturb(model).save_pretrained(made)
    settings = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4], "resample": 3}
    (made / "preprocessor_config.json").write_text(json.dumps(settings))
    return made


def with_tokenizer(
    llm: Path, folder: Path, tokenizer: Any, template: str | None, marks: Iterable[str]
) -> Path:
    """Copy an LLM and give the copy this tokenizer, its chat template and more special tokens."""
    shutil.copytree(llm, folder)
    tokenizer.add_tokens(
        [AddedToken(mark, special=True, normalized=False) for mark in marks], special_tokens=True
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def projectors(folder: Path, case: str) -> dict[str, Any]:
    """Train the demo for 40 steps; return the last loss and the SHA-256 of each trained tensor."""
    run = train(folder, case)
    tensors = load_file(run / "checkpoints" / "step-00000040" / "projector.safetensors")
    hashes = {
        name: hashlib.sha256(tensors[name].numpy().tobytes()).hexdigest()
        for name in sorted(tensors)
    }
    return {"last loss": mmtrain.load_run(run).metrics("train")[-1]["loss"], "tensors": hashes}


@functools.cache
def train(folder: Path, case: str) -> Path:
    """Run `mmtrain train`; return the run's folder."""
    run = folder / case.replace(" ", "-")
    overrides = [
        f"run.dir={folder}",
        f"run.name={run.name}",
        "parallel.threads_per_rank=1",
        "eval.shards=null",
    ]
    overrides += ["train.max_steps=40", "train.packs_per_step=4", "checkpoint.every_steps=20"]
    if case == RESUMED:
        overrides.append(
            f"--resume={train(folder, 'pipeline 2') / 'checkpoints' / 'step-00000020'}"
        )
    command = [
        sys.executable,
        "-m",
        "mmtrain",
        "train",
        "example:llava_pp4",
        *overrides,
        *CASES["projectors"][case],
    ]
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    return run


def order(folder: Path, case: str) -> dict[str, Any]:
    """Return the first step's packs, and a hash of the sample keys of every step, by seed and
    replica.
    """
    asked, data = CASES["order"][case], folder / digest(case)
    for name, sizes in asked["sets"].items():
        write_shards(data / name, *sizes)
    overrides = [override.replace("FOLDER", str(data)) for override in asked["overrides"]]
    facts: dict[str, Any] = {}
    for seed, replicas in itertools.product((0, 3), (1, 4)):
        config = load_config(folder, model_of(folder), [f"run.seed={seed}", *overrides])
        for replica in range(replicas):
            packs, share = (
                packs_of(PackedBatches(config, replica, replicas)),
                config.train.packs_per_step // replicas,
            )
            steps = [list(itertools.islice(packs, share)) for _ in range(12)]
            facts.setdefault("first step", steps[0])
            facts[f"seed {seed}, replica {replica} of {replicas}"] = [
                digest(repr(step)) for step in steps
            ]
    return facts


def write_shards(folder: Path, samples: int, shards: int, images: list[int], words: int) -> None:
    """Write captioned images of one colour, whose numbers, sizes and answers are drawn from a fixed
    seed.
    """
    folder.mkdir(parents=True)
    draw, tars = random.Random(samples), [[] for _ in range(shards)]
    for number in range(samples):
        count, key = draw.choice(images), f"{number:04d}"
        answer = " ".join(draw.choices(("red", "circle", "on", "black"), k=draw.randint(1, words)))
        files = [(f"{key}.json", conversation("<image>\n" * count + "Say.", answer))]
        for place in range(count):
            files.append(
                (f"{key}.{place}.png", picture(draw.randint(8, 240), draw.randint(8, 240)))
            )
        tars[number * shards // samples] += files
    for shard, files in enumerate(tars):
        write_tar(folder / f"{shard:03d}.tar", files)


def packs_of(batches: PackedBatches) -> Iterator[str]:
    """Return a replica's packs, each as "epoch: keys"."""
    for batch in batches:
        keys = iter(batch.keys)
        for epoch, samples in zip(batch.epochs, batch.samples_of_packs, strict=True):
            yield f"{epoch}: {' '.join(itertools.islice(keys, samples))}"


def tokens(folder: Path, case: str) -> dict[str, str]:
    """Return the numbers of tokens and of supervised ones of each conversation, and a hash of ids
    and labels.
    """
    asked, own = CASES["tokens"][case], folder / digest(case)
    jinja = STYLES[asked["style"]][0] if "style" in asked else asked.get("jinja", "")
    tokenizer = (
        sentencepiece_like() if asked.get("tokenizer") == "sentencepiece" else make_tokenizer()
    )
    marks = asked.get("marks") or dict.fromkeys(
        re.findall(r"<\|\w+\|>|<start_of_turn>|<end_of_turn>", jinja)
    )
    with_tokenizer(language_model(folder, "llama"), own, tokenizer, jinja or None, marks)
    (own / "own.jinja").write_text(jinja)
    name = str(own / "own.jinja") if asked.get("as_file") else asked.get("template", "chat")
    layout = f"model.vision.layout={asked.get('layout', 'square')}"
    config = load_config(
        folder, model_of(folder), [f"model.llm.path={own}", f"data.template={name}", layout]
    )
    template, facts = Processor(config).template, {}
    for sample in conversations():
        try:
            document = template(sample)
        except BadSample as error:
            facts[sample.key] = f"rejected: {error.reason}"
            continue
        supervised = sum(label != IGNORE for label in document.labels)
        written = f"{len(document.input_ids)} tokens, {supervised} supervised"
        facts[sample.key] = f"{written}, {digest(repr((document.input_ids, document.labels)))}"
    return facts


def conversations() -> list[Sample]:
    """Return 50 conversations of 1 to 6 turns, drawn from a fixed seed; some have a system prompt,
    images or marks.
    """
    draw, samples = random.Random(0), []

    def words() -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(1, 12)))

    for number in range(50):
        turns = [("system", words())] if draw.random() < 0.3 else []
        for _ in range(draw.choice((1, 1, 1, 2, 2, 3, 4, 5, 6))):
            marks = ["<image>"] * draw.choice((0, 1, 1, 2))
            asked = [*marks, words()] if draw.random() < 0.7 else [words(), *marks]
            turns.append(("human", draw.choice(("\n", " ", "")).join(asked)))
            end = draw.choices(("", " ", "\n\n", " </s> more", " <image> more"), (80, 6, 6, 4, 4))
            turns.append(("gpt", words() + end[0]))
        images = sum(text.count("<image>") for _, text in turns)
        sizes = tuple((draw.randint(8, 240), draw.randint(8, 240)) for _ in range(images))
        samples.append(
            Sample(f"{number:02d}", "made-up.tar", tuple(turns), (b"",) * images, sizes=sizes)
        )
    return samples


def exports(folder: Path, case: str) -> dict[str, Any]:
    """Export a run that was never trained; return the files, their tensors and their settings."""
    asked, own = CASES["exports"][case], folder / digest(case)
    own.mkdir()
    overrides = asked.get("overrides", [])
    if "lora" in asked:
        overrides = [
            "model.lora.r=4",
            "model.lora.alpha=6",
            f"model.lora.targets={asked['lora']}",
            *overrides,
        ]
    if "whole" in asked:
        save_whole(asked["whole"], own / "whole", make_tokenizer())
        model = {"pretrained": str(own / "whole"), "llm": {"dtype": "float32"}}
    else:
        model = model_of(folder, asked.get("llm", "llama"), asked.get("encoder"))
    config = load_config(own, model, overrides)
    trained = {name: torch.zeros(shape) for name, shape in asked.get("trained", {}).items()}
    checkpoint = make_checkpoint(
        own / "run", config, trained | (drawn_adapters(config) if "lora" in asked else {})
    )
    options = [
        str(checkpoint.path),
        "--out",
        str(own / "out"),
        "--format",
        asked.get("format", "hf"),
    ]
    assert main(["export", *options, *asked.get("options", [])]) == 0
    files = sorted(path for path in (own / "out").rglob("*") if path.is_file())
    return {path.relative_to(own / "out").as_posix(): content_of(path, folder) for path in files}


def content_of(path: Path, folder: Path) -> Any:
    """Return a file's tensors, its JSON or a hash; only its presence where it is prose or the
    tokenizer's own.
    """
    if path.name in ("README.md", "tokenizer.json") or path.name.endswith(".index.json"):
        return "there"
    if path.suffix in (".safetensors", ".bin"):
        return tensors_of(path)
    text = path.read_text().replace(str(folder), "FOLDER")
    if path.suffix != ".json":
        return digest(text)
    return json.loads(
        text,
        object_pairs_hook=lambda pairs: {key: value for key, value in pairs if key not in LEFT_OUT},
    )


def tensors_of(path: Path) -> dict[str, str]:
    """Return "name type shape" of the tensors, numbers in names as *, with these numbers for
    each.
    """
    tensors = (
        load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    )
    places = defaultdict(list)
    for name, tensor in tensors.items():
        kind = (
            f"{re.sub('[0-9]+', '*', name)} {str(tensor.dtype).removeprefix('torch.')} "
            f"{list(tensor.shape)}"
        )
        places[kind].append(".".join(re.findall("[0-9]+", name)))
    return {kind: ", ".join(sorted(numbers)) for kind, numbers in sorted(places.items())}


FACTS = {"projectors": projectors, "order": order, "tokens": tokens, "exports": exports}
