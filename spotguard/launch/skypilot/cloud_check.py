"""What `sky check` says of a cloud that is not enabled: its reason in one sentence, no secrets."""

from __future__ import annotations

import os
import re

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_REASON = re.compile(
    r"Reason \[[^\]]*compute[^\]]*\]:(.*?)(?=\n\s*Reason \[|\n[^\n]*Enabled infra|\Z)", re.DOTALL
)
_NOISE = re.compile(
    r"Allowed (?:clusters|contexts):|Unavailable contexts[^:]*:|[\u2500-\u257f]+|(?<=: )disabled\."
)
_SENTENCE = re.compile(r"(.+?[.!])(?:\s|$)")
_SECRETS = re.compile(
    r"(?i:(?P<name>\b[\w-]*(?:secret|token|passw(?:or)?d|api_?key|access_?key)[\w-]*\"?\s*[=:]\s*)"
    r"[^\s,;]+)"
    r"|(?:AKIA|ASIA)[A-Z0-9]{12,}"
    r"|(?<![\w/+=])[A-Za-z0-9/+=]{40}(?![\w/+=])"
    r"|\beyJ[\w.-]{20,}|\bya29\.[\w.-]+"
    r"|://[^/\s@]+@"
)
"""How logins of AWS, of Google and in general look, and what is named to be one."""
_SECRET_NAMES = re.compile(r"SECRET|TOKEN|PASSWORD|PASSWD|KEY|CREDENTIAL")
_SHORTEST_SECRET = 6
_MOST_CHARS = 300


def reason_in(printed: str) -> str:
    """Return the reason among what `sky check` printed, in its own words."""
    found = _REASON.search(_COLOUR.sub("", printed))
    said = (found[1] if found else "").strip()
    if said.startswith("Traceback"):
        said = said.splitlines()[-1]
    words = " ".join(_NOISE.sub(" ", said).split())
    sentence = _SENTENCE.match(words)
    told = without_secrets(sentence[1] if sentence else words)
    return told[:_MOST_CHARS] or "SkyPilot does not say why"


def without_secrets(words: str) -> str:
    """Return the words without what looks like a secret, or is one in this environment."""
    for name, value in os.environ.items():
        if _SECRET_NAMES.search(name.upper()) and len(value) >= _SHORTEST_SECRET:
            words = words.replace(value, "***")
    return _SECRETS.sub(lambda found: f"{found['name'] or ''}***", words)
