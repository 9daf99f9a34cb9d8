"""No secret of a job's is stored, however its output is cut."""

from __future__ import annotations

import random

import pytest

from spotguard.events import env
from spotguard.launch.logs.masking import Masker, secrets_of

PEM = "-----BEGIN-----\nabcdefgh\nijklmnop\n-----END-----"
SECRETS = {"hunter2hunter2", "hunter2", PEM, "aaaaaa", "aaaaaabbbbbb", "abcabcabd"}


def masked(pieces: list[bytes], secrets: set[str] = SECRETS) -> bytes:
    """Return what is said of a stream that comes in pieces."""
    stream = Masker(secrets).stream()
    return b"".join([*map(stream.feed, pieces), stream.rest()])


@pytest.mark.parametrize("secret", sorted(SECRETS))
def test_a_secret_is_masked_wherever_it_is_cut(secret: str) -> None:
    """In two chunks, over a line's end, byte by byte: nothing of it is left."""
    text = f"before {secret} after\nhunt {secret}".encode()
    whole = masked([text])
    assert secret.encode() not in whole
    assert b"***" in whole
    for cut in range(len(text) + 1):
        assert masked([text[:cut], text[cut:]]) == whole
    assert masked([text[i : i + 1] for i in range(len(text))]) == whole


def test_a_longer_secret_is_masked_whole() -> None:
    """Not only the shorter one that it begins with."""
    assert masked([b"x hunter2", b"hunter2 y"]) == b"x *** y"
    assert masked([b"aaaaaa", b"bbbbb!"]) == b"***bbbbb!"
    assert masked([b"abcabcabcabd"]) == b"abc***"


def test_other_words_come_through_as_they_are() -> None:
    """Also binary ones, and what only looks like the beginning of a secret."""
    noise = random.Random(1).randbytes(10_000)
    assert masked([noise[:5000], noise[5000:]]) == noise
    assert masked([b"hunter", b" went"]) == b"hunter went"
    assert masked([b"hunter2"], set()) == b"hunter2"


def test_the_end_of_a_stream_is_not_held_back() -> None:
    """What may be a secret's beginning waits only as long as something may follow."""
    stream = Masker({"hunter2"}).stream()
    assert stream.feed(b"the end is hunt") == b"the end is "
    assert stream.rest() == b"hunt"


def test_a_text_as_python_shows_it_is_masked_too() -> None:
    """A traceback or a dict prints a key of several lines with backslashes."""
    assert b"abcdefgh" not in masked([repr({"key": PEM}).encode()])


def test_which_variables_are_secret() -> None:
    """Those of `env`, by name; the attempt's key; whatever is called a key or a token."""
    environ = {
        env.SECRETS: "DATA,SHORT",
        "DATA": "s3cret-place",
        "SHORT": "4",
        env.KEY: "0123456789abcdef",
        "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI",
        "TOKENIZERS_PARALLELISM": "parallel",
        "HOME": "/home/somebody",
        "HF_TOKEN": "hf_abcdefgh",
    }
    assert secrets_of(environ) == {
        *("s3cret-place", "0123456789abcdef", "wJalrXUtnFEMI", "hf_abcdefgh"),
    }
