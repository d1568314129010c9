"""Requests as pydantic models: the types of their fields, and errors as sentences that name the field.

A null field has its default, as if it were missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Self

from annotated_types import Ge, Le
from pydantic import (
    AfterValidator,
    AliasChoices,
    AllowInfNan,
    BaseModel,
    BeforeValidator,
    Field,
    Strict,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from ikcli.server.http import fields as f
from ikcli.server.http.errors import ApiError, bad_request
from ikcli.server.http.limits import Limits
from ikcli.settings.sampling import INT32


def whole(value: Any) -> Any:
    """Convert a JSON number without a fraction to an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**63 else value


def _single(value: float) -> float:
    if abs(value) > 3.4e38:
        raise PydanticCustomError("finite_number", "too large for a 32-bit number")
    return value


def _texts(value: Any, info: ValidationInfo) -> tuple[str, ...]:
    return f.texts(value, str(info.field_name))


Flag = Annotated[bool, Strict()]
Whole = Annotated[int, Strict(), BeforeValidator(whole)]
Number = Annotated[float, Strict(), AllowInfNan(False), AfterValidator(_single)]
DraftLength = Annotated[int, Strict(), Ge(0), Le(INT32), BeforeValidator(whole)]
Probability = Annotated[float, Strict(), Ge(0), Le(1), AllowInfNan(False)]
Text = Annotated[str, Strict()]
Texts = Annotated[tuple[str, ...], BeforeValidator(_texts, json_schema_input_type=str | list[str])]


def shown_as(**schema: Any) -> WithJsonSchema:
    """Mark a field that this JSON schema documents and other code checks."""
    return WithJsonSchema(schema)


def field(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    names: str = "",
) -> Any:
    """Declare a field; `names` are its spellings, separated by blanks, of which the first in a request counts."""
    alias = AliasChoices(*names.split()) if names else None
    return Field(default, ge=low, gt=above, le=high, validation_alias=alias, description=help)


def required(help: str) -> Any:
    """Declare a field without default."""
    return Field(description=help)


class Body(BaseModel, frozen=True, defer_build=True):
    """Base class of request bodies, each of which pydantic prepares when it is first used."""

    @classmethod
    def checked(cls, body: Mapping[str, Any], limits: Limits | None = None) -> Self:
        """Return the request in a body. Without `limits`, checks that need a model are skipped."""
        try:
            return cls.model_validate({name: v for name, v in body.items() if v is not None}, context=limits)
        except ValidationError as e:
            raise _refusal(cls, e.errors(include_url=False)[0]) from None


def names_of(body: type[Body], name: str) -> tuple[str, ...]:
    """Return the names of a field in requests, its primary name first."""
    alias = body.model_fields[name].validation_alias
    return tuple(map(str, alias.choices)) if isinstance(alias, AliasChoices) else (name,)


@cache
def properties_of(body: type[Body]) -> dict[str, dict[str, Any]]:
    """Return the JSON schemas of the fields by all their names."""
    found: dict[str, dict[str, Any]] = {}
    properties = body.model_json_schema()["properties"]
    for name, item in body.model_fields.items():
        names = names_of(body, name)
        schema = {key: value for key, value in properties[names[0]].items() if key not in ("title", "default")}
        about = {"description": schema.pop("description")} if "description" in schema else {}
        if schema and not item.is_required():
            kinds = [kind for kind in schema.get("anyOf", [schema]) if kind != {"type": "null"}]
            schema = {"anyOf": [*kinds, {"type": "null"}]}
        found |= dict.fromkeys(names, schema | about)
    return found


def schema_of(body: type[Body]) -> dict[str, Any]:
    """Return the JSON schema of a request."""
    required = [name for name, item in body.model_fields.items() if item.is_required()]
    found = {"type": "object", "properties": properties_of(body)}
    return found | ({"required": required} if required else {})


_EXPECTED = {
    "bool_type": "true or false",
    "int_type": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "dict_type": "an object",
    "list_type": "an array",
    "model_type": "an object",
}


def _refusal(body: type[Body], error: ErrorDetails) -> ApiError:
    """Return pydantic's finding as a sentence of this server."""
    name, kind, value = ".".join(map(str, error["loc"])), error["type"], error["input"]
    if kind == "finite_number" or (kind == "float_type" and type(value) is int):
        return bad_request(f"{name} must be a finite number")
    if kind == "missing":
        return bad_request(f"{name} is required")
    expected = error["ctx"]["expected"].replace("'", "") if kind == "literal_error" else _EXPECTED.get(kind)
    if expected is None:
        schema = properties_of(body)[name]["anyOf"][0]
        expected = f.range_text(schema.get("minimum"), schema.get("maximum"), schema.get("exclusiveMinimum"))
    return bad_request(f"{name} must be {expected}, not {f.shown(value)}")
