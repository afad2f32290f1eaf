"""Whether a value is what a JSON schema says: the part of the language that Kubernetes' schemas need.

Known words: type, properties, additionalProperties, required, items, enum, $ref into $defs. Others raise.
"""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

Schema = Mapping[str, Any]
_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
}
_KNOWN = {"type", "properties", "additionalProperties", "required", "items", "enum", "$ref"}


@cache
def kinds() -> Schema:
    """The kinds of Kubernetes and its training operator that are known here, by name."""
    text = Path(__file__).with_name("kubernetes_schema.json").read_text(encoding="utf-8")
    found: Schema = json.loads(text)["$defs"]
    return found


def faults(value: Any, schema: Schema, where: str, defs: Schema) -> Iterator[str]:
    """What in `value` breaks the schema, each with its place, as in `spec.replicas: …`."""
    if unknown := schema.keys() - _KNOWN:
        raise ValueError(f"{where}: the schema has {', '.join(sorted(unknown))}, which is not known here")
    if "$ref" in schema:
        yield from faults(value, defs[schema["$ref"].removeprefix("#/$defs/")], where, defs)
        return
    if "type" in schema and not _is_of(value, schema["type"]):
        yield f"{where}: {value!r} is no {schema['type']}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where}: {value!r} is none of {', '.join(map(repr, schema['enum']))}"
    if isinstance(value, dict):
        yield from _of_object(value, schema, where, defs)
    if isinstance(value, list) and "items" in schema:
        for index, each in enumerate(value):
            yield from faults(each, schema["items"], f"{where}[{index}]", defs)


def _of_object(value: dict[str, Any], schema: Schema, where: str, defs: Schema) -> Iterator[str]:
    properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{where}: {name} is missing"
    for name, each in value.items():
        if name in properties:
            yield from faults(each, properties[name], f"{where}.{name}", defs)
        elif others is False:
            yield f"{where}: there is no field {name!r}"
        elif isinstance(others, Mapping):
            yield from faults(each, others, f"{where}.{name}", defs)


def _is_of(value: Any, kind: str | list[str]) -> bool:
    names = [kind] if isinstance(kind, str) else kind
    if isinstance(value, bool):  # an int to Python, and to nobody else
        return "boolean" in names
    return any(isinstance(value, _TYPES[name]) for name in names)
