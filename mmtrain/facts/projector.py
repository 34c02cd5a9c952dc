"""The connector of a run, as `model.projector` and the sizes of its models have it."""

from collections.abc import Iterator, Sequence

from mmtrain.base.errors import UserError
from mmtrain.base.printing import escape
from mmtrain.config.model import ProjectorSection
from mmtrain.connectors import (
    CONNECTORS,
    DEFAULT_FACTOR,
    DEFAULT_NORM_EPS,
    NEWLINE,
    Branch,
    Newline,
    Operation,
    Sizes,
    Swiglu,
    factor_of,
)
from mmtrain.facts.settings import Settings
from mmtrain.facts.shapes import ParameterShape

_STOCK_SETTINGS = {
    "projector_hidden_act": "gelu",
    "adapter_layer_norm_eps": 1e-6,
    "multimodal_projector_bias": True,
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
    for key in ("factor", "width"):
        value = getattr(section, key)
        if value is not None and not _reads(operations, key):
            types = [name for name, make in CONNECTORS.items() if _reads(make(Sizes(1, 2)), key)]
            raise UserError(
                f"model.projector.{key}: {value}, but {section.type} has none. "
                f"Leave it out, or set model.projector.type to one of {', '.join(types)}."
            )
    inner = sizes.width or llm_width
    if inner % 2 and any(isinstance(operation, Swiglu) for operation in operations):
        raise UserError(
            f"model.projector.width: {inner} cannot be halved into values and their gates. "
            "Set an even number"
        )
    if newline:
        operations += (Newline(NEWLINE, llm_width),)
    return operations


def _reads(operations: Sequence[Operation], key: str) -> bool:
    """Whether operations read this key of model.projector."""
    return key in {operation.key for operation in operations}


def has_deepstack(section: ProjectorSection) -> bool:
    """Whether a connector takes the features of DeepStack's blocks."""
    operations = connector(section, 1, 2, deepstack=1)
    return any(isinstance(operation, Branch) for operation in operations)


def refuse_other_settings(config_json: Settings, source: str) -> None:
    """Raise UserError for a config.json with another function of a connector's tensors."""
    settings = _STOCK_SETTINGS
    # its linear layers have no bias, by default and here
    if config_json.get("model_type") == "mistral3":
        settings = {**settings, "multimodal_projector_bias": False}
    for key, ours in settings.items():
        if (value := config_json.get(key, ours)) != ours:
            raise UserError(
                f"{source}: its projector has {key} {escape(str(value))}, but this run has {ours}"
            )


def reduction(section: ProjectorSection) -> int:
    """Return `factor_of` the connector `model.projector`; raises what `connector` raises."""
    return factor_of(connector(section, 1, 2))


def connector_parameters(operations: Sequence[Operation]) -> Iterator[ParameterShape]:
    """Yield the parameters of a connector, by global names (`projector.linear_1.weight`)."""
    for operation in operations:
        for name, shape in operation.shapes().items():
            yield ParameterShape(f"projector.{name}", shape)
