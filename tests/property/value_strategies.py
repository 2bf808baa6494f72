"""Values of any dataclass of ours, drawn or full, from its annotations; for tests of conversions."""

import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import StrEnum
from typing import Any, NewType, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

UINT32 = st.integers(0, 2**32 - 1)
FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


def values_of(kind: Any, **given: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Draw values of a type; of a dataclass every field, those in `given` as told."""
    if isinstance(kind, NewType):
        return values_of(kind.__supertype__)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return st.one_of(*(st.none() if each is type(None) else values_of(each) for each in arguments))
    if origin is tuple:
        return st.lists(values_of(arguments[0]), max_size=3).map(tuple)
    if origin is frozenset:
        # An empty set and none at all are one thing on the wire.
        return st.frozensets(values_of(arguments[0]), min_size=1, max_size=3)
    if origin in (dict, Mapping):
        return st.dictionaries(values_of(arguments[0]), values_of(arguments[1]), max_size=3)
    if is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        drawn = {
            each.name: given[each.name] if each.name in given else values_of(hints[each.name]) for each in fields(kind)
        }
        return st.builds(kind, **drawn)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return st.sampled_from(list(kind))
    plain: dict[Any, st.SearchStrategy[Any]] = {
        int: UINT32,
        float: FLOAT32,
        bool: st.booleans(),
        str: TEXT,
        bytes: st.binary(max_size=8),
    }
    return plain[kind]


def full_value_of(kind: Any, **given: Callable[[], Any]) -> Any:
    """Return a value whose fields all differ from what an absent proto field means."""
    if isinstance(kind, NewType):
        return full_value_of(kind.__supertype__)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return full_value_of(next(each for each in arguments if each is not type(None)))
    if origin is tuple:
        return (full_value_of(arguments[0]),)
    if origin is frozenset:
        return frozenset({full_value_of(arguments[0])})
    if origin in (dict, Mapping):
        return {full_value_of(arguments[0]): full_value_of(arguments[1])}
    if is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        return kind(
            **{
                each.name: given[each.name]() if each.name in given else full_value_of(hints[each.name])
                for each in fields(kind)
            }
        )
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return list(kind)[-1]
    return {int: 3, float: 0.5, bool: True, str: "x", bytes: b"x"}[kind]
