"""What a Hugging Face folder says of its tokens: special ones, which of them end a turn, and the chat template.

Several files say so, and not all of them the whole: config.json, generation_config.json, tokenizer_config.json,
special_tokens_map.json, chat_template.jinja, and the added tokens of tokenizer.json. How text is cut into tokens is
`kvrelay/text/hf_tokenizer.py`'s matter.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvrelay.errors import InvalidRequest, shown
from kvrelay.formats.json_fields import JsonFields, read_optional_json
from kvrelay.text.chat_template import ChatTemplate
from kvrelay.text.roles import find_roles

_SPECIAL_NAMES: Final = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True, slots=True)
class HfVocabulary:
    """Tokens with a role."""

    end_token_ids: frozenset[int]
    """Tokens that end a turn or the text."""
    special_token_ids: frozenset[int]
    """Control tokens."""
    bos_token_id: int | None
    adds_bos: bool | None
    """Whether BOS goes before a text; None = the folder does not say."""
    special_tokens: Mapping[str, str]
    """`bos_token`, `eos_token` and the like, as chat templates know them."""
    chat_template: str | None
    """Jinja source. None: the model has no chat format."""


def read_hf_vocabulary(folder: Path) -> HfVocabulary:
    """Return what the folder's files say of its tokens; each file may be missing.

    Raises:
        InvalidRequest: A file is broken, or names a token that cannot be; names the field `model`.
    """
    config = read_optional_json(folder / "tokenizer_config.json")
    named_ends: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        named_ends |= read_optional_json(folder / name).token_ids("eos_token_id")
    tokenizer = read_optional_json(folder / "tokenizer.json")
    added = _added_tokens(tokenizer)
    spelled = {content: token_id for token_id, (content, _) in added.items()}
    texts = _special_tokens(read_optional_json(folder / "special_tokens_map.json")) | _special_tokens(config)
    named = {name: _id_of(tokenizer, spelled, text) for name, text in texts.items()}
    if (eos := named.get("eos_token")) is not None:
        named_ends.add(eos)
    named_ids = {texts[name]: token_id for name, token_id in named.items() if token_id is not None}
    special = {token_id for token_id, (_, is_special) in added.items() if is_special}
    source = _chat_template(folder, config)
    roles = find_roles(
        {**named_ids, **spelled},
        marked=added,
        control=special,
        named=named_ids.values(),
        named_ends=named_ends,
        template=ChatTemplate(source, texts) if source else None,
    )
    adds_bos = config.get("add_bos_token")
    return HfVocabulary(
        end_token_ids=roles.end_token_ids,
        # Whether other tokens are text is for these files to say: what they mark as text, models are to show.
        special_token_ids=frozenset(special) | (roles.end_token_ids & roles.control_token_ids),
        bos_token_id=named.get("bos_token"),
        adds_bos=adds_bos if isinstance(adds_bos, bool) else None,
        special_tokens=texts,
        chat_template=source,
    )


def _added_tokens(tokenizer: JsonFields) -> dict[int, tuple[str, bool]]:
    """Spelling, and whether it is a special token, by token id."""
    entries = tokenizer.get("added_tokens", [])
    if not isinstance(entries, list):
        raise tokenizer.error(f"added_tokens must be a list, not {shown(entries)}")
    added: dict[int, tuple[str, bool]] = {}
    for entry in entries:
        fields = JsonFields(entry if isinstance(entry, dict) else {}, tokenizer.path)
        token_id, content = fields.token_id("id"), fields.text("content")
        if token_id is None or content is None:
            raise tokenizer.error(f"added_tokens must hold objects with id and content, not {shown(entry)}")
        added[token_id] = (content, fields.flag("special"))
    return added


def _special_tokens(config: JsonFields) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _SPECIAL_NAMES:
        value = config.get(name)
        # Older files hold an object, newer ones the text.
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _id_of(tokenizer: JsonFields, spelled: Mapping[str, int], text: str) -> int | None:
    if text in spelled:
        return spelled[text]
    model = tokenizer.get("model", {})
    vocab: Any = model.get("vocab") if isinstance(model, dict) else None
    token_id = vocab.get(text) if isinstance(vocab, dict) else None
    return token_id if isinstance(token_id, int) and token_id >= 0 else None


def _chat_template(folder: Path, config: JsonFields) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest("model", f"cannot read {path}: {error}") from error
    template = config.get("chat_template")
    if isinstance(template, list):
        entries = [entry for entry in template if isinstance(entry, dict)]
        template = next((entry.get("template") for entry in entries if entry.get("name") == "default"), None)
    return template if isinstance(template, str) else None
