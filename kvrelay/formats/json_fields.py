"""JSON files of a model folder: reading one, and typed access to its fields with errors that name file and field.

Null counts as absent. What the fields mean is the matter of `engine/model/files/hf_config.py` and of
`kvrelay/text/hf_vocab.py`.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvrelay.errors import InvalidRequest, shown

Json = Mapping[str, Any]


class JsonFields:
    """The fields of one object of a file."""

    def __init__(self, fields: Json, path: Path) -> None:
        self.fields = fields
        self.path = path

    def error(self, description: str) -> InvalidRequest:
        """Return an error about this file."""
        return InvalidRequest("model", f"{self.path}: {description}")

    def get(self, name: str, default: object = None) -> Any:
        """The value as it is."""
        value = self.fields.get(name)
        return default if value is None else value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(f"{name} must be a number, not {shown(value)}")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise self.error(f"{name} must be a finite number, not {shown(value)}")
        return number

    def integer(self, name: str, default: int | None = None) -> int:
        """An integer."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(f"{name} must be an integer, not {shown(value)}")
        return value

    def optional_integer(self, name: str) -> int | None:
        """An integer, or None where there is none."""
        return None if self.get(name) is None else self.integer(name)

    def flag(self, name: str) -> bool:
        """True or false; false where there is none."""
        value = self.get(name, False)
        if not isinstance(value, bool):
            raise self.error(f"{name} must be true or false, not {shown(value)}")
        return value

    def text(self, name: str) -> str | None:
        """A text, or None where there is none."""
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise self.error(f"{name} must be text, not {shown(value)}")
        return value

    def strings(self, name: str) -> list[str]:
        """A list of texts; empty where there is none."""
        value = self.get(name, [])
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise self.error(f"{name} must be a list, not {shown(value)}")
        for item in value:
            if not isinstance(item, str):
                raise self.error(f"{name} must be a list of texts, but has {shown(item)}")
        return list(value)

    def mapping(self, name: str) -> Json:
        """An object; empty where there is none."""
        value = self.get(name, {})
        if not isinstance(value, Mapping):
            raise self.error(f"{name} must be an object, not {shown(value)}")
        return value

    def token_id(self, name: str) -> int | None:
        """A token id, or None where there is none."""
        value = self.optional_integer(name)
        if value is not None and value < 0:
            raise self.error(f"{name} must be at least 0, not {value}")
        return value

    def token_ids(self, name: str) -> frozenset[int]:
        """A token id or a list of them; empty where there is none."""
        value = self.get(name, [])
        items = value if isinstance(value, list) else [value]
        for item in items:
            if isinstance(item, bool) or not isinstance(item, int):
                raise self.error(f"{name} must be a token id or a list of them, not {shown(value)}")
            if item < 0:
                raise self.error(f"{name} must be at least 0, not {shown(item)}")
        return frozenset(items)


def read_json(path: Path) -> JsonFields:
    """Read a file that holds one object.

    Raises:
        InvalidRequest: It cannot be read, or holds something else; names the field `model`.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidRequest("model", f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise InvalidRequest("model", f"{path} must hold an object, not {shown(content)}")
    return JsonFields(content, path)


def read_optional_json(path: Path) -> JsonFields:
    """Read a file that may be missing, which counts as an empty object.

    Raises:
        InvalidRequest: As `read_json`.
    """
    return read_json(path) if path.exists() else JsonFields({}, path)
