"""Vision transformers that can be run up to a block, by how their files name what they hold.

One that is `native` takes images of any size: its patches are those of a whole picture in its own
shape.

Names are those of published files (`vision.<name>` is a parameter's global name). In memory they
differ with the version of transformers, which the class's own conversion of weights hides.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from mmtrain.base.errors import UserError
from mmtrain.base.printing import escape
from mmtrain.facts.settings import Shapes
from mmtrain.layouts.native import PatchOrder

T = TypeVar("T")
TIMM = "timm"  # in place of a class of transformers
TESTED_TRANSFORMERS = "5.23"  # has all classes that are named here and in stock/
# of a global name: the block's number
ENCODER_BLOCK = re.compile(r"vision\.(?:.*\.)?(?:blocks|layers?)\.(\d+)\.")


def rows(tensors: Shapes, name: str | None) -> int:
    """Return the number of tokens that a tensor (..., features) holds; 0 without it."""
    if name not in tensors:
        return 0
    return math.prod(tensors[name][:-1])


@dataclass(frozen=True)
class NativeInput:
    """The arguments of an encoder that takes images of any size."""

    # order of a patch's values, or pictures instead of patches
    patches: PatchOrder | Literal["picture"]
    images: Literal["equal", "single", "packed"]  # of a call: those with equal grids, one, or any
    block: int = 1  # patches come in blocks of block x block, which its own merger joins
    # its merger's last weight, from which the width of what it makes is read
    merged: str | None = None
    has_merge_sizes: bool = False  # it asks for the patches a side that are merged: 1
    is_cut_out: bool = False  # it takes patches as small pictures (1, P, 3, side, side)
    is_capped: bool = False  # of its layout, `Native`, as its stock class's processor resizes


@dataclass(frozen=True)
class EncoderFamily:
    """A vision model and the names of its tensors in published files."""

    model: str  # class of transformers, or TIMM
    blocks: str  # before a block's number
    patches: str  # the patch convolution
    # behind the last block, of every token; None: CLIP's is of the class token alone
    norm: str | None
    # table with a row a patch and one for the class token; None: it is resized, or rotary
    positions: str | None
    class_token: str | None
    registers: tuple[str, ...] = ()  # tensors of other tokens before the patches
    beside: tuple[str, ...] = ()  # what no patch's feature comes from
    # what may stand before all names, in a file that holds more than the encoder
    outer: tuple[str, ...] = ()
    # (what a version of transformers calls it, what files do)
    in_memory: tuple[tuple[str, str], ...] = ()
    # pixels a side where config.json says nothing; of a patch, if it is native
    image_size: int = 224
    depth: int | None = 12  # blocks where config.json says nothing; None: not known
    native: NativeInput | None = None

    def published(self, name: str) -> str:
        """Return the name in published files of a tensor in memory or in any file."""
        for ours, theirs in self.in_memory:
            name = name.replace(ours, theirs)
        return name

    def unused(self, final_norm: bool, source: str, merger: bool = False) -> tuple[str, ...]:
        """Return beginnings of the names of tensors that no feature comes from.

        Raises UserError for a norm or a merger that is not there.
        """
        has_merger = self.native is not None and self.native.merged is not None
        if merger and not has_merger:
            raise UserError(
                f"model.vision.merger: {source} has no merger of its own. Leave merger out."
            )
        if final_norm and self.norm is None:
            raise UserError(
                f"model.vision.final_norm: {source} has no final norm over its patches. "
                "Leave final_norm out."
            )
        unused = self.beside
        if has_merger and not merger:
            unused += ("merger.",)
        if self.norm is not None and not final_norm:
            unused += (self.norm,)
        return unused

    def prefix_tokens(self, tensors: Shapes) -> int:
        """Count class and register tokens, from the encoder's own tensors."""
        return sum(rows(tensors, name) for name in (self.class_token, *self.registers))

    def own(self, tensors: Mapping[str, T]) -> dict[str, T]:
        """Select the encoder's tensors of a file, by published name."""
        prefix = ""
        for outer in reversed(self.outer):
            if any(name.startswith(outer) for name in tensors):
                prefix = outer
        own = {}
        for name, tensor in tensors.items():
            if name.startswith(prefix) and not name.endswith(".position_ids"):
                own[self.published(name.removeprefix(prefix))] = tensor
        return own


_PROJECTIONS = (
    (".attention.q_proj.", ".attention.attention.query."),
    (".attention.k_proj.", ".attention.attention.key."),
    (".attention.v_proj.", ".attention.attention.value."),
    (".attention.o_proj.", ".attention.output.dense."),
)
_CLIP = EncoderFamily(
    model="CLIPVisionModel",
    blocks="encoder.layers.",
    patches="embeddings.patch_embedding.weight",
    norm=None,
    positions="embeddings.position_embedding.weight",
    class_token="embeddings.class_embedding",
    beside=("post_layernorm.",),
    outer=("vision_model.",),
)
_SIGLIP = replace(
    _CLIP, model="SiglipVisionModel", norm="post_layernorm.", class_token=None, beside=("head.",)
)
_NAFLEX = replace(
    _SIGLIP,
    model="Siglip2VisionModel",
    positions=None,  # resized to each image's grid
    image_size=16,
    native=NativeInput("dy dx c", "equal", is_capped=True),
)
_PIXTRAL = EncoderFamily(
    model="PixtralVisionModel",
    blocks="transformer.layers.",
    patches="patch_conv.weight",
    norm=None,
    positions=None,  # rotary
    class_token=None,
    image_size=16,
    depth=24,
    native=NativeInput("picture", "single"),
)
_QWEN25 = EncoderFamily(
    model="Qwen2_5_VisionTransformerPretrainedModel",
    blocks="blocks.",
    patches="patch_embed.proj.weight",
    norm=None,
    positions=None,  # rotary
    class_token=None,
    outer=("model.visual.", "visual."),
    image_size=14,
    depth=32,
    native=NativeInput("c t dy dx", "packed", block=2, merged="merger.mlp.2.weight"),
)
_QWEN2 = replace(_QWEN25, model="Qwen2VisionTransformerPretrainedModel")
_QWEN3 = replace(
    _QWEN25,
    model="Qwen3VLVisionModel",
    beside=("deepstack_merger_list.",),
    image_size=16,
    depth=27,
    native=replace(_QWEN25.native, merged="merger.linear_fc2.weight"),
)
_GLM = replace(
    _QWEN25,
    model="Glm4vVisionModel",
    norm="post_layernorm.",
    beside=("downsample.", "merger."),  # these two are its connector, glm_merger
    depth=24,
    native=replace(_QWEN25.native, merged=None),
)
_PADDLE = EncoderFamily(
    model="PaddleOCRVisionModel",
    blocks="vision_model.encoder.layers.",
    patches="vision_model.embeddings.patch_embedding.weight",
    norm="vision_model.post_layernorm.",
    positions=None,  # resized to each image's grid
    class_token=None,
    beside=("vision_model.head.", "vision_model.embeddings.packing_position_embedding."),
    image_size=14,
    depth=27,
    native=NativeInput("c dy dx", "packed", is_cut_out=True),
)
_VIDEO_LLAMA = replace(
    _SIGLIP,
    model="VideoLlama3VisionModel",
    positions=None,  # rotary
    beside=(),
    outer=(),
    image_size=16,
    native=NativeInput("c dy dx", "packed", has_merge_sizes=True),
)
_MOONVIT = EncoderFamily(
    model="MoonViTModel",  # of modules.moonvit
    blocks="encoder.blocks.",
    patches="patch_embed.proj.weight",
    norm="encoder.final_layernorm.",
    positions=None,  # resized to each image's grid
    class_token=None,
    outer=("vision_tower.",),
    image_size=14,
    depth=27,
    native=NativeInput("c dy dx", "packed"),
)
_MLCD = replace(  # RICE too
    _CLIP,
    model="MLCDVisionModel",
    positions=None,
    image_size=14,
    native=NativeInput("picture", "equal"),
)
_DINOV2 = EncoderFamily(
    model="Dinov2Model",
    blocks="encoder.layer.",
    patches="embeddings.patch_embeddings.projection.weight",
    norm="layernorm.",
    positions="embeddings.position_embeddings",
    class_token="embeddings.cls_token",
    beside=("embeddings.mask_token",),
    outer=("dinov2.",),
    in_memory=(*_PROJECTIONS, (".mlp.down_proj.", ".mlp.weights_out.")),
)
_INTERN_VIT = replace(
    _DINOV2,
    model="InternVLVisionModel",
    outer=("model.vision_tower.", "vision_tower."),
    in_memory=(),
    image_size=448,
    depth=24,
)
# of multimodal classes whose LLMs take M-RoPE
MROPE_ENCODERS = {
    "qwen2_vl": _QWEN2,
    "qwen2_5_vl": _QWEN25,
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": replace(_QWEN3, model="Qwen3VLMoeVisionModel"),
    "qwen3_5": replace(_QWEN3, model="Qwen3_5VisionModel", beside=()),
    "qwen3_5_moe": replace(_QWEN3, model="Qwen3_5MoeVisionModel", beside=()),
    "glm4v": _GLM,
    "glm4v_moe": replace(_GLM, model="Glm4vMoeVisionModel"),
    "glm_ocr": replace(_GLM, model="GlmOcrVisionModel"),
    "paddleocr_vl": _PADDLE,
}
_WHOLES = {
    **MROPE_ENCODERS,
    "exaone4_5": replace(_QWEN25, model="Exaone4_5_VisionModel"),
}
FAMILIES = {
    "clip": _CLIP,
    "clip_vision_model": _CLIP,
    "siglip": _SIGLIP,  # SigLIP 2 of fixed size too
    "siglip2": _NAFLEX,
    "siglip2_vision_model": _NAFLEX,
    "pixtral": _PIXTRAL,
    **_WHOLES,
    **{f"{kind}_vision": family for kind, family in _WHOLES.items()},
    "glm46v": _GLM,
    "video_llama_3_vision": _VIDEO_LLAMA,
    "mlcd_vision_model": _MLCD,
    "moonvit": _MOONVIT,
    "siglip_vision_model": _SIGLIP,
    "dinov2": _DINOV2,
    "dinov2_with_registers": replace(
        _DINOV2,
        model="Dinov2WithRegistersModel",
        registers=("embeddings.register_tokens",),
        outer=("dinov2_with_registers.",),
    ),
    "dinov3_vit": EncoderFamily(
        model="DINOv3ViTModel",
        blocks="layer.",
        patches="embeddings.patch_embeddings.weight",
        norm="norm.",
        positions=None,  # rotary
        class_token="embeddings.cls_token",
        registers=("embeddings.register_tokens",),
        beside=("embeddings.mask_token",),
        in_memory=(("model.layer.", "layer."),),
    ),
    "vit": replace(
        _DINOV2,
        model="ViTModel",
        beside=("pooler.", "embeddings.mask_token"),
        outer=("vit.",),
        in_memory=(
            ("layers.", "encoder.layer."),
            (".mlp.fc1.", ".intermediate.dense."),
            (".mlp.fc2.", ".output.dense."),
            *_PROJECTIONS,
        ),
    ),
    "internvl_vision": _INTERN_VIT,
    "internvl": _INTERN_VIT,  # a whole InternVL, of which InternViT alone is read
}  # by model_type of config.json
TIMM_VIT = EncoderFamily(
    model=TIMM,
    blocks="blocks.",
    patches="patch_embed.proj.weight",
    norm="norm.",
    positions=None,
    class_token="cls_token",
    registers=("dist_token", "reg_token"),
    beside=("fc_norm.", "attn_pool.", "head.", "blocks_token_only."),
    depth=None,
)


def family_of(model_type: str | None, source: str) -> EncoderFamily:
    """Return the family of a config.json's model_type. Raises UserError for another encoder."""
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    shown = escape(str(model_type))
    first = {family.model: kind for kind, family in reversed(FAMILIES.items())}
    raise UserError(
        f"model.vision.name: {source} has model_type {shown}, which is not a known vision encoder; "
        "sound is not read. Name a timm model (config.json with an architecture; "
        f"RADIO is vit_*_radio_v3 and _v4), or one of {', '.join(sorted(first.values()))}"
    )


def check_plain_vit(tensors: Shapes, architecture: str, source: str) -> None:
    """Raise UserError for a timm model that is no stack of equal blocks over equal patches."""
    if architecture.startswith("naflexvit"):
        raise UserError(
            f"model.vision.name: {source} is timm's form of an encoder of any image size. "
            "Name the same weights for transformers, e.g. google/siglip2-so400m-patch16-naflex"
        )
    width = tensors.get("patch_embed.proj.weight", ())[:1]
    norm = re.compile(r"blocks\.\d+\.norm1\.weight")
    norms = {tensors[name] for name in tensors if norm.fullmatch(name)}
    # a hybrid, or SAM, which has maps instead of sequences
    odd = re.compile(r"patch_embed\.backbone\..*|.*\.attn\.rel_pos_h")
    if not width or norms != {width} or any(map(odd.fullmatch, tensors)):
        raise UserError(
            f"model.vision.name: {source} is not a plain vision transformer ({architecture}): "
            "its features are no grid of equal patches. "
            "Use a ViT, e.g. vit_base_patch16_clip_quickgelu_224.openai"
        )
