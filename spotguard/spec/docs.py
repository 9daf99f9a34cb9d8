"""The reference page of the settings, made from the settings themselves.

Write it with `python -m spotguard.spec.docs > docs/configuration.md`; a test fails when it is old.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from spotguard.spec.home_folder import HOME_VARIABLE
from spotguard.spec.setting import VARIABLES_FOR_USERS
from spotguard.spec.setting_catalogue import (
    DEBUG_VARIABLE,
    OTHER_VARIABLES,
    by_variable,
    catalogue,
)

if TYPE_CHECKING:
    from spotguard.spec.setting_catalogue import ConfigField

_INTRO = """\
# Settings

Made from `spotguard/spec/model/` by `python -m spotguard.spec.docs`; do not edit.

A setting can stand in several places. The first of these that has it counts:

1. an option of the command line, such as `--budget 200`
2. an environment variable, such as `SPOTGUARD_BUDGET=200`
3. the script itself, in its [PEP 723](https://peps.python.org/pep-0723/) block:
   ```python
   # /// script
   # [tool.spotguard]
   # budget = 200
   # ///
   ```
4. `spotguard.toml` in the folder in which you are
5. your own file, `config.toml` in spotguard's home (`$SPOTGUARD_HOME`, else `~/.spotguard`)
6. the default

`spotguard config show job.py` prints each value with the place it comes from. A relative path is
meant as seen from the file in which it stands; on the command line and in variables, from the
folder in which you are. A name that does not exist is an error, in files and in `SPOTGUARD_*`
variables alike; the message names the nearest one that does.

A duration is a number of seconds or a text such as `"90s"`, `"1h30m"`, `"2d"`.
"""

_HEADINGS = {
    "local": (
        "## The local cloud\n\n"
        'These stand below `[local]` in a file, and matter only with `infra = "local"`.'
    ),
    "node": (
        "## Nodes from SkyPilot\n\n"
        "These stand below `[node]` in a file. All are optional: `infra` and `gpus` say enough."
    ),
    "smoke": (
        "## Smoke before money\n\n"
        "These stand below `[smoke]` in a file; [what a smoke is](launching.md#smoke-before-money)."
    ),
    "team": (
        "## A team's budget\n\n"
        "These stand below `[team]` in a file; [what a team's budget is]"
        "(reference/team.md#one-budget-for-all-runs)."
    ),
}


def configuration_page() -> str:
    """Return the text of docs/configuration.md."""
    parts = [_INTRO, "## The job"]
    table = ""
    for field in catalogue().values():
        above = field.key.rpartition(".")[0]
        if above != table:
            table = above
            parts.append(_HEADINGS[table])
        parts.append(_section(field))
    parts.append(_other_variables())
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _section(field: ConfigField) -> str:
    ways = [f"`{way}`" for way in (field.flag, field.variable) if way]
    default = field.written(field.default)
    lines = [
        f"### `{field.key}`",
        "",
        " ".join(field.doc.split()),
        "",
        f"- Allowed: {field.setting.allowed}",
    ]
    if default not in (None, [], {}):
        lines.append(f"- Default: `{json.dumps(default)}`")
    lines.append(f"- Example: `{field.key.rpartition('.')[2]} = {field.setting.example}`")
    if ways:
        lines.append(f"- Also as {', '.join(ways)}")
    return "\n".join(lines)


def _other_variables() -> str:
    own = {HOME_VARIABLE, DEBUG_VARIABLE}
    passed = ", ".join(f"`{name}`" for name in sorted(VARIABLES_FOR_USERS))
    others = sorted(OTHER_VARIABLES - set(by_variable()) - own - VARIABLES_FOR_USERS)
    listed = "\n".join(f"- `{name}`" for name in others)
    return (
        "## Variables that are no settings\n\n"
        f"`{HOME_VARIABLE}` is the folder of spotguard's own files. `{DEBUG_VARIABLE}=1` shows\n"
        f"the traceback of an unexpected error. These are passed on to the job: {passed}.\n\n"
        "The others are how a launcher tells a job what it is part of. They mean nothing to the\n"
        f"command line:\n\n{listed}"
    )


if __name__ == "__main__":
    sys.stdout.write(configuration_page())
