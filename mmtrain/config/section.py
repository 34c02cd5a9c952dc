"""The base class of all sections of a configuration: strict, frozen, with checks across keys."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from mmtrain.config.keys import InsteadOf, Path, section_of


def _exponent_number(value: Any) -> Any:
    # YAML 1.1 reads 1e-3 as text (it wants 1.0e-3), which is how everybody writes a learning rate.
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value):
        return float(value)
    return value


def wrong_together(message: str) -> PydanticCustomError:
    """Return the error of values that do not go together; `message` names the keys and the
    remedy.
    """
    return PydanticCustomError("cross_field", "{message}", {"message": message})


Float = Annotated[float, BeforeValidator(_exponent_number)]


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
        """Give a section that is null or left out no keys, so that errors name the keys that it
        lacks.
        """
        if content is not None and not isinstance(content, dict):
            return content
        needed = [name for name, field in cls.model_fields.items() if field.is_required()]
        return {name: {} for name in needed if section_of(cls.model_fields[name].annotation)} | (
            content or {}
        )

    @model_validator(mode="after")
    def _check_alternatives(self) -> Self:
        for name, mark in (
            (n, mark) for n, field in type(self).model_fields.items() for mark in field.metadata
        ):
            if isinstance(mark, InsteadOf):
                section, other = mark.key.split(".")
                set_keys = sum(getattr(self, key) is not None for key in (name, other))
                if mark.is_needed and set_keys != 1:
                    raise wrong_together(
                        f"{mark.key}: set exactly one of {mark.key} and {section}.{name}"
                    )
                if set_keys == 2:
                    raise wrong_together(f"{section}.{name}: set either it or {mark.key}, not both")
        return self
