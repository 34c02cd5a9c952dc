"""The connectors between encoder and LLM: each as the operations of the stock class that has it,
without torch.

features (N, T, W) of T = n x n patches --operations, in fp32--> image embeddings (N, T / factor^2,
    D)

The torch module, its parameters, what they cost and where an export puts them follow from the
operations. A connector is a function here and its name in `ProjectorSection.type`; its parameters
have the names of the stock class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from mmtrain.base.errors import UserError
from mmtrain.base.printing import escape
from mmtrain.config.model import ProjectorSection
from mmtrain.facts.shapes import ParameterShape

_STOCK_SETTINGS = {
    "projector_hidden_act": "gelu",
    "adapter_layer_norm_eps": 1e-6,
    "multimodal_projector_bias": True,
}
NEWLINE = "image_newline"
DEFAULT_FACTOR = 2  # of the stock classes that shuffle
DEFAULT_NORM_EPS = 1e-6  # of transformers' LLMs where config.json says nothing


@dataclass(frozen=True, slots=True)
class Shuffle:
    """`factor` x `factor` patches become one position with all of their features (pixel
    unshuffle).
    """

    factor: int
    # a feature of all patches, then the next, instead of patch by patch
    feature_first: bool = False


@dataclass(frozen=True, slots=True)
class Pool:
    """The mean of `factor` x `factor` positions."""

    factor: int


@dataclass(frozen=True, slots=True)
class LayerNorm:
    name: str
    width: int
    eps: float


@dataclass(frozen=True, slots=True)
class RmsNorm:
    name: str
    width: int
    eps: float


@dataclass(frozen=True, slots=True)
class Linear:
    name: str
    inputs: int
    outputs: int
    has_bias: bool = True


@dataclass(frozen=True, slots=True)
class Gelu:
    """The exact GELU."""


@dataclass(frozen=True, slots=True)
class Swiglu:
    """Of 2 F features the first F, times SiLU of the others."""


@dataclass(frozen=True, slots=True)
class Gated:
    """Linear layers gate_proj, up_proj and down_proj without bias: down(SiLU(gate(x)) * up(x))."""

    name: str
    inputs: int
    inner: int
    outputs: int


@dataclass(frozen=True, slots=True)
class Branch:
    """Begin the next of DeepStack's mergers: the operations behind it read that block's
    features.
    """


@dataclass(frozen=True, slots=True)
class Newline:
    """A trained embedding behind each line of an image's positions."""

    name: str
    width: int


Operation = Shuffle | Pool | LayerNorm | RmsNorm | Linear | Gelu | Swiglu | Gated | Branch | Newline


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a connector's operations depend on."""

    vision_width: int  # features of a patch
    llm_width: int  # the LLM's hidden size
    factor: int = DEFAULT_FACTOR
    width: int | None = None  # `model.projector.width`
    norm_eps: float = DEFAULT_NORM_EPS  # of the LLM's norms
    deepstack: int = 0  # blocks whose features DeepStack takes

    @property
    def shuffled(self) -> int:  # features of a position behind the shuffle
        return self.vision_width * self.factor**2


def linear(sizes: Sizes) -> tuple[Operation, ...]:
    """One affine map, LLaVA's first projector (arXiv:2304.08485, section 4.1)."""
    return (Linear("linear_1", sizes.vision_width, sizes.llm_width),)


def mlp2x_gelu(sizes: Sizes) -> tuple[Operation, ...]:
    """LLaVA-1.5's projector (arXiv:2310.03744): LlavaMultiModalProjector."""
    first = Linear("linear_1", sizes.vision_width, sizes.llm_width)
    return first, Gelu(), Linear("linear_2", sizes.llm_width, sizes.llm_width)


def shuffle_swiglu(sizes: Sizes) -> tuple[Operation, ...]:
    """AyaVisionMultiModalProjector; `alignment_intermediate_size` is the LLM's hidden size unless
    it is given.
    """
    inner = sizes.width or sizes.llm_width
    return (
        Shuffle(sizes.factor),
        LayerNorm("layernorm", sizes.shuffled, eps=1e-6),
        Linear("linear_1", sizes.shuffled, inner),
        Swiglu(),
        Linear("linear_2", inner // 2, sizes.llm_width),
    )


def shuffle_linear(sizes: Sizes) -> tuple[Operation, ...]:
    """Idefics3Connector, and SmolVLM's."""
    return Shuffle(sizes.factor), Linear("proj", sizes.shuffled, sizes.llm_width, has_bias=False)


def shuffle_mlp2x_gelu(sizes: Sizes) -> tuple[Operation, ...]:
    """InternVLMultiModalProjector behind InternVL's shuffle."""
    return (
        Shuffle(sizes.factor),
        LayerNorm("layer_norm", sizes.shuffled, eps=1e-5),
        Linear("linear_1", sizes.shuffled, sizes.llm_width),
        Gelu(),
        Linear("linear_2", sizes.llm_width, sizes.llm_width),
    )


def mlp2x_gelu_pool(sizes: Sizes) -> tuple[Operation, ...]:
    """PerceptionLMMultiModalProjector: the mean is taken of embeddings, behind both linear
    layers.
    """
    return (*mlp2x_gelu(sizes), Pool(sizes.factor))


def norm_merge_mlp2x(sizes: Sizes) -> tuple[Operation, ...]:
    """Mistral3MultiModalProjector, and LightOnOcr's; its norm takes its eps from the LLM's
    configuration.
    """
    return (
        RmsNorm("norm", sizes.vision_width, sizes.norm_eps),
        Shuffle(sizes.factor, feature_first=True),
        Linear("merging_layer", sizes.shuffled, sizes.vision_width, has_bias=False),
        Linear("linear_1", sizes.vision_width, sizes.llm_width, has_bias=False),
        Gelu(),
        Linear("linear_2", sizes.llm_width, sizes.llm_width, has_bias=False),
    )


def patch_merger(sizes: Sizes) -> tuple[Operation, ...]:
    """The merger of LLaVA-OneVision 1.5 and Innovator-VL behind RICE, and Kimi-VL's projector
    behind MoonViT.
    """
    return LayerNorm("norm", sizes.vision_width, eps=1e-5), *_merged(sizes)


def patch_merger_rms(sizes: Sizes) -> tuple[Operation, ...]:
    """Exaone4_5_PatchMerger, which is Qwen2.5-VL's."""
    return RmsNorm("norm", sizes.vision_width, eps=1e-6), *_merged(sizes)


def qwen_merger(sizes: Sizes) -> tuple[Operation, ...]:
    """PatchMerger of Qwen2-VL, Qwen3_5VisionPatchMerger."""
    return LayerNorm("norm", sizes.vision_width, eps=1e-6), *_merged(sizes)


def qwen_merger_deepstack(sizes: Sizes) -> tuple[Operation, ...]:
    """Qwen3VLVisionPatchMerger, and one with a later norm for each of DeepStack's blocks
    (arXiv:2406.04334).
    """
    branches: list[Operation] = []
    for name in (f"deepstack.{number}." for number in range(sizes.deepstack)):
        shuffle, *mapped = _merged(sizes, name)
        branches += [Branch(), shuffle, LayerNorm(f"{name}norm", sizes.shuffled, eps=1e-6), *mapped]
    return *qwen_merger(sizes), *branches


def _merged(sizes: Sizes, name: str = "") -> tuple[Operation, ...]:
    first = Linear(f"{name}linear_1", sizes.shuffled, sizes.shuffled)
    return (
        Shuffle(sizes.factor),
        first,
        Gelu(),
        Linear(f"{name}linear_2", sizes.shuffled, sizes.llm_width),
    )


def glm_merger(sizes: Sizes) -> tuple[Operation, ...]:
    """Glm4vVisionModel's downsample, a convolution over 2 x 2 patches, and Glm4vVisionPatchMerger;
    GLM-OCR's too.
    """
    width = sizes.llm_width
    return (
        Shuffle(sizes.factor, feature_first=True),
        Linear("downsample", sizes.shuffled, width),
        Linear("proj", width, width, has_bias=False),
        LayerNorm("post_projection_norm", width, eps=1e-5),
        Gelu(),
        Gated("mlp", width, sizes.width or 3 * width, width),
    )


CONNECTORS: dict[str, Callable[[Sizes], tuple[Operation, ...]]] = {
    name: globals()[name] for name in get_args(ProjectorSection.model_fields["type"].annotation)
}


def connector(
    section: ProjectorSection,
    vision_width: int,
    llm_width: int,
    newline: bool = False,
    norm_eps: float = DEFAULT_NORM_EPS,
    deepstack: int = 0,
) -> tuple[Operation, ...]:
    """Return the operations of a connector (`model.projector`), in the order in which they run.

    Raises UserError for a factor or width of another type.
    """
    sizes = Sizes(
        vision_width,
        llm_width,
        section.factor or DEFAULT_FACTOR,
        section.width,
        norm_eps,
        deepstack,
    )
    operations = CONNECTORS[section.type](sizes)
    for key, kinds in (("factor", (Shuffle, Pool)), ("width", (Swiglu, Gated))):
        if getattr(section, key) is not None and not _has(operations, kinds):
            types = [name for name, make in CONNECTORS.items() if _has(make(Sizes(1, 2)), kinds)]
            raise UserError(
                f"model.projector.{key}: {getattr(section, key)}, but {section.type} has none. "
                "Leave it out, or set "
                f"model.projector.type to one of {', '.join(types)}."
            )
    if _has(operations, (Swiglu,)) and (sizes.width or llm_width) % 2:
        raise UserError(
            f"model.projector.width: {sizes.width or llm_width} cannot be halved into values and "
            "their gates. Set an "
            "even number"
        )
    return (*operations, Newline(NEWLINE, llm_width)) if newline else operations


def has_deepstack(section: ProjectorSection) -> bool:
    """Whether a connector takes the features of DeepStack's blocks."""
    return _has(connector(section, 1, 2, deepstack=1), (Branch,))


def refuse_other_settings(config_json: Mapping[str, Any], source: str) -> None:
    """Raise UserError for a stock model's config.json whose connector is another function of the
    same tensors.
    """
    settings = _STOCK_SETTINGS
    # whose linear layers have no bias, by default and here
    if config_json.get("model_type") == "mistral3":
        settings = {**settings, "multimodal_projector_bias": False}
    for key, ours in settings.items():
        if (value := config_json.get(key, ours)) != ours:
            raise UserError(
                f"{source}: its projector has {key} {escape(str(value))}, but this run has {ours}"
            )


def reduction(section: ProjectorSection) -> int:
    """`factor_of` the connector that `section` (`model.projector`) names; raises what `connector`
    raises.
    """
    return factor_of(connector(section, 1, 2))


def factor_of(operations: Sequence[Operation]) -> int:
    """How many patches a side become one position of the LLM; 1: each patch is one."""
    return next(
        (operation.factor for operation in operations if isinstance(operation, Shuffle | Pool)), 1
    )


def connector_parameters(operations: Sequence[Operation]) -> Iterator[ParameterShape]:
    """The parameters of a connector, by global names (`projector.linear_1.weight`)."""
    for operation in operations:
        if isinstance(operation, LayerNorm):
            yield ParameterShape(f"projector.{operation.name}.weight", (operation.width,))
            yield ParameterShape(f"projector.{operation.name}.bias", (operation.width,))
        elif isinstance(operation, RmsNorm):
            yield ParameterShape(f"projector.{operation.name}.weight", (operation.width,))
        elif isinstance(operation, Linear):
            yield ParameterShape(
                f"projector.{operation.name}.weight", (operation.outputs, operation.inputs)
            )
            if operation.has_bias:
                yield ParameterShape(f"projector.{operation.name}.bias", (operation.outputs,))
        elif isinstance(operation, Gated):
            for layer in ("gate_proj", "up_proj"):
                shape = (operation.inner, operation.inputs)
                yield ParameterShape(f"projector.{operation.name}.{layer}.weight", shape)
            shape = (operation.outputs, operation.inner)
            yield ParameterShape(f"projector.{operation.name}.down_proj.weight", shape)
        elif isinstance(operation, Newline):
            yield ParameterShape(f"projector.{operation.name}", (operation.width,))


def _has(operations: Sequence[Operation], kinds: tuple[type[Operation], ...]) -> bool:
    return any(isinstance(operation, kinds) for operation in operations)
