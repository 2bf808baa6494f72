"""Text from outside that is no Unicode: found and named before it meets something that can only fail on it.

Python keeps bytes that are not UTF-8 (in arguments, variables, file names, standard input) as lone surrogates, which no
message on the wire can hold.
"""

import re
from typing import Final

from kvrelay.errors import InvalidRequest

_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_FIRST_BYTE: Final = 0xDC00
"""What Python adds to a byte that it keeps."""


def check_unicode(field: str, text: str) -> None:
    """Refuse a text that no encoding of Unicode can hold.

    Raises:
        InvalidRequest: It has a lone surrogate; names `field` and the character's position from 0.
    """
    problem = unicode_problem(text)
    if problem:
        raise InvalidRequest(field, problem)


def unicode_problem(text: str) -> str:
    """Return what is wrong with a text that is no Unicode; empty if nothing is."""
    found = _SURROGATE.search(text)
    if found is None:
        return ""
    code = ord(found[0])
    if 0x80 <= code - _FIRST_BYTE <= 0xFF:
        return f"byte 0x{code - _FIRST_BYTE:02x} at character {found.start()} is not UTF-8 text"
    return f"U+{code:04X} at character {found.start()} is half of a surrogate pair, which is no text"
