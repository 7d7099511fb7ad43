"""Checks data against a JSON Schema, as far as `goldens/trace.schema.json` uses the language."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

KNOWN = {
    "$schema", "$defs", "$ref", "title", "description", "type", "const", "enum", "anyOf", "properties", "required",
    "additionalProperties", "items", "minItems", "minLength", "minimum",
}  # fmt: skip
TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "boolean": (bool,),
    "null": (type(None),),
}


def faults(data: Any, schema: dict[str, Any], root: dict[str, Any] | None = None, where: str = "") -> Iterator[str]:
    """What does not conform, each with its place. Raises NotImplementedError for a keyword that is not known here.

    >>> list(faults({"a": ["x"]}, {"type": "object", "properties": {"a": {"type": "array", "items": {"const": 1}}}}))
    ["a[0] is 'x', but should be 1"]
    """
    root = schema if root is None else root
    if unknown := sorted(schema.keys() - KNOWN):
        raise NotImplementedError(f"keyword {unknown[0]}")
    if "$ref" in schema:
        yield from faults(data, root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root, where)
        return
    fault = _own_fault(data, schema)
    if fault:
        yield f"{where or 'it'} is {_short(data)}, but should be {fault}"
        return
    if "anyOf" in schema and all(any(faults(data, option, root, where)) for option in schema["anyOf"]):
        yield f"{where or 'it'} is {_short(data)}, which is none of {len(schema['anyOf'])} things that it could be"
    if isinstance(data, dict):
        yield from _object_faults(data, schema, root, where)
    elif isinstance(data, list) and "items" in schema:
        for i, item in enumerate(data):
            yield from faults(item, schema["items"], root, f"{where}[{i}]")


def _own_fault(data: Any, schema: dict[str, Any]) -> str | None:
    if "type" in schema:
        fits = isinstance(data, TYPES[schema["type"]])
        if not fits or (schema["type"] == "integer" and isinstance(data, bool)):
            return str(schema["type"])
    if "const" in schema and (data != schema["const"] or type(data) is not type(schema["const"])):
        return repr(schema["const"])
    if "enum" in schema and data not in schema["enum"]:
        return f"one of {', '.join(map(repr, schema['enum']))}"
    if "minimum" in schema and data < schema["minimum"]:
        return f"at least {schema['minimum']}"
    if len(data) < schema.get("minItems", 0) if isinstance(data, list) else False:
        return f"at least {schema['minItems']} items"
    if len(data) < schema.get("minLength", 0) if isinstance(data, str) else False:
        return "some text"
    return None


def _object_faults(data: dict[str, Any], schema: dict[str, Any], root: dict[str, Any], where: str) -> Iterator[str]:
    properties = schema.get("properties", {})
    more = schema.get("additionalProperties", True)
    for name in schema.get("required", ()):
        if name not in data:
            yield f"{where or 'it'} has no {name}"
    for name, value in data.items():
        place = f"{where}.{name}".lstrip(".")
        if name in properties:
            yield from faults(value, properties[name], root, place)
        elif more is False:
            yield f"{place} is no field that is known"
        elif isinstance(more, dict):
            yield from faults(value, more, root, place)


def _short(data: Any) -> str:
    text = repr(data)
    return text if len(text) <= 60 else f"{text[:57]}..."
