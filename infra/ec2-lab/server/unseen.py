"""Instances that EC2 has just launched, and that its other calls do not know yet.

EC2's calls agree with each other after a while only ("eventual consistency" in its API reference):
whoever is told the id of an instance may be told a moment later that there is none.
"""

from __future__ import annotations

import re
import time
import xml.etree.ElementTree as ElementTree
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Answer: TypeAlias = tuple[str, list[tuple[str, str]], bytes]

_INSTANCE = re.compile(rb"<instanceId>(i-[0-9a-f]+)</instanceId>")
_NAMED = re.compile(r"(InstanceId|ResourceId)\.\d+")
_until: dict[str, float] = {}
"""Until when each is unknown (epoch seconds)."""


def instances_in(answer: bytes) -> list[str]:
    """Return the instances of which an answer tells."""
    return sorted({each.decode() for each in _INSTANCE.findall(answer)})


def note(answer: bytes, seconds: float) -> None:
    """Let the instances of an answer to RunInstances be unknown for so long."""
    _until.update(dict.fromkeys(instances_in(answer), time.time() + seconds))


def names(form: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the unknown instances that a call names."""
    named = [values[0] for key, values in form.items() if _NAMED.fullmatch(key)]
    return [each for each in named if _is_unseen(each)]


def without(answer: Answer) -> Answer:
    """Return an answer to DescribeInstances that does not tell of unknown instances."""
    status, headers, body = answer
    if not any(map(_is_unseen, instances_in(body))):
        return answer
    root = ElementTree.fromstring(body)
    space = root.tag.partition("}")[0] + "}" if root.tag.startswith("{") else ""
    ElementTree.register_namespace("", space.strip("{}"))
    for instances in root.iter(f"{space}instancesSet"):
        for each in list(instances):
            if _is_unseen(each.findtext(f"{space}instanceId") or ""):
                instances.remove(each)
    body = ElementTree.tostring(root)
    kept = [header for header in headers if header[0].lower() != "content-length"]
    return status, [*kept, ("Content-Length", str(len(body)))], body


def _is_unseen(instance: str) -> bool:
    return time.time() < _until.get(instance, 0.0)
