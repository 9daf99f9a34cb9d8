"""The part of cloud-init that matters here: users with their keys, and write_files.

Reads `#cloud-config` on stdin. bootcmd and runcmd are left out: what SkyPilot puts there is for
systemd and apt.
"""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml


def add_user(user: dict[str, Any]) -> None:
    """Make a user unless it is there, and let its keys in."""
    name = user["name"]
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        shell = user.get("shell", "/bin/bash")
        subprocess.run(["useradd", "--create-home", "--shell", shell, name], check=True)
        entry = pwd.getpwnam(name)
    folder = Path(entry.pw_dir) / ".ssh"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    keys = folder / "authorized_keys"
    with keys.open("a") as file:
        file.writelines(key.strip() + "\n" for key in user.get("ssh_authorized_keys", []))
    keys.chmod(0o600)
    for path in (folder, keys):
        os.chown(path, entry.pw_uid, entry.pw_gid)
    if user.get("sudo"):
        rule = Path(f"/etc/sudoers.d/90-{name}")
        rule.write_text(f"{name} {user['sudo']}\n")
        rule.chmod(0o440)


def main() -> None:
    """Do what the user data asks for."""
    config = yaml.safe_load(sys.stdin) or {}
    for user in config.get("users", []):
        if isinstance(user, dict):  # the word "default" may stand there, too
            add_user(user)
    for file in config.get("write_files", []):
        path = Path(file["path"])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file.get("content", ""))


if __name__ == "__main__":
    main()
