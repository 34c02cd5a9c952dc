"""Run configuration: strict, frozen, typed YAML.

Each key is declared here once: type, bounds, default, meaning, and the marks of `config.keys`. No
torch.
"""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from mmtrain.config.keys import (
    NAME,
    Files,
    Fixed,
    Float,
    Free,
    InsteadOf,
    Kept,
    Measured,
    NamesFiles,
    Section,
    wrong_together,
)
from mmtrain.config.limits import MAX_CELLS, MAX_IMAGE_PIXELS
from mmtrain.config.model import ModelSection
from mmtrain.config.parallel import MAX_MICROBATCHES, ParallelSection
from mmtrain.config.templates import TemplateName, TemplateText, is_template_file

Decay = Annotated[Float, Field(ge=0, lt=1)]
Fraction = Annotated[Float, Field(gt=0, lt=1)]
_OFF_AT_0 = BeforeValidator(lambda value: None if value == 0 else value)
# Upper bounds lie above what anybody uses: a slip is an error, and does not take memory or hours.
PositiveInt = Annotated[int, Field(ge=1, le=10**9)]
NonNegativeInt = Annotated[int, Field(ge=0, le=10**9)]
MAX_RANKS = 100_000  # the plan names each; the largest clusters have as many GPUs
Tiles = Annotated[Float, Field(ge=1, le=MAX_CELLS)] | None
NonNegative = Annotated[Float, Field(ge=0)] | None
Shards = str | Annotated[tuple[str, ...], Field(min_length=1)]
# Variables are not filled in in URLs and programs, which could send them away.
_TARS = NamesFiles(lambda text: not (text.startswith("pipe:") or "://" in text))
ExportFormat = Literal["safetensors", "llava", "hf", "peft"]
SampleFormatName = Literal["auto", "llava", "sharegpt", "qa", "interleaved", "caption"]


class RunSection(Section):
    name: Free[str] = Field(pattern=NAME)
    """folder name of this run inside run.dir"""
    dir: Free[Files[str]] = "runs"
    """folder that holds all runs"""
    seed: Kept[int] = Field(0, ge=0, lt=2**63)
    """seed of every random choice: initial weights of projector and adapters, data order"""
    overwrite: Free[bool] = False
    """true: delete an existing run folder with this name and start over"""
    report_to: Free[tuple[Literal["tensorboard", "wandb"], ...]] = ()
    """where metrics go besides metrics.jsonl, e.g. [tensorboard, wandb]: optional extras of
    mmtrain. A tracker that fails never ends the run"""


class DataSetSection(Section):
    name: Kept[str] = Field(pattern=NAME)
    """name of this data set, written before the keys of its samples: name/key"""
    shards: Free[Annotated[Shards, _TARS]]
    """webdataset shards: a tar file, a folder, a glob, a brace range, a URL, or a list"""
    format: Kept[SampleFormatName | None] = None
    """sample format of this data set; null: data.format"""
    weight: Kept[Float] = Field(1.0, gt=0, le=1000)
    """how often an epoch draws its samples: 2.5 draws all twice and half of them once more, 0.1
    draws a tenth
    """


class DataSection(Section):
    shards: Free[Annotated[Shards | None, _TARS]] = None
    """webdataset shards: a tar file, a folder, a glob, a brace range, a URL (s3://, gs://, az://,
    https://, hf://datasets/ORG/NAME/; needs mmtrain[remote]), a pipe: URL (needs data.allow_pipe),
    or a list; demo:train: the demo's shards. Set this or data.sets"""
    sets: Annotated[Kept[tuple[DataSetSection, ...] | None], InsteadOf("data.shards")] = None
    """several data sets instead of data.shards, each with name, shards and weight"""
    format: Kept[SampleFormatName] = "auto"
    """sample format. llava: conversations of {from, value}; sharegpt: messages or conversations,
    with any usual role and content keys; qa: texts of {user, assistant}, question and answer,
    prompt and completion; interleaved: a page of texts and images; caption: an image and its text;
    auto: detected from the first 100 samples of each set and recorded in config.yaml"""
    caption_key: Kept[str | None] = Field(None, min_length=1, max_length=200)
    """key of KEY.json that holds the caption; null: KEY.txt, KEY.caption, or the keys caption and
    text
    """
    caption_prompt: Kept[str] = Field("Describe the image.", max_length=10_000)
    """question asked before each caption; data.template=plain drops it"""
    allow_pipe: Free[tuple[str, ...]] = ()
    """programs that pipe: URLs among the shards may run, e.g. [curl]; their output stays in the
    cache. Only the command line can set it"""
    cache_gib: Free[Annotated[Float, Field(gt=0, le=1e6)] | None] = None
    """most GiB of each machine's disk for copies of remote shards and the output of pipe: shards;
    null: 100, or half of the free space if that is less"""
    pack_length: Kept[Measured[int]] = Field(2048, ge=1, le=10_000_000)
    """tokens per pack"""
    max_tiles_per_pack: Kept[Annotated[int, Field(ge=1, le=1_000_000)] | None] = None
    """maximum tiles per pack, to bound the encoder's memory: an image is one tile, or as many as
    model.vision.layout cuts it into (under native one for each of its image tokens); null: as many
    as fit into the pack's tokens"""
    template: Annotated[Kept[TemplateName | TemplateText], NamesFiles(is_template_file)] = "plain"
    """how a conversation becomes tokens. plain (LLaVA's stage 1): images and one answer, without
    the question; all others keep all turns and supervise every answer. chat: the model's own chat
    template; llava_v1 (Vicuna), llama_2: LLaVA's conversations; chatml: <|im_start|>; FILE.jinja:
    your own template, recorded as text"""
    images: Kept[Literal["require", "strip"]] = "require"
    """what a text run (model.vision: null) does with samples that have images. require: quarantine
    them, since they need an encoder; strip: train on their text without its <image> marks"""
    overlong: Kept[Literal["skip", "refuse"]] = "skip"
    """what to do with a sample that does not fit into a pack. skip: leave it out and count it;
    refuse: end the run
    """
    image_fit: Kept[Literal["pad", "resize", "center_crop"] | None] = None
    """how an image becomes the encoder's square. pad (LLaVA-1.5): whole, padded with the mean
    colour; resize: whole, stretched; center_crop: its middle (CLIP); null: pad, or nothing where
    model.vision.layout cuts images into tiles by its own rule"""
    resize: Fixed[Literal["pillow", "torchvision"]] = "pillow"
    """library that resizes images; the levels of the two differ by up to 2 of 255. torchvision
    takes a third of Pillow's time, has bilinear and bicubic filters alone, and is the default of
    transformers' processors"""
    max_image_pixels: Kept[PositiveInt] = MAX_IMAGE_PIXELS
    """quarantine a sample with a larger image, according to the image's header; WebP: half of
    this
    """
    shuffle_shards: Kept[PositiveInt] = 8
    """shards whose samples are mixed with each other; more mix better, but read from more files in
    turn. Small shards: as many as hold data.pack_window samples"""
    pack_window: Kept[int] = Field(4096, ge=1, le=10_000_000)
    """samples that are packed together; more of them fill packs better"""
    workers: Free[int] = Field(2, ge=0, le=1024)
    """processes that decode ahead on each rank that reads data"""
    max_quarantine_rate: Free[Float] = Field(0.01, ge=0, le=1)
    """end the run when a larger share of the samples read (counted as 1,000 at least) is
    quarantined
    """
    io_retry_seconds: Free[Float] = Field(60.0, ge=0, le=1e7)
    """how long a failed read is retried, in case the storage comes back, before the run ends"""
    ledger: Free[bool] = False
    """true: write samples.jsonl, the sample keys of each step in pack order"""
    expected_text_tokens: Free[Measured[int]] = Field(80, ge=1, le=10_000_000)
    """text tokens of a typical sample; only the planner's estimates use it"""
    expected_image_tiles: Free[Measured[Tiles]] = None
    """tiles of a typical image where model.vision.layout makes several of one image (native: its
    image tokens), for the planner's estimates. mmtrain inspect prints it; null: tiles of a 640 x
    480 image"""
    expected_image_positions: Free[
        Measured[Annotated[Float, Field(ge=1, le=10_000_000)] | None]
    ] = None
    """image tokens of a typical image, for the planner's estimates; set it together with
    expected_image_tiles
    """
    expected_attended_tiles: Free[Measured[Tiles]] = None
    """mean of an image's squared image tokens, over the mean of its image tokens, under
    model.vision.layout=native, for the planner's estimate of attention in the encoder. mmtrain
    inspect prints it; null: expected_image_tiles"""
    expected_supervised_fraction: Free[Measured[Float]] = Field(0.12, gt=0, le=1)
    """share of a pack's tokens that carry a label; only the planner's estimates use it"""

    @model_validator(mode="after")
    def _check_sets_and_expected_image(self) -> Self:
        if self.sets == ():
            raise wrong_together("data.sets: the list is empty. Name at least one data set")
        names = [one.name for one in self.sets or ()]
        if len(set(names)) < len(names):
            raise wrong_together(
                f"data.sets: two sets have the same name ({', '.join(names)}). Names must differ"
            )

        keys = ("expected_image_tiles", "expected_image_positions")
        missing, found = sorted(keys, key=lambda key: getattr(self, key) is not None)
        if getattr(self, missing) is None and getattr(self, found) is not None:
            raise wrong_together(
                f"data.{missing}: null, but data.{found} is set, and the planner needs both. Set "
                "both as mmtrain inspect prints them, or leave both out"
            )
        return self


class TrainSection(Section):
    packs_per_step: Fixed[int] = Field(96, ge=1, le=10_000_000)
    """packs in one optimizer step, over all replicas; of 2,048 tokens 96 hold about 290 of LLaVA's
    samples, whose batch has 256; 96 divides by 1, 2, 3, 4, 6, 8, 12 and 16 replicas"""
    packs_per_microbatch: Free[Measured[int]] = Field(1, ge=1, le=100_000)
    """packs per micro-batch (one forward of the pipeline)"""
    max_steps: Kept[PositiveInt | None] = None
    """optimizer steps of the run; set this or train.epochs"""
    epochs: Annotated[Kept[PositiveInt | None], InsteadOf("train.max_steps")] = None
    """epochs instead of max_steps, over all data sets by weight; the next epoch's first samples
    fill the last step
    """
    max_bad_steps: Free[NonNegativeInt] = 0
    """steps with a NaN or infinite loss or gradient that a run skips, without an update, before it
    stops; each is written to bad_steps.jsonl"""
    compile: Free[Measured[Literal["auto"] | bool]] = "auto"
    """whether torch compiles decoder layers and blocks of a frozen encoder with square tiles, which
    fuses their elementwise operations. auto: on a GPU, each class of layers that is right and
    faster, tried before the first step (with train.deterministic: that is right); true: on a CPU
    too, without timing, and a class that cannot be compiled ends the run"""
    tf32: Free[Measured[bool]] = False
    """true: GPUs multiply float32 matrices (the projector's, and frozen ones in float32) several
    times as fast, with factors rounded to 10 bits of mantissa"""
    deterministic: Free[Measured[bool]] = False
    """true: GPUs use deterministic algorithms, some of them slower; false: GPU runs agree up to
    rounding. CPU runs are always bit-identical"""


class OptimizerGroupSection(Section):
    match: Kept[tuple[str, ...]] = Field(min_length=1, max_length=100)
    """name patterns of the group's parameters, as in model.trainable, e.g. [projector] or
    [llm.layers.*.lora_*]
    """
    lr: Kept[NonNegative] = None
    """peak learning rate of the group; null: optimizer.lr"""
    weight_decay: Kept[NonNegative] = None
    """weight decay of all that the group matches; null: optimizer.weight_decay, not of biases and
    norms
    """


class OptimizerSection(Section):
    lr: Kept[Float] = Field(1e-3, ge=0)
    """peak learning rate"""
    groups: Kept[tuple[OptimizerGroupSection, ...]] = Field((), max_length=100)
    """parameter groups with their own rates, e.g. [{match: [projector], lr: 2e-5}]; all else uses
    optimizer.lr
    """
    betas: Kept[tuple[Decay, Decay]] = (0.9, 0.999)
    """AdamW's decay rates"""
    eps: Kept[Float] = Field(1e-8, gt=0)
    """AdamW's epsilon"""
    weight_decay: Kept[Float] = Field(0.0, ge=0)
    """AdamW's decoupled weight decay, as in transformers' Trainer not of biases and norms; groups
    may say otherwise
    """
    schedule: Kept[Literal["cosine", "linear", "constant", "wsd"]] = "cosine"
    """course of every group's learning rate after the warm-up. cosine, linear: falls until the end;
    constant: stays; wsd: stays, then falls linearly over the last decay_fraction of the steps"""
    warmup_fraction: Kept[Float] = Field(0.03, ge=0, le=1)
    """share of the steps that warm up linearly"""
    decay_fraction: Kept[Float] = Field(0.1, gt=0, le=1)
    """share of the steps over which wsd falls; other schedules ignore it"""
    min_lr_fraction: Kept[Float] = Field(0.0, ge=0, le=1)
    """final learning rate, as a fraction of lr"""
    clip_norm: Kept[Annotated[Float, Field(gt=0)] | None] = 1.0
    """limit to which the global gradient norm is clipped; null: none"""

    @model_validator(mode="after")
    def _check_groups_and_phases(self) -> Self:
        for number, group in enumerate(self.groups):
            if group.lr is None and group.weight_decay is None:
                raise wrong_together(
                    f"optimizer.groups.{number}: sets neither lr nor weight_decay. "
                    "Set one, or leave the group out"
                )
        if self.schedule == "wsd" and self.warmup_fraction + self.decay_fraction > 1:
            raise wrong_together(
                f"optimizer.decay_fraction: {self.decay_fraction} and optimizer.warmup_fraction "
                f"{self.warmup_fraction} add up to more than 1, i.e. all steps. Lower one of them"
            )
        return self


class EvalSection(Section):
    shards: Free[Annotated[Shards | None, _TARS]] = None
    """held-out webdataset shards, read with data.template and data.pack_length; set this or
    eval.fraction
    """
    format: Free[SampleFormatName] = "auto"
    """sample format of eval.shards, as in data.format"""
    fraction: Annotated[
        Kept[Fraction | None], _OFF_AT_0, InsteadOf("eval.shards", is_needed=False)
    ] = None
    """share of the training data to hold out, chosen by a hash of each sample's key, so every run
    holds out the same samples (records that share an image have different keys). This null or 0,
    and eval.shards null: no evaluation"""
    every_steps: Free[PositiveInt | None] = None
    """steps between two evaluations; null: only before the first and after the last step"""
    max_samples: Free[PositiveInt | None] = 5_000
    """evaluate only the first n samples, which stay in memory: 5,000 photographs of 100 kB are 500
    MB on each rank that reads data; null: all
    """
    show_answers: Free[int] = Field(6, ge=0, le=10_000)
    """held-out questions to answer by generation before the first step and at the end of the run;
    0: none
    """
    permuted_control: Free[bool] = True
    """true: at the end, evaluate once more with the images shuffled among the samples, as a
    control. Answers that stay right do not come from the images"""

    @property
    def is_on(self) -> bool:
        return self.shards is not None or self.fraction is not None


class CheckpointSection(Section):
    every_steps: Free[PositiveInt | None] = None
    """save every n steps; null: by time only"""
    every_minutes: Free[Annotated[Float, Field(gt=0, le=1e7)] | None] = 10.0
    """save every n minutes; null: by steps only. The end of the run is always saved"""
    keep_last: Free[PositiveInt | None] = 3
    """keep the newest n checkpoints; null: all"""
    keep_best: Free[Literal["loss", "token_accuracy", "exact_match"] | None] = None
    """also keep the checkpoint with the best value of this evaluation score, and save at every
    evaluation
    """


class ExportSection(Section):
    format: Free[ExportFormat | None] = None
    """format in which you will export the run with `mmtrain export`; the plan refuses a format that
    the run cannot have. null: checked at export"""


class RunConfig(Section):
    run: RunSection
    model: ModelSection
    parallel: ParallelSection = ParallelSection()
    data: DataSection
    train: TrainSection
    optimizer: OptimizerSection = OptimizerSection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    export: ExportSection = ExportSection()

    @model_validator(mode="after")
    def _check_images(self) -> Self:
        vision = self.model.vision
        if vision is not None and self.data.images == "strip":
            raise wrong_together(
                "data.images: strip removes the images, but model.vision has an encoder, which "
                "needs them. Leave it out, or set model.vision=null"
            )
        if vision is None and self.data.template == "plain":
            raise wrong_together(
                "data.template: plain keeps only images and answers, but model.vision is null, so "
                "there are no images. Set data.template=chat"
            )
        if vision is not None and vision.cuts_images and self.data.image_fit is not None:
            raise wrong_together(
                f"data.image_fit: {self.data.image_fit} makes one square of an image, but "
                f"model.vision.layout {vision.layout} sets its size. Remove it (on the command "
                "line: data.image_fit=null), or set model.vision.layout=square"
            )
        return self

    @model_validator(mode="after")
    def _check_steps(self) -> Self:
        packs = self.train.packs_per_step
        per_microbatch = self.train.packs_per_microbatch
        data = self.parallel.data
        unit = data * per_microbatch
        if packs % unit:
            below = packs // unit * unit
            nearest = f"{below} or {below + unit}" if below else str(unit)
            raise wrong_together(
                f"train.packs_per_step: {packs} is not a multiple of parallel.data x "
                "train.packs_per_microbatch = "
                f"{data} x {per_microbatch} = {unit}. Set it to {nearest}"
            )
        pipeline = self.parallel.pipeline
        if pipeline * data > MAX_RANKS:
            raise wrong_together(
                f"parallel.data: {data} x parallel.pipeline {pipeline} = {pipeline * data:,} "
                f"ranks; the limit is {MAX_RANKS:,}"
            )
        if packs // unit * pipeline > MAX_MICROBATCHES:
            raise wrong_together(
                f"train.packs_per_step: {packs // unit:,} micro-batches a step x {pipeline} "
                f"pipeline ranks; the limit is {MAX_MICROBATCHES:,} together. Set fewer packs, or "
                "raise train.packs_per_microbatch or parallel.data"
            )
        return self
