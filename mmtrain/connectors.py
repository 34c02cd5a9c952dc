"""Connectors between encoder and LLM, as operations of their stock classes, without torch.

features (N, T, W) of T = n x n patches --operations, in fp32--> image embeddings (N, T / factor^2,
    D)

The torch module, its parameters, what they cost and where an export puts them follow from the
operations. A connector is a function here and its name in `ConnectorName`; its parameters have the
names of the stock class.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

Shapes = dict[str, tuple[int, ...]]  # of parameters, by name
NEWLINE = "image_newline"
DEFAULT_FACTOR = 2  # of the stock classes that shuffle
DEFAULT_NORM_EPS = 1e-6  # of transformers' LLMs where config.json says nothing


class Cost(NamedTuple):
    """Work and memory of a row of features in an operation."""

    products: int = 0
    trained: bool = False  # its weights
    for_weights: float = 0  # elements that are kept for the gradient of weights that train
    for_input: float = 0  # elements that are kept for the gradient of its input


@dataclass(frozen=True)
class Operation:
    """A step of a connector. A new one is a class here and a module in model/trained."""

    key = ""  # of model.projector, that not all operations read

    def shapes(self) -> Shapes:
        """Return the shapes of its parameters by name."""
        return {}

    def cost(self, trained: Collection[str]) -> Cost:
        """Return the cost of a row where parameters of these names train."""
        return Cost()


@dataclass(frozen=True)
class Shuffle(Operation):
    """Make one position of `factor` x `factor` patches, with all features (pixel unshuffle)."""

    factor: int
    # a feature of all patches, then the next, instead of patch by patch
    feature_first: bool = False
    key = "factor"


@dataclass(frozen=True)
class Pool(Operation):
    """The mean of `factor` x `factor` positions."""

    factor: int
    key = "factor"


@dataclass(frozen=True)
class RmsNorm(Operation):
    name: str
    width: int
    eps: float

    def shapes(self) -> Shapes:
        return {f"{self.name}.weight": (self.width,)}

    def cost(self, trained: Collection[str]) -> Cost:
        # its input, whether or not its own parameters train
        if trained:
            return Cost(trained=True, for_weights=self.width)
        return Cost(for_input=self.width)


class LayerNorm(RmsNorm):
    def shapes(self) -> Shapes:
        return {f"{self.name}.{part}": (self.width,) for part in ("weight", "bias")}


@dataclass(frozen=True)
class Linear(Operation):
    name: str
    inputs: int
    outputs: int
    has_bias: bool = True

    def shapes(self) -> Shapes:
        shapes: Shapes = {f"{self.name}.weight": (self.outputs, self.inputs)}
        if self.has_bias:
            shapes[f"{self.name}.bias"] = (self.outputs,)
        return shapes

    def cost(self, trained: Collection[str]) -> Cost:
        return Cost(self.inputs * self.outputs, f"{self.name}.weight" in trained, self.inputs)


@dataclass(frozen=True)
class Gelu(Operation):
    """The exact GELU."""

    width: int

    def cost(self, trained: Collection[str]) -> Cost:
        return Cost(for_input=self.width)


@dataclass(frozen=True)
class Swiglu(Operation):
    """The first half of the features, times SiLU of the second."""

    width: int  # of its input
    key = "width"

    def cost(self, trained: Collection[str]) -> Cost:
        # both halves of its input, and the gates' SiLU
        return Cost(for_input=1.5 * self.width)


@dataclass(frozen=True)
class Gated(Operation):
    """Linear layers gate_proj, up_proj and down_proj without bias: down(SiLU(gate(x)) * up(x))."""

    name: str
    inputs: int
    inner: int
    outputs: int
    key = "width"

    def shapes(self) -> Shapes:
        return {
            f"{self.name}.gate_proj.weight": (self.inner, self.inputs),
            f"{self.name}.up_proj.weight": (self.inner, self.inputs),
            f"{self.name}.down_proj.weight": (self.outputs, self.inner),
        }

    def cost(self, trained: Collection[str]) -> Cost:
        # its input, what both make of it, the gates' SiLU, and the product
        return Cost(
            self.inner * (2 * self.inputs + self.outputs),
            bool(trained),
            self.inputs + self.inner,
            3 * self.inner,
        )


class Branch(Operation):
    """Begin DeepStack's next merger: the operations behind it read that block's features."""


@dataclass(frozen=True)
class Newline(Operation):
    """A trained embedding behind each line of an image's positions."""

    name: str
    width: int

    def shapes(self) -> Shapes:
        return {self.name: (self.width,)}


@dataclass(frozen=True)
class Sizes:
    """Sizes on which a connector's operations depend."""

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
    return first, Gelu(sizes.llm_width), Linear("linear_2", sizes.llm_width, sizes.llm_width)


def shuffle_swiglu(sizes: Sizes) -> tuple[Operation, ...]:
    """AyaVisionMultiModalProjector.

    `alignment_intermediate_size` is the LLM's hidden size unless it is given.
    """
    inner = sizes.width or sizes.llm_width
    return (
        Shuffle(sizes.factor),
        LayerNorm("layernorm", sizes.shuffled, eps=1e-6),
        Linear("linear_1", sizes.shuffled, inner),
        Swiglu(inner),
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
        *mlp2x_gelu(sizes)[1:],
    )


def mlp2x_gelu_pool(sizes: Sizes) -> tuple[Operation, ...]:
    """PerceptionLMMultiModalProjector: the mean is taken of embeddings, behind both layers."""
    return (*mlp2x_gelu(sizes), Pool(sizes.factor))


def norm_merge_mlp2x(sizes: Sizes) -> tuple[Operation, ...]:
    """Mistral3MultiModalProjector, and LightOnOcr's; its norm has the eps of the LLM's norms."""
    return (
        RmsNorm("norm", sizes.vision_width, sizes.norm_eps),
        Shuffle(sizes.factor, feature_first=True),
        Linear("merging_layer", sizes.shuffled, sizes.vision_width, has_bias=False),
        Linear("linear_1", sizes.vision_width, sizes.llm_width, has_bias=False),
        Gelu(sizes.llm_width),
        Linear("linear_2", sizes.llm_width, sizes.llm_width, has_bias=False),
    )


def patch_merger(sizes: Sizes) -> tuple[Operation, ...]:
    """The merger behind RICE (LLaVA-OneVision 1.5, Innovator-VL) and MoonViT (Kimi-VL)."""
    return LayerNorm("norm", sizes.vision_width, eps=1e-5), *_merged(sizes)


def patch_merger_rms(sizes: Sizes) -> tuple[Operation, ...]:
    """Exaone4_5_PatchMerger, which is Qwen2.5-VL's."""
    return RmsNorm("norm", sizes.vision_width, eps=1e-6), *_merged(sizes)


def qwen_merger(sizes: Sizes) -> tuple[Operation, ...]:
    """PatchMerger of Qwen2-VL, Qwen3_5VisionPatchMerger."""
    return LayerNorm("norm", sizes.vision_width, eps=1e-6), *_merged(sizes)


def qwen_merger_deepstack(sizes: Sizes) -> tuple[Operation, ...]:
    """Qwen3VLVisionPatchMerger, and one with a later norm for each of DeepStack's blocks.

    DeepStack: arXiv:2406.04334.
    """
    branches: list[Operation] = []
    for number in range(sizes.deepstack):
        name = f"deepstack.{number}."
        shuffle, *mapped = _merged(sizes, name)
        branches += [Branch(), shuffle, LayerNorm(f"{name}norm", sizes.shuffled, eps=1e-6), *mapped]
    return *qwen_merger(sizes), *branches


def _merged(sizes: Sizes, name: str = "") -> tuple[Operation, ...]:
    first = Linear(f"{name}linear_1", sizes.shuffled, sizes.shuffled)
    return (
        Shuffle(sizes.factor),
        first,
        Gelu(sizes.shuffled),
        Linear(f"{name}linear_2", sizes.shuffled, sizes.llm_width),
    )


def glm_merger(sizes: Sizes) -> tuple[Operation, ...]:
    """Glm4vVisionModel's downsample, a convolution over 2 x 2 patches, and its PatchMerger.

    GLM-OCR has it, too.
    """
    width = sizes.llm_width
    return (
        Shuffle(sizes.factor, feature_first=True),
        Linear("downsample", sizes.shuffled, width),
        Linear("proj", width, width, has_bias=False),
        LayerNorm("post_projection_norm", width, eps=1e-5),
        Gelu(width),
        Gated("mlp", width, sizes.width or 3 * width, width),
    )


ConnectorName = Literal[
    "linear",
    "mlp2x_gelu",
    "shuffle_swiglu",
    "shuffle_linear",
    "shuffle_mlp2x_gelu",
    "mlp2x_gelu_pool",
    "norm_merge_mlp2x",
    "patch_merger",
    "patch_merger_rms",
    "qwen_merger",
    "qwen_merger_deepstack",
    "glm_merger",
]
CONNECTORS: dict[str, Callable[[Sizes], tuple[Operation, ...]]] = {
    name: globals()[name] for name in get_args(ConnectorName)
}


def factor_of(operations: Sequence[Operation]) -> int:
    """Return the patches a side that become one position of the LLM; 1: each patch is one."""
    for operation in operations:
        if isinstance(operation, Shuffle | Pool):
            return operation.factor
    return 1
