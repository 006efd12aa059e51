"""Reading JSON bodies: every error names the field at fault."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

from kvscout_common.errors import InvalidArgument

Fields = Mapping[str, Any]


def json_object(value: object, name: str = "body") -> Fields:
    """Return the value as a JSON object.

    Raises:
        InvalidArgument: It is something else.
    """
    if not isinstance(value, dict):
        raise InvalidArgument("must be a JSON object", field=name)
    return value


def json_objects(value: object, name: str) -> list[Fields]:
    """Return the value as a list of JSON objects, an empty one if it is null.

    Raises:
        InvalidArgument: It is something else.
    """
    if value is None:
        return []
    if not isinstance(value, list):
        raise InvalidArgument("must be a list", field=name)
    return [json_object(entry, f"{name}.{index}") for index, entry in enumerate(value)]


def integer(fields: Fields, name: str, default: int, *, minimum: int, maximum: int = 2**63 - 1) -> int:
    """Return an integer within its bounds, the default if it is absent or null."""
    value = optional_integer(fields, name, minimum=minimum, maximum=maximum)
    return default if value is None else value


def optional_integer(
    fields: Fields, name: str, *, minimum: int, maximum: int = 2**63 - 1, prefix: str = ""
) -> int | None:
    """Return an integer within its bounds, None if it is absent or null."""
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
        bounds = f"of at least {minimum}" if maximum == 2**63 - 1 else f"between {minimum} and {maximum}"
        raise InvalidArgument(f"must be an integer {bounds}", field=prefix + name)
    return value


def boolean(fields: Fields, name: str, *, default: bool = False, prefix: str = "") -> bool:
    """Return True or false, the default if it is absent or null."""
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise InvalidArgument("must be true or false", field=prefix + name)
    return value


def string(fields: Fields, name: str) -> str:
    """Return a string that is not empty; "" if it is absent or null."""
    value = fields.get(name)
    if value is None:
        return ""
    if not isinstance(value, str) or not value:
        raise InvalidArgument("must be a string that is not empty", field=name)
    return value


def mapping(fields: Fields, name: str) -> Fields:
    """Return an object, an empty one if it is absent or null."""
    value = fields.get(name)
    return {} if value is None else json_object(value, name)


def token_ids(value: list[object], name: str) -> array[int]:
    """Return a JSON list as token ids.

    Raises:
        InvalidArgument: It holds anything else.
    """
    try:
        return array("I", value)  # type: ignore[arg-type]
    except (TypeError, OverflowError):
        raise InvalidArgument(
            "must be a string or one list of token ids between 0 and 4294967295", field=name
        ) from None
