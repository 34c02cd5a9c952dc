"""Run configuration: strict, frozen, typed YAML.

Each key is declared here once: type, bounds, default, meaning, and the marks of `config.keys`. No torch.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from mmtrain.config.keys import Files, Fixed, Free, InsteadOf, Kept, Measured, NamesFiles
from mmtrain.config.limits import MAX_IMAGE_PIXELS
from mmtrain.config.model import ModelSection
from mmtrain.config.parallel import MAX_MICROBATCHES, ParallelSection
from mmtrain.config.section import Float, Section, wrong_together
from mmtrain.config.templates import TemplateName, TemplateText, is_template_file

Decay = Annotated[Float, Field(ge=0, lt=1)]
Fraction = Annotated[Float, Field(gt=0, lt=1)]
# Upper bounds lie above what anybody uses: a slip is an error, and does not take memory or hours.
PositiveInt = Annotated[int, Field(ge=1, le=10**9)]
NonNegativeInt = Annotated[int, Field(ge=0, le=10**9)]
MAX_RANKS = 100_000  # the plan names each; the largest clusters have as many GPUs
Shards = str | Annotated[tuple[str, ...], Field(min_length=1)]
_TARS = NamesFiles(lambda text: not text.startswith("pipe:"))
SampleFormatName = Literal["auto", "llava", "sharegpt", "caption"]


class RunSection(Section):
    name: Free[str] = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """folder name of this run below run.dir"""
    dir: Free[Files[str]] = "runs"
    """folder that holds all runs"""
    seed: Kept[int] = Field(0, ge=0, lt=2**63)
    """seed of every random draw: what projector and adapters begin with, data order"""
    overwrite: Free[bool] = False
    """true: delete an existing run folder of this name and start anew"""
    report_to: Free[tuple[Literal["tensorboard", "wandb", "csv"], ...]] = ()
    """where metrics go besides metrics.jsonl, e.g. [tensorboard, csv]: tensorboard and wandb are extras of mmtrain, csv
    is a table; one that fails never ends a run"""


class DataSetSection(Section):
    name: Kept[str] = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """stands before the keys of its samples: name/key"""
    shards: Free[Annotated[Shards, _TARS]]
    """webdataset tars: a path, a folder of them, a glob, a brace range, or a list"""
    format: Kept[SampleFormatName | None] = None
    """how its samples are written; null: as data.format says"""
    weight: Kept[Float] = Field(1.0, gt=0, le=1e6)
    """how often an epoch draws its samples: 2.5 is twice all of them and half of them once more, 0.1 a tenth"""


class DataSection(Section):
    shards: Free[Annotated[Shards | None, _TARS]] = None
    """webdataset tars: a path, a folder of them, a glob, a brace range, a pipe: URL (data.allow_pipe), or a list;
    demo:train is the demo's; or set data.sets"""
    sets: Annotated[Kept[tuple[DataSetSection, ...] | None], InsteadOf("data.shards")] = None
    """several data sets instead of data.shards, each with name, shards and weight"""
    format: Kept[SampleFormatName] = "auto"
    """how samples are written. llava: conversations of {from, value}; sharegpt: messages or conversations, with any
    usual role and content keys; caption: an image and its text; auto: what the first 100 samples of each set are, kept
    in config.yaml"""
    caption_key: Kept[str | None] = Field(None, min_length=1, max_length=200)
    """key of KEY.json that holds the caption; null: KEY.txt, KEY.caption, or the keys caption and text"""
    caption_prompt: Kept[str] = Field("Describe the image.", max_length=10_000)
    """question that a caption answers; data.template plain drops it"""
    allow_pipe: Free[tuple[str, ...]] = ()
    """programs that pipe: URLs among the shards may run, e.g. [curl], whose output is kept in the cache; only the
    command line may say it"""
    pack_length: Kept[Measured[int]] = Field(2048, ge=1, le=10_000_000)
    """tokens in a pack"""
    max_tiles_per_pack: Kept[Annotated[int, Field(ge=1, le=1_000_000)] | None] = None
    """tiles in a pack, to bound the encoder's memory: an image is one, or as many as its layout
    (model.vision.layout) cuts it into; null: as many as the pack's tokens hold"""
    template: Annotated[Kept[TemplateName | TemplateText], NamesFiles(is_template_file)] = "plain"
    """how a conversation becomes tokens. plain (LLaVA's stage 1): images, then the one answer, the question dropped.
    All others take all turns and supervise every answer; chat: the model's own chat template; llava_v1 (Vicuna),
    llama_2: LLaVA's conversations; chatml: <|im_start|>; FILE.jinja: a template of your own, whose text is kept"""
    images: Kept[Literal["require", "strip"]] = "require"
    """what a text run (model.vision: null) does with samples that have images. require: they need an encoder, and are
    quarantined; strip: their text is trained on, without its <image> marks"""
    overlong: Kept[Literal["skip", "refuse"]] = "skip"
    """what to do with a sample that does not fit into a pack; skipped ones are counted"""
    image_fit: Kept[Literal["pad", "resize", "center_crop"] | None] = None
    """how an image becomes the encoder's one square. pad (LLaVA-1.5): whole, on the mean colour; resize: whole,
    stretched; center_crop: its middle (CLIP); null: pad, and nothing where model.vision.layout cuts images into tiles,
    by a rule of its own"""
    max_image_pixels: Kept[PositiveInt] = MAX_IMAGE_PIXELS
    """a sample with a larger image is quarantined, judged by the header; WebP: half"""
    shuffle_shards: Kept[PositiveInt] = 8
    """shards whose samples are mixed with each other: more mix better, and read more files in turn; of small shards as
    many as hold data.pack_window samples"""
    pack_window: Kept[int] = Field(4096, ge=1, le=10_000_000)
    """samples that are packed together: more fill packs better"""
    workers: Free[int] = Field(2, ge=0, le=1024)
    """processes that decode ahead, on ranks that read data"""
    max_quarantine_rate: Free[Float] = Field(0.01, ge=0, le=1)
    """a larger share of damaged samples among those read (of the first 1,000 at least) ends the run"""
    io_retry_seconds: Free[Float] = Field(60.0, ge=0, le=1e7)
    """how long a read that fails is tried again, for storage that comes back, before the run ends"""
    ledger: Free[bool] = False
    """write samples.jsonl: for each step the keys of its samples in pack order"""
    expected_text_tokens: Free[Measured[int]] = Field(80, ge=1, le=10_000_000)
    """text tokens of a typical sample; only the planner's estimates use it"""
    expected_image_tiles: Free[Measured[Annotated[Float, Field(ge=1, le=10_000)] | None]] = None
    """squares that the encoder sees of a typical image where model.vision.layout cuts images into tiles; only the
    planner's estimates use it, and mmtrain inspect prints it; null: of one of 640 x 480 pixels"""
    expected_image_positions: Free[Measured[Annotated[Float, Field(ge=1, le=10_000_000)] | None]] = None
    """positions of the LLM that a typical image takes; as expected_image_tiles, with which it is set or left out"""
    expected_supervised_fraction: Free[Measured[Float]] = Field(0.12, gt=0, le=1)
    """share of a pack's tokens that carry a label; only the planner's estimates use it"""

    @model_validator(mode="after")
    def _check_sets(self) -> Self:
        if self.sets == ():
            raise wrong_together("data.sets: the list is empty; name at least one data set")
        names = [one.name for one in self.sets or ()]
        if len(set(names)) < len(names):
            raise wrong_together(f"data.sets: names must differ; they are {', '.join(names)}")
        return self

    @model_validator(mode="after")
    def _check_expected_image(self) -> Self:
        keys = ("expected_image_tiles", "expected_image_positions")
        missing, found = sorted(keys, key=lambda key: getattr(self, key) is not None)
        if getattr(self, missing) is None and getattr(self, found) is not None:
            raise wrong_together(
                f"data.{missing}: null, and data.{found} is set; a typical image has both: set them as mmtrain inspect "
                "prints them, or leave both out"
            )
        return self


class TrainSection(Section):
    packs_per_step: Fixed[int] = Field(96, ge=1, le=10_000_000)
    """packs in one optimizer step, over all replicas; of 2,048 tokens 96 hold about 290 of LLaVA's samples, whose batch
    has 256; 96 divides by 1, 2, 3, 4, 6, 8, 12 and 16 replicas"""
    packs_per_microbatch: Free[Measured[int]] = Field(1, ge=1, le=100_000)
    """packs that one pipeline forward handles"""
    max_steps: Kept[PositiveInt | None] = None
    """optimizer steps of the run; or set train.epochs"""
    epochs: Annotated[Kept[PositiveInt | None], InsteadOf("train.max_steps")] = None
    """epochs instead: all data sets by their weights; the last step is filled up from the epoch that would follow"""
    max_bad_steps: Free[NonNegativeInt] = 0
    """steps with a NaN or infinite loss or gradient that a run leaves out, without an update, before it stops; each is
    written to bad_steps.jsonl"""
    deterministic: Free[bool] = False
    """true: GPUs use algorithms that give the same bits each time, slower ones among them; false: runs on GPUs are
    equal to rounding. Runs on a CPU give the same bits either way"""


class OptimizerGroupSection(Section):
    match: Kept[tuple[str, ...]] = Field(min_length=1, max_length=100)
    """name patterns of what trains, as in model.trainable, e.g. [projector] or [llm.layers.*.lora_*]"""
    lr: Kept[Annotated[Float, Field(ge=0)] | None] = None
    """peak learning rate of these; null: optimizer.lr"""
    weight_decay: Kept[Annotated[Float, Field(ge=0)] | None] = None
    """weight decay of these; null: optimizer.weight_decay"""


class OptimizerSection(Section):
    lr: Kept[Float] = Field(1e-3, ge=0)
    """peak learning rate"""
    groups: Kept[tuple[OptimizerGroupSection, ...]] = Field((), max_length=100)
    """parts that train at rates of their own, e.g. [{match: [projector], lr: 2e-5}]; all else trains at optimizer.lr"""
    betas: Kept[tuple[Decay, Decay]] = (0.9, 0.999)
    """AdamW's decay rates"""
    eps: Kept[Float] = Field(1e-8, gt=0)
    """AdamW's epsilon"""
    weight_decay: Kept[Float] = Field(0.0, ge=0)
    """AdamW's decoupled weight decay"""
    schedule: Kept[Literal["cosine", "linear", "constant", "wsd"]] = "cosine"
    """what the learning rate, every group's alike, does after the warm-up. cosine, linear: falls to the end; constant:
    stays; wsd: stays, then falls linearly over the last decay_fraction of the steps"""
    warmup_fraction: Kept[Float] = Field(0.03, ge=0, le=1)
    """share of steps of linear warm-up"""
    decay_fraction: Kept[Float] = Field(0.1, gt=0, le=1)
    """share of steps over which wsd falls; other schedules do not use it"""
    min_lr_fraction: Kept[Float] = Field(0.0, ge=0, le=1)
    """what the learning rate falls to, times lr"""
    clip_norm: Kept[Annotated[Float, Field(gt=0)] | None] = 1.0
    """global gradient norm limit; null: none"""

    @model_validator(mode="after")
    def _check_groups_and_phases(self) -> Self:
        for number, group in enumerate(self.groups):
            if group.lr is None and group.weight_decay is None:
                raise wrong_together(
                    f"optimizer.groups.{number}: sets neither lr nor weight_decay; set one, or leave the group out"
                )
        if self.schedule == "wsd" and self.warmup_fraction + self.decay_fraction > 1:
            raise wrong_together(
                f"optimizer.decay_fraction: {self.decay_fraction} and optimizer.warmup_fraction {self.warmup_fraction} "
                "are more than all steps together; they may add up to 1"
            )
        return self


class EvalSection(Section):
    shards: Free[Annotated[Shards | None, _TARS]] = None
    """held-out webdataset tars, read with data's template and pack_length; or set eval.fraction"""
    format: Free[SampleFormatName] = "auto"
    """how the samples of eval.shards are written, as data.format"""
    fraction: Annotated[Kept[Fraction | None], InsteadOf("eval.shards", is_needed=False)] = None
    """hold out this share of the training data instead, chosen by a hash of each sample's key: the same ones in every
    run (records that share an image have keys of their own); both null: no evaluation"""
    every_steps: Free[PositiveInt | None] = None
    """steps between two evaluations; null: only before the first and after the last step"""
    max_samples: Free[PositiveInt | None] = None
    """evaluate the first so many samples only; null: all, and all stay in memory"""
    show_answers: Free[int] = Field(6, ge=0, le=10_000)
    """held-out questions to answer, word by word, before the first step and at the end of the run; 0: none"""
    permuted_control: Free[bool] = True
    """at the end evaluate once more with the images permuted among the samples, as a control: answers that stay right
    do not come from the images"""

    @property
    def is_on(self) -> bool:
        return self.shards is not None or self.fraction is not None


class CheckpointSection(Section):
    every_steps: Free[PositiveInt | None] = None
    """save after every so many steps; null: by time alone"""
    every_minutes: Free[Annotated[Float, Field(gt=0, le=1e7)] | None] = 10.0
    """save when the last save is this long ago; null: by steps alone. The end is always saved"""
    keep_last: Free[PositiveInt | None] = 3
    """keep the newest so many checkpoints; null: all"""
    keep_best: Free[Literal["loss", "token_accuracy", "exact_match"] | None] = None
    """keep the checkpoint that is best by this score of the evaluations, too, and save at each"""


class ExportSection(Section):
    format: Free[Literal["safetensors", "llava", "hf", "peft"] | None] = None
    """format in which `mmtrain export` will be asked for the run: one that it could not have is refused when planning;
    null: at export"""


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
    def _check_images_of_text_alone(self) -> Self:
        if self.model.vision is not None and self.data.images == "strip":
            raise wrong_together(
                "data.images: strip takes images out of the data, but model.vision has an encoder, which then sees "
                "none; leave it out, or set model.vision=null"
            )
        if self.model.vision is None and self.data.template == "plain":
            raise wrong_together(
                "data.template: plain is for captions: it drops questions, which images stand for, and model.vision is "
                "null; set data.template=chat"
            )
        return self

    @model_validator(mode="after")
    def _check_tiles(self) -> Self:
        if self.model.vision is None or not self.model.vision.cuts_images:
            return self
        layout = self.model.vision.layout
        if self.data.image_fit is not None:
            raise wrong_together(
                f"data.image_fit: {self.data.image_fit} is how an image becomes one square, and model.vision.layout "
                f"{layout} cuts it into tiles; leave it out (data.image_fit=null takes it out of a file's), or set "
                "model.vision.layout=square"
            )
        return self

    @model_validator(mode="after")
    def _check_steps(self) -> Self:
        packs, data, per_microbatch = self.train.packs_per_step, self.parallel.data, self.train.packs_per_microbatch
        unit = data * per_microbatch
        if packs % unit:
            below = packs // unit * unit
            nearest = f"{below} or {below + unit}" if below else str(unit)
            raise wrong_together(
                f"train.packs_per_step: {packs} does not divide by parallel.data x train.packs_per_microbatch = "
                f"{data} x {per_microbatch} = {unit}; nearest that does: {nearest}"
            )
        pipeline = self.parallel.pipeline
        if pipeline * data > MAX_RANKS:
            raise wrong_together(
                f"parallel.data: {data} x parallel.pipeline {pipeline} are {pipeline * data:,} ranks; at most "
                f"{MAX_RANKS:,}"
            )
        if packs // unit * pipeline > MAX_MICROBATCHES:
            raise wrong_together(
                f"train.packs_per_step: {packs // unit:,} micro-batches a step on each of {pipeline} pipeline ranks; "
                f"together at most {MAX_MICROBATCHES:,}: fewer packs, or more train.packs_per_microbatch or "
                "parallel.data"
            )
        return self
