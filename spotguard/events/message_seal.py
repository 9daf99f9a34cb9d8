"""Words between ranks that nobody else can say: each carries a proof that needs the attempt's key.

torch's TCP store asks nobody who he is, and listens on all of a machine's addresses: whoever
reaches its port can read and write. So the controller gives each launch a key, in the environment
of the job, and what ranks tell each other is proved by an HMAC over the run, the attempt, the name
of the word and the word: it is worth nothing under another name, or in another attempt.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
from typing import TYPE_CHECKING

from spotguard.events import env

if TYPE_CHECKING:
    from collections.abc import Mapping

log = logging.getLogger("spotguard")


class Lives:
    """Counts the runs that one process has had, one after the other."""

    over = 0
    """How many are over: the same on all ranks, which end a run together."""

    @classmethod
    def round(cls, environ: Mapping[str, str] = os.environ) -> str:
        """Return what no earlier run of these processes had, nor one before torchrun's restart."""
        restarts = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return f"{restarts}.{cls.over}" if cls.over else restarts


class Seal:
    """What proves the words of one attempt. Without a key, as under plain torchrun, none are."""

    def __init__(self, key: str = "", *context: str) -> None:
        """`context` says where words hold: the run, the attempt, the round."""
        self._key = key.encode()
        self._context = context
        self._warned: set[str] = set()

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Seal:
        """Return the seal of the attempt, and of torchrun's round in it, that this process is in.

        So nothing that was said before a restart inside one torchrun is heard after it, nor what
        was said in a run of these processes before this one.
        """
        about = (environ.get(env.RUN_ID, ""), environ.get(env.ATTEMPT, ""))
        return cls(environ.get(env.KEY, ""), *about, Lives.round(environ))

    def proof(self, name: str, word: str) -> str:
        """Return the proof of a word: no other name or attempt has the same. "" without a key."""
        if not self._key:
            return ""
        said = json.dumps([*self._context, name, word]).encode()
        return hmac.new(self._key, said, hashlib.sha256).hexdigest()

    def close(self, name: str, word: str) -> str:
        """Return what is said for `word`: its proof, and itself."""
        return f"{self.proof(name, word)} {word}" if self._key else word

    def open(self, name: str, said: str) -> str | None:
        """Return the word, or None if no rank of this attempt said it under this name."""
        if not self._key:
            return said
        proof, _, word = said.partition(" ")
        if hmac.compare_digest(proof.encode(), self.proof(name, word).encode()):
            return word
        if name not in self._warned:  # it is looked for many times a second
            self._warned.add(name)
            log.warning("a word without proof is not heard: %r was said by a stranger", name)
        return None
