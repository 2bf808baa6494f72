"""Calls into the tokenizers library that a model file can make fail, with one typed error for all the ways it fails in.

Used by the two loaders beside it. Knows nothing of what is built.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from kvrelay.errors import InvalidRequest, shown

_Result = TypeVar("_Result")
_PANIC = "PanicException"
"""What a failed assertion in a Rust library comes as; no `Exception`, and under no name that could be imported."""


def guarded(path: Path, build: Callable[[], _Result]) -> _Result:
    """Return what `build` returns.

    Args:
        path: The file whose content is built from, for the message.
        build: Calls the library, which raises plain `Exception` for whatever it dislikes.

    Raises:
        InvalidRequest: The library refuses the file; names the field `model`.
    """
    try:
        return build()
    except InvalidRequest:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
            raise
        raise InvalidRequest("model", f"{path} is not a sound tokenizer: {shown(str(error))}") from error
