#!/usr/bin/env bash
# Build a Kubernetes of Debian's sources, and the image of its pods. Needs the apt and pip registries, once, and a
# quarter of an hour.
#
#   build.sh            prints the folder with both, which are built if they are not there yet
#
#   BUILD/bin           kube-apiserver, kube-controller-manager, kube-scheduler, kubelet, kube-proxy, kubectl
#   BUILD/store         containerd's folder with the pods' image, docker.io/k8slab/node:1: Debian with all that
#                       SkyPilot's set-up of a pod asks for, and the home of the EC2 lab's nodes (ec2-lab/build_image.sh)
#   BUILD/tools         awscli, of the EC2 lab's image
#
# K8SLAB_CACHE (~/.cache/spotguard-k8s-lab) holds one folder for each build, named by a hash of what it is built from.
# K8SLAB_PYTHON is the Python of the tasks (3.10 or later).
set -euo pipefail
HERE=$(dirname "$(realpath "${BASH_SOURCE[0]}")")
CACHE=${K8SLAB_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/spotguard-k8s-lab}
PYTHON=${K8SLAB_PYTHON:-python3}
SKYPILOT=0.14.1 KUBERNETES=1.20.2

source_package() {  # its list of sources is our own: the machine's stay as they are
  local work=$1
  mkdir -p "$work"/apt/{lists/partial,parts}
  cat > "$work/apt/parts/source.sources" <<SOURCE
Types: deb-src
URIs: http://deb.debian.org/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
SOURCE
  (
    cd "$work"
    apt=(apt-get -qq -o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$work/apt/parts" -o "Dir::State::lists=$work/apt/lists")
    "${apt[@]}" update
    "${apt[@]}" source --download-only kubernetes
    dpkg-source --no-check -x kubernetes_*.dsc kubernetes
  )
}

# Go 1.19 wants changes to go.mod, so it is built by GOPATH, as Debian's own rules do; vendor/ is whole.
binaries() {
  local work=$1 bin=$2 k8s=k8s.io/kubernetes typed package version command flags='-s -w'
  mkdir -p "$bin" "$work/go/src/k8s.io"
  ln -sfn "$work/kubernetes" "$work/go/src/$k8s"
  export GOPATH=$work/go GOCACHE=$work/go-cache HOME=$work GO111MODULE=off GOPROXY=off GOFLAGS='' CGO_ENABLED=0
  cd "$GOPATH/src/$k8s"
  # The one kind of generated code that the source lacks.
  go build -p 2 -o "$work/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
  typed=$(grep -rl --include='*.go' '^// *+k8s:openapi-gen=' pkg/apis staging/src/k8s.io |
    grep -vE 'zz_generated|_test.go|code-generator|sample-apiserver' | xargs -n1 dirname | sort -u |
    sed "s#^staging/src/#$k8s/vendor/#; s#^pkg#$k8s/pkg#" | paste -sd,)
  "$work/openapi-gen" --logtostderr -i "$typed" -p $k8s/pkg/generated/openapi -O zz_generated.openapi \
    -h vendor/k8s.io/code-generator/hack/boilerplate.go.txt -r "$work/violations" --output-base "$GOPATH/src"
  for package in component-base/version client-go/pkg/version; do
    for version in gitVersion=v$KUBERNETES gitMajor=1 gitMinor=20 gitTreeState=clean; do
      flags+=" -X $k8s/vendor/k8s.io/$package.$version"
    done
  done
  for command in kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy kubectl; do
    go build -p 2 -tags providerless,dockerless -ldflags "$flags" -o "$bin/$command" "./cmd/$command"
  done
}

pause_image() {  # what keeps a pod's namespaces
  local work=$1
  mkdir -p "$work/pause"
  gcc -Os -static -DVERSION=lab -o "$work/pause/pause" "$work/kubernetes/build/pause/linux/pause.c"
  tar -C "$work/pause" -cf "$work/pause.tar" pause
  echo '{"Entrypoint": ["/pause"]}' > "$work/pause.json"
  "$PYTHON" -B "$HERE/oci_image.py" docker.io/k8slab/pause:1 "$work/pause.oci.tar" "$work/pause.json" "$work/pause.tar"
}

debian() {
  local root=$1
  debootstrap --variant=minbase --include=python3,python3-venv,sudo,openssh-server,rsync,curl,wget,netcat-openbsd,gcc,libc6-dev,patch,pciutils,ca-certificates,procps,iproute2,locales,git,less \
    bookworm "$root" http://deb.debian.org/debian
  rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/usr/share/{doc,man}/* "$root"/var/lib/apt/lists/* "$root"/etc/ssh/ssh_host_*
  chroot "$root" useradd -m -u 1000 -s /bin/bash ubuntu
  chroot "$root" usermod -p '*' ubuntu
  echo 'ubuntu ALL=(ALL) NOPASSWD:ALL' > "$root/etc/sudoers.d/ubuntu"
  chmod 440 "$root/etc/sudoers.d/ubuntu"
  # SkyPilot fetches conda where there is none, and no task here uses it.
  printf '#!/bin/sh\nexit 0\n' | tee "$root/usr/local/bin/conda" > "$root/usr/local/bin/systemctl"
  chmod 755 "$root"/usr/local/bin/{conda,systemctl}
}

home() {  # as the EC2 lab's nodes have it, under the same paths, with what SkyPilot needs in pods beside
  local layer=$1 nodes=$2 prefix
  mkdir -p "$layer/home/ubuntu"
  cp -a "$nodes/home/." "$layer/home/ubuntu/"
  while read -r prefix; do
    mkdir -p "$layer$(dirname "$prefix")"
    chmod 755 "$layer/$(cut -d/ -f2 <<< "$prefix")"
    tar -C "$(dirname "$prefix")" --exclude='*/lib/python3*/site-packages/*' --exclude='*/test' --exclude=__pycache__ \
      -cf - "$(basename "$prefix")" | tar -C "$layer$(dirname "$prefix")" -xf -
  done < "$nodes/interpreters"
  # Its environments hold absolute paths, so they are changed under the path that they will have.
  unshare --mount bash -c 'mount -t tmpfs home /home && mkdir /home/ubuntu && mount --bind "$1/home/ubuntu" /home/ubuntu &&
    cd /home/ubuntu && HOME=/home/ubuntu PIP_NO_CACHE_DIR=1 skypilot-runtime/bin/python -m pip install -q "click<8.3.0" \
    "pydantic-core==2.41.1" "skypilot[kubernetes,remote]=='$SKYPILOT'"' - "$layer"
  rm -rf "$layer/home/ubuntu/.cache"
  chown -R 1000:1000 "$layer/home/ubuntu"
}

node_image() {
  local work=$1 nodes=$2
  debian "$work/root"
  tar -C "$work/root" --sort=name -cf "$work/root.tar" .
  home "$work/layer" "$nodes"
  tar -C "$work/layer" --sort=name -cf "$work/layer.tar" .
  cat > "$work/node.json" <<'JSON'
{"User": "ubuntu", "WorkingDir": "/home/ubuntu", "Cmd": ["/bin/bash"],
 "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/home/ubuntu", "LANG=C.UTF-8",
         "PIP_NO_INDEX=1", "UV_OFFLINE=1", "UV_PYTHON_DOWNLOADS=never"]}
JSON
  "$PYTHON" -B "$HERE/oci_image.py" docker.io/k8slab/node:1 "$work/node.oci.tar" "$work/node.json" "$work/root.tar" "$work/layer.tar"
}

store() {  # a containerd of its own brings the images in, once; each node begins with links to what it made
  local work=$1 store=$2 daemon archive
  mkdir -p "$store"
  cat > "$work/containerd.toml" <<TOML
version = 2
root = "$store"
state = "$work/state"
disabled_plugins = ["io.containerd.grpc.v1.cri"]
[grpc]
  address = "$work/sock"
[plugins."io.containerd.internal.v1.opt"]
  path = "$work/opt"
TOML
  containerd --config "$work/containerd.toml" > "$work/containerd.log" 2>&1 &
  daemon=$!
  for _ in $(seq 100); do ! ctr -a "$work/sock" version >/dev/null 2>&1 || break; sleep 0.1; done
  for archive in "$work"/*.oci.tar; do ctr -a "$work/sock" -n k8s.io images import "$archive"; done
  kill $daemon
  wait $daemon || true
}

build() {
  local build=$1 nodes=$2 work=$1/work
  rm -rf "$build"
  mkdir -p "$work"
  source_package "$work"
  (binaries "$work" "$build/bin")
  pause_image "$work"
  node_image "$work" "$nodes"
  store "$work" "$build/store"
  ln -s "$nodes/tools" "$build/tools"
  rm -rf "$work"
}

nodes=$(EC2LAB_PYTHON=$PYTHON "$HERE/../ec2-lab/build_image.sh")
key=$({ sed '/^#/d' "$0" "$HERE/oci_image.py"; echo "$nodes"; } | sha256sum | cut -c 1-16)
build=$CACHE/build-$key
mkdir -p "$CACHE"
exec 9> "$CACHE/lock"
flock 9
[ -e "$build" ] || {
  echo "building Kubernetes and the pods' image (6 GB, once; a quarter of an hour): $build" >&2
  renice -n 10 $$ >/dev/null
  build "$CACHE/building" "$nodes" >&2
  mv "$CACHE/building" "$build"
}
touch "$build"
find "$CACHE" -maxdepth 1 -name 'build-*' ! -path "$build" -mtime +7 -exec rm -rf {} +
echo "$build"
