#!/usr/bin/env bash
# Print the Python that `make` builds on: the distribution's own where it can do, else the first on PATH.
#
#   python.sh [VERSION...]    python.sh 3.10 3.11: one of these versions only
#
# Distributions compile Python with profile-guided optimisation. pyenv and others do not unless somebody asks for it, and
# such a Python takes a quarter more time; tests start thousands of them. With none at all the answer is `python3`,
# and exit code 1.
set -euo pipefail

able='import sys, ensurepip, venv, ssl, sqlite3
now = sys.version_info[:2]
wanted = [tuple(map(int, each.split("."))) for each in sys.argv[1:]]
print(getattr(sys, "_base_executable", sys.executable) if (now in wanted if wanted else now >= (3, 10)) else "")'

shopt -s nullglob
candidates=(/usr/bin/python3 "$(command -v python3 || true)")
for version in "$@"; do
  candidates+=(/usr/{,local/}bin/"python$version" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$version".*/bin/python)
done
for python in "${candidates[@]}"; do
  path=$([ ! -x "$python" ] || "$python" -c "$able" "$@" 2>/dev/null || true)
  [ -z "$path" ] || { echo "$path"; exit; }
done
echo python3
exit 1
