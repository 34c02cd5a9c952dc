"""The keys of a configuration: the class of its sections, and the marks that a key's declaration
has beside its type and meaning.

    packs_per_microbatch: Free[Measured[int]] = Field(1, ge=1)

Every key is Free, Kept or Fixed: whether a resumed run may change it.
"""

import enum
import functools
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

Path = tuple[str, ...]
Mark = TypeVar("Mark")
T = TypeVar("T")

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"  # also a folder's, or a part of a key
ELEMENT = "*"  # stands in a key path for the number of a list's element


class OnResume(enum.Enum):
    """Rule for a key of a resumed run whose value differs from the checkpoint's."""

    FREE = (
        "how a run runs or where its files lie, not what it computes: "
        "ranks compare data and weights by content"
    )
    KEPT = "a change makes another run of it: only where --allow-change names the key"
    FIXED = (
        "a checkpoint means nothing without it: its tensors have no place, or its cursor no meaning"
    )


@dataclass(frozen=True)
class EntersCalibration:
    """Mark a key that costs depend on: a calibration counts for one value of it."""


@dataclass(frozen=True)
class InsteadOf:
    """Mark a key that excludes another of its section.

    An override of one replaces the other, where the file sets that.
    """

    key: str
    is_needed: bool = True  # one of them is


@dataclass(frozen=True)
class NamesFiles:
    """Mark a key that is a path, or a list of paths. `${NAME}` in it is an environment variable."""

    is_path: Callable[[str], bool] = lambda text: True  # where the key holds other texts, too


Free = Annotated[T, OnResume.FREE]
Kept = Annotated[T, OnResume.KEPT]
Fixed = Annotated[T, OnResume.FIXED]
Measured = Annotated[T, EntersCalibration()]
Files = Annotated[T, NamesFiles()]


def marked(model: type[BaseModel], kind: type[Mark]) -> dict[Path, Mark]:
    """Return the keys below `model` that bear a mark of this kind, each with its mark."""
    return {
        path: mark
        for path, field in all_fields(model)
        for mark in field.metadata
        if isinstance(mark, kind)
    }


def all_fields(model: type[BaseModel], prefix: Path = ()) -> Iterator[tuple[Path, FieldInfo]]:
    """Yield every key path below `model` with its declaration, sections before their keys; list
    elements are `*`.
    """
    for name, field in model.model_fields.items():
        path = (*prefix, name)
        yield path, field
        if (section := section_of(field.annotation)) is not None:
            yield from all_fields(section, path)
        elif (section := _element_section(field.annotation)) is not None:
            yield from all_fields(section, (*path, ELEMENT))


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the section class that a field declares, or may be null; None for a plain value."""
    kinds = [annotation]
    if is_optional(annotation):
        kinds = [kind for kind in typing.get_args(annotation) if kind is not types.NoneType]
    if len(kinds) == 1 and isinstance(kinds[0], type) and issubclass(kinds[0], BaseModel):
        return kinds[0]
    return None


def is_optional(annotation: Any) -> bool:
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return is_union and types.NoneType in typing.get_args(annotation)


def _element_section(annotation: Any) -> type[BaseModel] | None:
    """Return the section class of the elements of a list, which may be optional or annotated."""
    found = (
        section_of(annotation) or _element_section(annotation)
        for annotation in typing.get_args(annotation)
    )
    return next((section for section in found if section is not None), None)


def declared_path(path: Path) -> Path:
    """Return a key path as it is declared, with * for the numbers of elements."""
    return tuple(ELEMENT if part.isdecimal() else part for part in path)


def _exponent_number(value: Any) -> Any:
    # YAML 1.1 reads 1e-3 as text (it wants 1.0e-3), which is how everybody writes a learning rate.
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value):
        return float(value)
    return value


Float = Annotated[float, BeforeValidator(_exponent_number)]


def wrong_together(message: str) -> PydanticCustomError:
    """Return the error of values that do not go together; `message` names the keys and the
    remedy.
    """
    return PydanticCustomError("cross_field", "{message}", {"message": message})


class Section(BaseModel):
    """A group of keys: unknown keys are errors, no silent conversions, values cannot change after
    loading.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def value_at(self, path: Path) -> Any:
        """Return the value of a key, None below a section that is null."""
        return functools.reduce(
            lambda section, name: section and getattr(section, name), path, self
        )

    def changed(self, changes: Mapping[str, Any]) -> Self:
        """Return a copy with other, unchecked, values at these dotted keys; a section that is null
        stays.
        """
        section = self
        for key, value in changes.items():
            name, _, below = key.partition(".")
            if below:
                inner = getattr(section, name)
                value = inner and inner.changed({below: value})
            section = section.model_copy(update={name: value})
        return section

    @model_validator(mode="before")
    @classmethod
    def _fill_in_sections(cls, content: Any) -> Any:
        """Replace a needed section that is null or missing by {}, so that errors name the keys it
        lacks.
        """
        if content is None:
            content = {}
        if isinstance(content, dict):
            for name, field in cls.model_fields.items():
                if field.is_required() and section_of(field.annotation):
                    content = {name: {}} | content
        return content

    @model_validator(mode="after")
    def _check_alternatives(self) -> Self:
        for (name, *below), mark in marked(type(self), InsteadOf).items():
            if below:  # the section that declares it has checked it
                continue
            section, other = mark.key.split(".")
            unset = (getattr(self, name), getattr(self, other)).count(None)
            if mark.is_needed and unset != 1:
                raise wrong_together(
                    f"{mark.key}: set exactly one of {mark.key} and {section}.{name}"
                )
            if unset == 0:
                raise wrong_together(f"{section}.{name}: set either it or {mark.key}, not both")
        return self
