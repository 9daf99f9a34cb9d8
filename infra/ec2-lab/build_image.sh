#!/usr/bin/env bash
# Build the "AMI": the home of the user `ubuntu` as a node finds it at boot. Needs the pip and apt registries, once.
#
#   build_image.sh              prints the folder of the image, which is built if it is not there yet
#   build_image.sh --where      prints where it would be
#
# EC2LAB_CACHE (~/.cache/spotguard-ec2-lab) holds one folder for each image; its name is a hash of all that it is
# built from, so a changed script builds another one, and the one before the newest is removed.
#
#   IMAGE/home          /home/ubuntu: uv, skypilot-runtime (Ray 2.9.3, skypilot[aws,remote], and the
#                       packages that a controller needs),
#                       sky-user-env (torch, and the packages that spotguard needs), and SkyPilot's own wheel, which
#                       a node of the plain AMI loses at its first boot
#   IMAGE/sudo          the Debian package sudo, unpacked: the machine may lack it
#   IMAGE/tools         awscli, for this machine: SkyPilot asks it whether there are credentials
#   IMAGE/interpreters  the folders of both Pythons
#
# EC2LAB_VENV has the SkyPilot that launches nodes.
# EC2LAB_PYTHON is the Python of the tasks (3.10 or later), EC2LAB_RUNTIME_PYTHON that of SkyPilot's runtime: 3.10, or
# 3.11 where that is the distribution's own, which is faster.
set -euo pipefail
SELF=$(realpath "${BASH_SOURCE[0]}") HERE=$(dirname "$(realpath "${BASH_SOURCE[0]}")")
CACHE=${EC2LAB_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/spotguard-ec2-lab}
SKYPILOT=0.14.1
RAY=2.9.3

base_of() { "$1" -c 'import sys; print(getattr(sys, "_base_executable", sys.executable))'; }

runtime_python() {
  local home; home=$(getent passwd "$(id -u)" | cut -d: -f6)
  [ -x "${EC2LAB_RUNTIME_PYTHON:-}" ] || EC2LAB_RUNTIME_PYTHON=$(HOME=$home "$HERE/../python.sh" 3.10 3.11)
  base_of "$EC2LAB_RUNTIME_PYTHON"
}

constraints() { cat "$HERE/../../constraints.txt"; }

# SkyPilot installs a wheel of itself on each node, unless the node has the same one already. Which one that is, is said
# by the SkyPilot that will launch the nodes.
make_wheel() {
  local image=$1
  mkdir -p "$image/launcher"
  HOME=$image/launcher "$EC2LAB_VENV/bin/python" -c 'from sky.backends import wheel_utils
wheel_utils.build_sky_wheel()'
}

install_wheel() {
  local folder; folder=$(dirname "$1"/launcher/.sky/wheels/*/*.whl)
  mkdir -p .sky/wheels
  cp -r "$folder" .sky/wheels/
  .local/bin/uv-real pip install -q --python skypilot-runtime/bin/python --reinstall --no-deps "$folder"/*.whl
  basename "$folder" > .sky/wheels/current_sky_wheel_hash
  skypilot-runtime/bin/python -m compileall -q skypilot-runtime/lib/python3*/site-packages/sky >/dev/null || true
}

build_inside() {  # virtual environments hold absolute paths, so they are made under the path that they will have
  local image=$1 runtime=$2 task=$3
  export HOME=/home/ubuntu PIP_NO_CACHE_DIR=1
  cd "$HOME"
  "$runtime" -m venv --clear skypilot-runtime
  skypilot-runtime/bin/python -m pip install -q 'setuptools<70' wheel "ray[default]==$RAY" 'pydantic-core==2.41.1' \
    'click<8.3.0' "skypilot[aws,remote]==$SKYPILOT" uv
  # What a controller needs beside SkyPilot: on a node of its own it finds no index either.
  skypilot-runtime/bin/python -m pip install -q 'click<8.3.0' 'pydantic-core==2.41.1' numpy packaging typer rich \
    pydantic tenacity requests psutil xxhash safetensors PyYAML 'tomli>=2.0' 'boto3>=1.36' 'crc32c>=2.7'
  mkdir -p .local/bin
  install -m 755 skypilot-runtime/bin/uv .local/bin/uv-real
  install_wheel "$image"
  "$task" -m venv --clear sky-user-env
  sky-user-env/bin/python -m pip install -q -c "$image/constraints.txt" torch numpy packaging typer rich pydantic \
    tenacity requests psutil xxhash safetensors PyYAML 'tomli>=2.0; python_version < "3.11"' 'boto3>=1.36' 'crc32c>=2.7'
  # SkyPilot's set-up asks uv to install what is there already; the one thing it does install is its own wheel,
  # whose dependencies are there. There is no index to ask.
  cat > .local/bin/uv <<'UV'
#!/bin/bash
export UV_OFFLINE=1 UV_PYTHON_DOWNLOADS=never UV_CACHE_DIR=/tmp/uv-cache-$(id -u)
case "$*" in *"pip install"*skypilot-*.whl*) set -- "$@" --no-deps ;; esac
exec "$(dirname "$0")/uv-real" "$@"
UV
  chmod 755 .local/bin/uv
  cat > .bashrc <<'RC'
# as on Ubuntu: nothing for shells that are not interactive
case $- in *i*) ;; *) return ;; esac
RC
  rm -rf .cache .rustup
  chown -R 1000:1000 /home/ubuntu
}

build() {
  local image=$1 runtime=$2 task=$3
  rm -rf "$image"
  mkdir -p "$image/home" "$image/sudo"
  constraints > "$image/constraints.txt"
  (cd "$image" && apt-get download -qq sudo 2>/dev/null || { apt-get update -qq && cd "$image" && apt-get download -qq sudo; })
  dpkg-deb -x "$image"/sudo_*.deb "$image/sudo"
  rm -f "$image"/sudo_*.deb
  for python in "$runtime" "$task"; do "$python" -c 'import sys; print(sys.base_prefix)'; done | sort -u |
    grep -v '^/usr' > "$image/interpreters" || true
  "$task" -m venv "$image/tools"
  "$image/tools/bin/python" -m pip install -q awscli
  make_wheel "$image"
  unshare --mount bash -c 'mount -t tmpfs home /home && mkdir /home/ubuntu && mount --bind "$1/home" /home/ubuntu &&
    exec bash "$0" inside "$@"' "$SELF" "$image" "$runtime" "$task"
}

if [ "${1:-}" = inside ]; then shift; build_inside "$@"; exit; fi
runtime=$(runtime_python)
task=$(base_of "${EC2LAB_PYTHON:-python3}")
key=$({ sed '/^#/d' "$SELF"; constraints; "$runtime" -VV; "$task" -VV; echo "$runtime $task"; } | sha256sum | cut -c 1-16)
image=$CACHE/image-$key
[ "${1:-}" != --where ] || { echo "$image"; exit; }
mkdir -p "$CACHE"
exec 9> "$CACHE/lock"
flock 9  # two labs that come up at once build one image
[ -e "$image" ] || {
  echo "building the nodes' image (2 GB, once; minutes): $image" >&2
  build "$CACHE/image-building" "$runtime" "$task" >&2
  # What is made of the tools' path is told its last one: only its programs' first lines hold it.
  find "$CACHE/image-building/tools/bin" -maxdepth 1 -type f -exec sed -i "1s|$CACHE/image-building|$image|" {} +
  mv "$CACHE/image-building" "$image"
}
touch "$image"
find "$CACHE" -maxdepth 1 -name 'image-*' ! -path "$image" -mtime +7 -exec rm -rf {} +
echo "$image"
