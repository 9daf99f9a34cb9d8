"""Small JSON objects that prove their own bytes: claims and leases.

    {"attempt":2,...,"checksum":"sha256:<64 hex digits>"}

The checksum stands last and covers the bytes of the object without it. What an older spotguard
wrote has none, and is taken as it is.
"""

from __future__ import annotations

import hashlib

from spotguard.events.untrusted import Refused

_START = b',"checksum":"sha256:'
_END = b'"}'
_LENGTH = len(_START) + 64 + len(_END)


def with_checksum(raw: bytes) -> bytes:
    """Return the bytes of a JSON object that is not empty, with its checksum as the last field."""
    return raw[:-1] + _START + hashlib.sha256(raw).hexdigest().encode() + _END


def check_bytes(raw: bytes, what: str) -> None:
    """Check that the bytes of `what` are those that `with_checksum` returned, or have no checksum.

    Raises:
        Refused: they have one, and it is another one's.
    """
    end = raw[-_LENGTH:]
    unproven = b"checksum" not in end and b"sha256:" not in end  # one flip spoils one word only
    if not unproven and raw != with_checksum(raw[:-_LENGTH] + b"}"):
        raise Refused(f"{what} is damaged: its bytes are not those that were written")
