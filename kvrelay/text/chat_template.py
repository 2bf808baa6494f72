"""Chat messages to one prompt text, with the model's own Jinja template.

Owns the sandbox: templates come from model files only, see nothing but the messages, change nothing, and write no more
than a bounded text. A template's complaint is the caller's error and names `chat.messages`.
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox

from kvrelay.errors import InvalidRequest

MAX_RENDERED_CHARS: Final = 16 * 1024 * 1024
"""Longest text a template may produce: above any prompt that a model could take, below what would hurt."""
MAX_LOOP_STEPS: Final = 1_000_000
"""Most steps that the loops of a template take in all: several for each message that could fit a context."""
MESSAGES_FIELD: Final = "chat.messages"
_MAX_FACTOR: Final = 1 << 31
_COUNTED: Final = "kvrelay_counted"
_STEPS_LEFT: Final = "kvrelay_steps_left"


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    """`system`, `user` or `assistant`, or another that the template knows."""
    content: str


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: Jinja source.
        special_tokens: Texts of `bos_token`, `eos_token` and the like.
        max_rendered_chars: Longest result.

    Raises:
        InvalidRequest: The source is not a template; names the field `model`.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], max_rendered_chars: int = MAX_RENDERED_CHARS
    ) -> None:
        self.source = source
        """Jinja source."""
        self._special_tokens = dict(special_tokens)
        self._max_rendered_chars = max_rendered_chars
        try:
            self._template = _environment().from_string(source)
        except Exception as error:
            # Compiled in two steps, by jinja2 and by Python, each of which has errors of its own for what it dislikes.
            raise InvalidRequest("model", f"its chat template cannot be compiled: {error}") from error

    def render(self, messages: Sequence[ChatMessage], add_generation_prompt: bool = True) -> str:
        """Return the prompt text.

        Args:
            messages: The turns, oldest first.
            add_generation_prompt: Whether the header of the assistant's turn goes last.

        Raises:
            InvalidRequest: There is no message, or the template refuses them; names `chat.messages`.
        """
        if not messages:
            raise InvalidRequest(MESSAGES_FIELD, "must hold at least one message")
        values: dict[str, Any] = {
            **self._special_tokens,
            "messages": [{"role": message.role, "content": message.content} for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
            _STEPS_LEFT: itertools.repeat(None, MAX_LOOP_STEPS),
        }
        parts: list[str] = []
        num_chars = 0
        try:
            for part in self._template.generate(values):
                num_chars += len(part)
                if num_chars > self._max_rendered_chars:
                    raise InvalidRequest(
                        MESSAGES_FIELD, f"the rendered chat is longer than {self._max_rendered_chars} characters"
                    )
                parts.append(part)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
            # A template is a program of the model's; whatever it trips over, these messages made it do so.
            raise InvalidRequest(MESSAGES_FIELD, f"the model's chat template refuses them: {error}") from error
        return "".join(parts)


class _GenerationTag(jinja2.ext.Extension):
    """Accepts `{% generation %} ... {% endgeneration %}`, with which some templates mark what is trained on."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own protocol

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Return the block's content as it is."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """jinja2's sandbox without the two operators that turn a short template into a huge value."""

    intercepted_binops = frozenset({"*", "**"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        """Parse, and let every loop count its steps: a short template could take hours otherwise."""
        template = super()._parse(source, name, filename)
        for loop in template.find_all(jinja2.nodes.For):
            loop.iter = jinja2.nodes.Filter(loop.iter, _COUNTED, [], [], None, None, lineno=loop.lineno)
        return template

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Multiply numbers and refuse the rest; templates have no use for it."""
        is_small = all(isinstance(value, int | float) and abs(value) < _MAX_FACTOR for value in (left, right))
        if operator != "*" or not is_small:
            raise jinja2.TemplateRuntimeError(f"{operator!r} is limited to products of small numbers in chat templates")
        return left * right


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag])
    # jinja2's own filter escapes HTML characters, which would change what the model reads.
    environment.filters["tojson"] = _to_json
    environment.filters[_COUNTED] = _counted
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


@jinja2.pass_context
def _counted(context: jinja2.runtime.Context, values: Iterable[Any]) -> Iterator[Any]:
    steps_left: Iterator[None] = context[_STEPS_LEFT]
    for value in values:
        if next(steps_left, _STEPS_LEFT) is not None:
            raise jinja2.TemplateRuntimeError(f"its loops take more than {MAX_LOOP_STEPS} steps")
        yield value


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)
