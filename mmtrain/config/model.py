"""Keys of the models: what is frozen or trains, and where its files lie."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from mmtrain.config.keys import Files, Fixed, Float, Free, Kept, Measured, Section, wrong_together
from mmtrain.config.limits import MAX_CELLS, MAX_GRID_SIDE, MAX_GRIDS, MAX_TILES
from mmtrain.connectors import ConnectorName
from mmtrain.layouts.native import MAX_POSITIONS, MIN_POSITIONS
from mmtrain.layouts.registry import LAYOUT_KEYS, LAYOUTS, LayoutName

Dtype = Literal["float32", "bfloat16"]
Pinpoint = tuple[
    Annotated[int, Field(ge=1, le=MAX_GRID_SIDE)], Annotated[int, Field(ge=1, le=MAX_GRID_SIDE)]
]
Pinpoints = Annotated[tuple[Pinpoint, ...], Field(min_length=1, max_length=MAX_GRIDS)]


class LlmSection(Section):
    path: Free[Files[str]]
    """model folder, or a hub id whose files are in the local Hugging Face cache"""
    dtype: Kept[Dtype] = "bfloat16"
    """storage and compute type of the frozen LLM; the default is float32 where model.pretrained
    names a float32 folder"""
    quantize: Kept[Literal["published", "nf4", "int8", "fp8"] | None] = None
    """keep the decoder layers in which only adapters train in fewer bits; null: in dtype.
    published: as the FP8 or MXFP4 codes in path, which are the same model. The others quantise the
    model in path: it then differs slightly, and exports are for the one in path. nf4: 4 bits a
    weight, int8: 8 (both need pip install 'mmtrain[quantize]'). fp8: 8 bits, without a library;
    compiled layers multiply it directly on GPUs of compute capability 8.9 or higher. All others
    compute in dtype"""


class VisionSection(Section):
    name: Free[Files[str]]
    """timm model name, or a folder holding a timm or Hugging Face vision model; model.vision: null
    trains on text alone"""
    select_layer: Kept[int] = Field(-2, le=-1)
    """encoder block whose output feeds the projector: -1 the last, -2 (LLaVA) the one before"""
    final_norm: Kept[bool] = False
    """true: take features after the encoder's final norm, as Idefics3, PerceptionLM and LFM2-VL do;
    false: before it, as LLaVA and AyaVision do, or where there is none. An exported model cannot
    change it"""
    layout: Fixed[LayoutName] = "square"
    """squares that an image is cut into; each becomes image tokens. square: one; idefics3: one,
    between the texts that the processors of Idefics3 and SmolVLM write around it; tiles: up to
    max_tiles and one of the whole image (AyaVision); anyres: one of the whole image, then the rows
    of a grid, each with a trained newline (LLaVA-NeXT); anyres_max_9: anyres with larger grids
    (LLaVA-OneVision). Grids of more than 1.21 times the image tokens of 9 squares are interpolated
    down to 9; an image then takes at most about 12 squares' image tokens, with the whole image and
    newlines; native: no squares, the whole image in its own shape, for encoders that take any size
    (SigLIP 2 NaFlex, Pixtral, Qwen2.5-VL's to Qwen3.5's); qwen_vl, glm_v, paddleocr_vl: native,
    between the image marks of these families, for LLMs with M-RoPE"""
    max_tiles: Kept[Annotated[int, Field(ge=1, le=MAX_TILES)] | None] = None
    """maximum squares that layout tiles cuts an image into, without the one of the whole image;
    null: 12
    """
    pinpoints: Kept[Pinpoints | None] = None
    """grids that anyres and anyres_max_9 choose from, as (height, width) in pixels, e.g. [[384,
    768], [768, 384]]; LLaVA's config.json calls them image_grid_pinpoints. null: LLaVA-NeXT's 5, or
    LLaVA-OneVision's 36, whose own files have the text (1x1),...,(6x6)"""
    min_positions: Kept[Annotated[int, Field(ge=1, le=MAX_CELLS)] | None] = None
    """minimum image tokens of native, qwen_vl, glm_v, paddleocr_vl: smaller images grow; null: 64
    or the folder's
    """
    max_positions: Kept[Annotated[int, Field(ge=1, le=MAX_CELLS)] | None] = None
    """maximum image tokens of these layouts: larger images are reduced; one far longer than wide
    may take more, or is quarantined with NaFlex, whose published processor cannot take it; null:
    256 or the folder's"""
    longest_edge: Kept[Annotated[int, Field(ge=1, le=MAX_GRID_SIDE)] | None] = None
    """maximum pixels of an image's longer side under layout native, instead of min_positions and
    max_positions; smaller images keep their size (Pixtral)"""
    merger: Fixed[bool] = False
    """true: take features after the encoder's own merger, which joins 2 x 2 patches and stays
    frozen unless model.trainable names vision.merger.* (Qwen2.5-VL's to Qwen3.5's); false: before
    it, for a new projector"""
    dtype: Kept[Dtype | None] = None
    """storage and compute type of the encoder; null: model.llm.dtype"""

    @property
    def cuts_images(self) -> bool:
        return LAYOUTS[self.layout].is_sized

    @model_validator(mode="after")
    def _check_norm_and_size(self) -> Self:
        if self.final_norm and self.select_layer != -1:
            raise wrong_together(
                "model.vision.final_norm: the norm follows the last block, but "
                "model.vision.select_layer is "
                f"{self.select_layer}. Set it to -1, or leave final_norm out"
            )
        has_positions = self.min_positions or self.max_positions
        if self.longest_edge is not None and has_positions:
            raise wrong_together(
                f"model.vision.longest_edge: {self.longest_edge}, but min_positions or "
                "max_positions is set too. Leave one of the two out"
            )
        return self


class ProjectorSection(Section):
    type: Fixed[ConnectorName] = "mlp2x_gelu"
    """projector architecture, with the models that use it. mlp2x_gelu: LLaVA-1.5; shuffle_swiglu:
    AyaVision; shuffle_linear: Idefics3, SmolVLM; shuffle_mlp2x_gelu: InternVL, LFM2-VL;
    mlp2x_gelu_pool: PerceptionLM; norm_merge_mlp2x: Mistral 3, LightOnOCR; patch_merger:
    LLaVA-OneVision 1.5, Innovator-VL, Kimi-VL, PaddleOCR-VL; patch_merger_rms: EXAONE 4.5,
    Qwen2.5-VL; qwen_merger: Qwen2-VL, Qwen3.5; qwen_merger_deepstack: Qwen3-VL, whose further
    mergers feed the first decoder layers; glm_merger: GLM-4.1V to GLM-4.6V, GLM-OCR; linear:
    HyperCLOVA X, after the merger of Qwen's encoder"""
    factor: Fixed[Literal[2, 3, 4] | None] = None
    """how many patches per side become one image token where the type shuffles, merges or pools: 2
    leaves a quarter of the tokens, 4 a sixteenth; null: 2"""
    width: Fixed[Annotated[int, Field(ge=2, le=1_000_000)] | None] = None
    """features between the linear layers: of shuffle_swiglu, including the gate's (null: the LLM's
    width); of glm_merger (null: 3 times the LLM's width)"""
    init_from: Free[Files[str | None]] = None
    """begin with a trained projector: a run or checkpoint of mmtrain, its projector.safetensors,
    LLaVA's mm_projector.bin, or an exported Hugging Face folder; null: random, by run.seed"""


class LoraSection(Section):
    r: Fixed[int] = Field(16, ge=1, le=65_536)
    """rank of the adapters"""
    alpha: Kept[Float] = Field(32.0, gt=0, le=1e6)
    """scale of the adapters: their output is multiplied by alpha / r"""
    targets: Fixed[tuple[str, ...]] = Field(("llm.layers.*",), min_length=1, max_length=1000)
    """name patterns of the linear layers that get an adapter, e.g. llm.layers.* (all),
    llm.layers.*.self_attn, llm.layers.*.mlp, vision.*. Adapters train where model.trainable names
    them: llm.layers.*.lora_*"""


class ModelSection(Section):
    pretrained: Free[Files[str | None]] = None
    """folder or cached hub id of a whole multimodal model to start from (Llava, LlavaNext,
    LlavaOnevision, AyaVision, Idefics3, SmolVLM, InternVL, PerceptionLM, Lfm2Vl, Mistral3,
    LightOnOcr, HyperCLOVAXVisionV2, VideoLlama3, Exaone4_5, Qwen2-VL to Qwen3.5, GLM-4.1V to
    GLM-4.6V, GLM-OCR, PaddleOCR-VL). Its files set model.llm.path, model.vision, model.projector
    and data.image_fit, so leave those out; null: set them yourself"""
    llm: LlmSection
    vision: Fixed[VisionSection | None]
    """the vision encoder; null: none, and no projector (training on text alone)"""
    projector: ProjectorSection = ProjectorSection()
    init_from: Free[Files[str | None]] = None
    """begin with everything that another run trained (adapters, layers, projector): its folder or
    one of its checkpoints. All of it must train here too, except the projector; null: begin with
    the models' own files"""
    lora: Fixed[LoraSection | None] = None
    """low-rank adapters (LoRA) beside frozen linear layers; null: none"""
    trainable: Fixed[Measured[tuple[str, ...]]] = Field(
        ("projector",), min_length=1, max_length=1000
    )
    """name patterns of what trains, e.g. projector, llm.layers.31, llm.layers.*.mlp.*,
    llm.layers.*.lora_*, llm.head
    """

    @model_validator(mode="before")
    @classmethod
    def _check_pretrained(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        pretrained = content.get("pretrained")
        has_vision = content.get("vision", {}) is not None
        if pretrained is not None and not has_vision:
            raise wrong_together(
                "model.vision: null, but model.pretrained names a model with an encoder. "
                "To train its LLM on text alone, set model.llm.path to that folder instead"
            )
        named = [("llm", "path", pretrained), ("vision", "name", pretrained)]
        if has_vision:
            named.append(("projector", "init_from", content.get("init_from") or pretrained))
        for part, key, value in named:
            if isinstance(value, str) and isinstance(keys := content.get(part, {}), dict):
                content = content | {part: {key: value} | keys}
        return content

    @property
    def vision_dtype(self) -> Dtype:
        return (self.vision and self.vision.dtype) or self.llm.dtype

    @model_validator(mode="after")
    def _check_layout_numbers(self) -> Self:
        vision = self.vision
        # whose layout is checked once its folder is read
        if vision is None or self.pretrained is not None:
            return self
        least = vision.min_positions or MIN_POSITIONS
        most = vision.max_positions or MAX_POSITIONS
        if least > most:
            raise wrong_together(
                f"model.vision.min_positions: {least} is above max_positions, {most}. Set both"
            )
        for key in LAYOUT_KEYS:
            fitting = [name for name, layout in LAYOUTS.items() if key in layout.keys]
            if getattr(vision, key) is not None and vision.layout not in fitting:
                raise wrong_together(
                    f"model.vision.{key}: the layout {vision.layout} does not use it. Leave it "
                    f"out, or set model.vision.layout={' or '.join(fitting)}"
                )
        return self

    @model_validator(mode="after")
    def _check_text_alone(self) -> Self:
        if self.vision is not None:
            return self
        if self.projector != ProjectorSection():
            raise wrong_together(
                "model.projector: model.vision is null, and without an encoder there is nothing to "
                "project. Remove model.projector (on the command line: model.projector=null), or "
                "name an encoder in model.vision"
            )
        if absent := [
            one for one in self.trainable if one.partition(".")[0] in ("projector", "vision")
        ]:
            raise wrong_together(
                f"model.trainable: {', '.join(absent)}, but model.vision is null: "
                "there is no encoder and no "
                "projector. Name the parts of the LLM that train, e.g. [llm.layers.31, llm.head]"
            )
        return self
