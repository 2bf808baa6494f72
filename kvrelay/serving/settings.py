"""Settings of one process: each defined once, read from flag, environment, YAML file or default.

Owns precedence (flag > environment > YAML > default) and the messages when a value is wrong. Never starts anything. A
role derives from `RoleSettings`, adds fields with a description, and calls `parse_settings` in its `__main__`.
"""

import argparse
import difflib
import os
import re
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, NoReturn, Self, TypeVar

import yaml
from pydantic import Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from kvrelay.unicode_text import unicode_problem

ENV_PREFIX: Final = "KVRELAY_"
SECTIONS: Final = ("gateway", "prefill", "decode", "serve")
"""Top-level YAML keys that hold one role's own settings; every other key is for all roles that know it."""

_SERVICE_LINK: Final = re.compile(r"(tcp|udp|sctp)://[^/\s]+:\d+")

_OUT_OF_RANGE: Final = frozenset({"greater_than", "greater_than_equal", "less_than", "less_than_equal"})
_SWITCH: Final = "switch of the command"

LogLevel = Literal["debug", "info", "warning", "error"]
Settings = TypeVar("Settings", bound="RoleSettings")


class RoleSettings(BaseSettings):
    """What every role is told. Frozen; a field is a flag `--name`, a variable `KVRELAY_NAME` and a YAML key `name`."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", enable_decoding=False)

    section: ClassVar[str] = ""
    """Name of the role's own section in a YAML file."""

    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 for every interface")
    port: int = Field(0, ge=0, le=65535, description="port to listen on; 0 takes any free one")
    log_level: LogLevel = Field("info", description="least severe log event that is written")
    log_json: bool | None = Field(None, description="one JSON object per log line; default: when stderr is no terminal")
    otlp_endpoint: str | None = Field(
        None, description="OTLP/gRPC collector for trace spans, e.g. http://127.0.0.1:4317; default: none"
    )
    drain_timeout_s: float = Field(
        30.0, ge=0, allow_inf_nan=False, description="longest time that running requests get to finish after SIGTERM"
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Take only what is passed in: `parse_settings` reads the other sources, so that it knows who said what."""
        return (init_settings,)

    @classmethod
    def parse(cls, argv: Sequence[str], prog: str) -> Self:
        """Same as `parse_settings`."""
        return parse_settings(cls, argv, prog)


def parse_settings(
    cls: type[Settings], argv: Sequence[str], prog: str, switches: Mapping[str, str] | None = None
) -> Settings:
    """Return the role's settings from flags, environment, `--config` file and defaults.

    Args:
        cls: The role's settings.
        argv: Arguments without the program's name.
        prog: The program's name in messages.
        switches: Flags of the command itself, which are no settings, with their help: accepted and passed over.

    Raises:
        SystemExit: 0 after `--help`; 2 after a message that names the flag, variable or key, its value and what is
            allowed.
    """
    return _parse(cls, argv, prog, os.environ, switches or {})


def flag_name(field: str) -> str:
    """Return the flag of a setting, e.g. `--log-level`."""
    return "--" + field.replace("_", "-")


def env_name(field: str) -> str:
    """Return the environment variable of a setting, e.g. `KVRELAY_LOG_LEVEL`."""
    return ENV_PREFIX + field.upper()


def _parse(
    cls: type[Settings], argv: Sequence[str], prog: str, env: Mapping[str, str], switches: Mapping[str, str]
) -> Settings:
    parser = _build_parser(cls, prog)
    for switch, description in switches.items():
        # Parsing must leave no trace of it among the settings.
        parser.add_argument(switch, action="store_true", default=argparse.SUPPRESS, dest=_SWITCH, help=description)
    flags = vars(parser.parse_args(list(argv)))
    flags.pop(_SWITCH, None)
    config = flags.pop("config") or env.get(env_name("config"))
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}

    def put(field: str, value: Any, origin: str) -> None:
        if isinstance(value, str) and (problem := unicode_problem(value)):
            _fail(prog, f"{origin}: {problem}")
        values[field], origins[field] = value, origin

    if config:
        for field, value in _read_yaml(cls, Path(config), prog).items():
            put(field, value, f"key {field!r} in {config}")
    for field in cls.model_fields:
        # An empty variable is how compose files and shells say "not set".
        text = env.get(env_name(field))
        if text and _is_service_link(field, text):
            if flags[field] is None:
                _tell(prog, f"{env_name(field)}={text} describes a Kubernetes Service, not a setting: ignored")
        elif text:
            put(field, _split_list(cls.model_fields[field], text), env_name(field))
    for field, value in flags.items():
        if value is not None:
            put(field, _split_list(cls.model_fields[field], value), flag_name(field))
    try:
        return cls(**values)
    except ValidationError as error:
        lines = [_describe(cls, details, origins) for details in error.errors()]
        _fail(prog, "\n".join(dict.fromkeys(lines)))


def _is_service_link(field: str, text: str) -> bool:
    """Whether a variable is what Kubernetes puts into every container for a Service that is called like its prefix."""
    return field == "port" and _SERVICE_LINK.fullmatch(text) is not None


def _tell(prog: str, message: str) -> None:
    sys.stderr.write("".join(f"{prog}: {line}\n" for line in message.splitlines()))


def _fail(prog: str, message: str) -> NoReturn:
    _tell(prog, message)
    raise SystemExit(2)


def _build_parser(cls: type[RoleSettings], prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description=(cls.__doc__ or "").partition("\n")[0],
        epilog="Precedence: flag, environment variable, --config file, default.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", metavar="FILE", help=f"YAML file; keys are the flags' names with underscores [{env_name('config')}]"
    )
    for field, info in cls.model_fields.items():
        text = f"{info.description or ''} [{env_name(field)}]"
        if not info.is_required() and info.default not in (None, ""):
            text += f" (default: {_shown(info.default)})"
        text = text.replace("%", "%%")
        if _is_bool(info):
            parser.add_argument(flag_name(field), action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            choices = allowed_values(info)
            metavar = "{" + ",".join(choices) + "}" if choices else field.rpartition("_")[2].upper()
            parser.add_argument(flag_name(field), default=None, metavar=metavar, help=text)
    return parser


def _read_yaml(cls: type[RoleSettings], path: Path, prog: str) -> dict[str, Any]:
    """Return the file's values for this role: the shared keys, then its own section's."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        _fail(prog, f"--config: cannot read {path}: {error.strerror}")
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        _fail(prog, f"--config: {path} is not YAML: {' '.join(str(error).split())}")
    if content is None:
        return {}
    if not isinstance(content, dict):
        _fail(prog, f"--config: {path} must hold keys and values, not a {type(content).__name__}")
    section = content.get(cls.section) if cls.section else None
    if section is not None and not isinstance(section, dict):
        _fail(prog, f"--config: section {cls.section!r} in {path} must hold keys and values")
    shared = {key: value for key, value in content.items() if key not in SECTIONS}
    if len(shared) < len(content):
        # A file with sections describes a whole cluster, so a shared key may be meant for other roles.
        shared = {key: value for key, value in shared.items() if key in cls.model_fields}
    merged = {**shared, **(section or {})}
    for key in merged:
        if key not in cls.model_fields:
            near = difflib.get_close_matches(str(key), cls.model_fields, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(cls.model_fields)}"
            _fail(prog, f"--config: unknown key {key!r} in {path}{hint}")
    return {key: value for key, value in merged.items() if value is not None}


def _describe(cls: type[RoleSettings], details: ErrorDetails, origins: Mapping[str, str]) -> str:
    field = str(details["loc"][0]) if details["loc"] else ""
    info = cls.model_fields.get(field)
    if info is None:
        return details["msg"].removeprefix("Value error, ")
    if details["type"] == "missing":
        return f"{flag_name(field)} is required (or {env_name(field)}, or key {field!r} in the --config file)"
    origin = origins.get(field, flag_name(field))
    choices = allowed_values(info)
    if choices:
        allowed = f"must be one of {', '.join(choices)}"
    elif details["type"] in _OUT_OF_RANGE:
        allowed = f"must be {allowed_range(info)}"
    else:
        allowed = _lowered(details["msg"])
    return f"{origin}: {details['input']!r} is not valid: {allowed}"


def allowed_range(info: FieldInfo) -> str:
    """Return the bounds of a number in words, e.g. `from 0 to 65535`; empty if it has none."""
    bounds = {
        name: value
        for constraint in info.metadata
        for name in ("ge", "gt", "le", "lt")
        if (value := getattr(constraint, name, None)) is not None
    }
    if bounds.keys() == {"ge", "le"}:
        return f"from {bounds['ge']} to {bounds['le']}"
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    return " and ".join(f"{word} {bounds[name]}" for name, word in words.items() if name in bounds)


def _lowered(message: str) -> str:
    message = message.removeprefix("Value error, ")
    return message[:1].lower() + message[1:]


def _shown(value: Any) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, tuple | list | frozenset | set):
        return ",".join(_shown(item) for item in value)
    return str(value)


def _inner_types(annotation: Any) -> list[Any]:
    """Return the annotation's alternatives without None."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [part for part in typing.get_args(annotation) if part is not type(None)]
    return [annotation]


def _is_bool(info: FieldInfo) -> bool:
    return _inner_types(info.annotation) == [bool]


def _is_list(info: FieldInfo) -> bool:
    return any(typing.get_origin(kind) in (tuple, list, set, frozenset) for kind in _inner_types(info.annotation))


def _split_list(info: FieldInfo, value: Any) -> Any:
    if isinstance(value, str) and _is_list(info):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


def allowed_values(info: FieldInfo) -> tuple[str, ...]:
    """Return the closed set that a setting takes its value (or its list's items) from; empty if it is open."""
    values: list[str] = []
    for kind in _inner_types(info.annotation):
        inner = typing.get_args(kind)[0] if typing.get_origin(kind) in (tuple, list, set, frozenset) else kind
        if isinstance(inner, type) and issubclass(inner, Enum):
            values += [str(member.value) for member in inner]
        elif typing.get_origin(inner) is Literal:
            values += [str(member) for member in typing.get_args(inner)]
    return tuple(values)
