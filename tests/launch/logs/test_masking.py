"""No secret of a job's is stored or told, however its output is cut, and in whatever form."""

from __future__ import annotations

import base64
import html
import json
import random
import re
from urllib.parse import quote, quote_plus

import pytest

from spotguard.events import env
from spotguard.events.masking import Masker, know, secrets_in, secrets_of, shown_arguments
from spotguard.events.masking import masked as in_all

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


SECRET = 'hünter 2/"&<x>+='
FORMS = {
    "plain": SECRET,
    "url": quote(SECRET, safe=""),
    "form": quote_plus(SECRET),
    "lower": re.sub("%..", lambda found: found[0].lower(), quote(SECRET)),
    "json": json.dumps(SECRET)[1:-1],
    "json in json": json.dumps(json.dumps({"a": SECRET})),
    "json as it is": json.dumps(SECRET, ensure_ascii=False)[1:-1],
    "repr": repr([SECRET]),
    "html": html.escape(SECRET, quote=False),
    **{
        f"base64 {n}": base64.b64encode(b"abc"[:n] + SECRET.encode() + b"zz").decode()
        for n in (0, 1, 2)
    },
    "base64 url": base64.urlsafe_b64encode(b"a" + SECRET.encode()).decode(),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_secret_is_masked_in_each_form_that_texts_have(form: str) -> None:
    """As an exception, a client or a URL shows it, in a log and in data; a word of it is left."""
    text = f"cannot log in with {FORMS[form]} today"
    in_log = masked([text.encode()], {SECRET}).decode()
    know({"WORD": SECRET})
    in_data = in_all({"message": text})["message"]
    for said in (in_log, in_data):
        assert said.startswith("cannot log in with ")
        assert said.endswith(" today")
        assert "***" in said
        assert len(said) <= len(text) - len(SECRET) + 14
        assert "nter" not in said


@pytest.mark.parametrize("key", ["PEM", "JSON", "URL"])
def test_what_is_secret_within_a_value_is_masked_alone(key: str) -> None:
    """Single lines of a PEM, a service account's fields, and the password of a URL."""
    pem = "-----BEGIN KEY-----\nMIIEvgIBADANBg\nkqhkiG9w0BAQEF\nAASCBKgwgg\n-----END KEY-----\n"
    values = {
        "PEM": pem,
        "JSON": json.dumps({"type": "service_account", "private_key": pem, "client": "me"}),
        "URL": "postgres://me:p%40ss-word@db/x",
    }
    said = {"PEM": ["kqhkiG9w0BAQEF", "AASCBKgwgg"], "URL": ["p@ss-word", "p%40ss-word"]}
    know({key: values[key]})
    for part in said.get(key, said["PEM"]):
        for text in (f"line: {part}", f"line: {base64.b64encode(part.encode()).decode()}"):
            masked_text = in_all({"problem": text})["problem"]
            assert masked_text.startswith("line: ***")
            assert len(masked_text) <= len("line: ***Q==")
    assert in_all({"problem": "of a service_account"})["problem"] == "of a service_account"


def test_what_a_run_is_made_of_is_not_masked() -> None:
    """A variable that is called like a region or a run spoils prose only; a key spoils all."""
    know({"AWS_REGION": "us-east-1", "JOB": "train-gpt"}, ["--api-key", "us-west-9"])
    data = {
        "region": "us-east-1",
        "cluster": "sg-train-gpt-1",
        "why": "us-east-1",
        "detail": "no nodes in us-east-1",
        "rows": [["us-west-9", 3, None, 0.5]],
        "spec": {"env": {"AWS_REGION": "us-east-1"}, "args": ["us-west-9"]},
    }
    assert in_all(data, kept=frozenset({"spec"})) == {
        **data,
        "why": "***",
        "detail": "no nodes in ***",
        "rows": [["***", 3, None, 0.5]],
    }


def test_a_secret_that_a_text_was_cut_in_is_masked() -> None:
    """What is shortened before it is written ends in a secret's beginning."""
    know({"WORD": "correct-horse-battery-staple"})
    said = f"{'x ' * 60}correct-horse-ba"
    for end in ("", "…"):
        assert in_all({"message": said + end})["message"] == f"{'x ' * 60}***"
    assert in_all({"message": "correct-horse-ba"})["message"] == "correct-horse-ba"


def test_arguments_that_are_named_as_keys_are_masked_where_they_are_shown() -> None:
    """In every spelling of argparse, Hydra and Fire; other arguments are as they were given."""
    given = [
        *("--api-key", "abc", "--token=abc", "password=abc", "+wandb.key=abc", "--hf_token", "abc"),
        *("--db", "postgres://me:abc@host/x", "-pwd", "abc", "--auth", "--verbose"),
        *("--lr", "0.1", "--max-tokens", "100", "--tokenizer=gpt2", "train.py", "--monkey", "1"),
    ]
    shown = shown_arguments(given)
    assert "abc" not in " ".join(shown)
    assert shown[-10:] == given[-10:]
    assert shown[:4] == ["--api-key", "***", "--token=***", "password=***"]
    assert secrets_in(["--api-key", "abcdefgh", "--token=x"]) == {"abcdefgh"}
