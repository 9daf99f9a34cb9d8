"""One question to SkyPilot in a process of its own, so that nothing it does can harm the asker.

    python -m spotguard.launch.skypilot.ask_in_subprocess ANSWER.json QUESTION ABOUT...

SkyPilot may be broken, may end the process that imports it, may print what it likes, and may not
answer for ever: `ask` waits so long and no longer, and its own stdout and threads stay as they are.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spotguard.errors import LauncherFailure, MissingExtra, SpotguardError
from spotguard.launch.base import Unreachable
from spotguard.launch.skypilot.import_sky import load_sky
from spotguard.launch.skypilot.sdk import SkySdk
from spotguard.shared.paths import scratch
from spotguard.shared.units import format_duration

if TYPE_CHECKING:
    from collections.abc import Sequence

PATIENCE_S = 90.0
"""SkyPilot takes two seconds to import, some more to start its API server, and up to half a minute
to ask a Slurm cluster or a cloud that does not answer."""
_PROBLEM_CHARS = 300


def ask(question: str, *about: str, patience_s: float = PATIENCE_S) -> Any:
    """Return what SkyPilot answers, as plain data.

    Raises:
        MissingExtra: SkyPilot is not installed.
        Unreachable: it does not answer, or not in time.
        LauncherFailure: it is broken.
    """
    with scratch("spotguard-ask-") as folder:
        answer, printed = folder / "answer.json", folder / "printed"
        command = [sys.executable, "-m", __name__, str(answer), question, *about]
        with printed.open("wb") as output:  # no pipe: an API server that is started would hold it
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd="/"
            )
            try:
                child.wait(patience_s)
            except subprocess.TimeoutExpired:
                waited = format_duration(patience_s)
                raise Unreachable(f"SkyPilot has not answered within {waited}") from None
            finally:
                child.kill()
                child.wait()
        if not answer.exists():
            raise LauncherFailure(f"SkyPilot is broken: {_last_line(printed, child.returncode)}")
        body = json.loads(answer.read_text())
    return _told(body)


def _last_line(printed: Path, code: int) -> str:
    lines = printed.read_text(errors="replace").strip().splitlines()
    return lines[-1][:_PROBLEM_CHARS] if lines else f"it ended with exit code {code}"


def _told(body: dict[str, Any]) -> Any:
    problem = body.get("problem")
    if problem is None:
        return body["answer"]
    kinds = {kind.__name__: kind for kind in (MissingExtra, Unreachable)}
    raise kinds.get(body["kind"], LauncherFailure)(problem, hint=body["hint"])


def main(arguments: Sequence[str]) -> None:
    """Answer a question in a file; what goes wrong is an answer, too."""
    answer, question, *about = arguments
    body: dict[str, Any]
    try:
        load_sky()
        body = {"answer": _QUESTIONS[question](SkySdk(), about)}
    except SpotguardError as problem:
        body = {"problem": problem.message, "hint": problem.hint, "kind": type(problem).__name__}
    fresh = Path(answer).with_suffix(".new")
    fresh.write_text(json.dumps(body))
    fresh.replace(answer)


def _refusals(sdk: SkySdk, places: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return of each place what SkyPilot has against it, or why it could not be asked."""
    found = {}
    for place in places:
        try:
            found[place] = {"refusal": sdk.refusal(place)}
        except LauncherFailure as problem:
            found[place] = {"problem": problem.message}
    return found


def _clouds(sdk: SkySdk, named: Sequence[str]) -> dict[str, Any]:
    """Return which clouds are enabled, and why those named here are not."""
    enabled = sdk.enabled_clouds()
    reasons = {cloud: sdk.why_disabled(cloud) for cloud in named if cloud not in enabled}
    just_now = [cloud for cloud, reason in reasons.items() if not reason]
    return {
        "enabled": sorted({*enabled, *just_now}),
        "disabled": {cloud: reason for cloud, reason in reasons.items() if reason},
    }


_QUESTIONS = {"refusals": _refusals, "clouds": _clouds}


if __name__ == "__main__":
    main(sys.argv[1:])
