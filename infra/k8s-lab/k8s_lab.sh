#!/usr/bin/env bash
# A Kubernetes with real nodes and pods on this one machine, for a real SkyPilot.
#
#   k8s_lab.sh up            build what is missing (once, a quarter of an hour), start the cluster and an S3 (moto)
#   k8s_lab.sh env           exports for a shell that uses the lab:  eval "$(k8s_lab.sh env)"
#   k8s_lab.sh down          end and remove everything but what was built, whatever state it is in
#   k8s_lab.sh down-of PID   the same, if the lab was brought up for that process
#   k8s_lab.sh end-api       kill SkyPilot's API server, also one that has not come to serve yet
#   k8s_lab.sh why-not       say in one sentence why this machine cannot have a lab; nothing if it can
#   k8s_lab.sh kubectl ...   kubectl, as an administrator
#   k8s_lab.sh crash NODE    cut a node's power: k8s-node1, k8s-node2, ...
#
# K8SLAB_DATA (/tmp/k8s-lab/data) holds all state, K8SLAB_HOME (/tmp/k8s-lab/home) is the home of SkyPilot's client and
# API server, K8SLAB_VENV (.venv) has moto[server] and skypilot, K8SLAB_API_PORT (46977) is the port of the API server,
# K8SLAB_NODES (2) the number of nodes. With K8SLAB_FOR_PID the lab comes down by itself once that process is gone.
#
# A node is a set of namespaces (net, UTS, mount, PID, IPC) on a bridge with no way out. Debian packages aside, nothing
# outside these folders and the cache of what is built is changed. Needs root and Debian 12, with cgroups of version 1.
set -euo pipefail
SELF=$(realpath "${BASH_SOURCE[0]}") HERE=$(dirname "$(realpath "${BASH_SOURCE[0]}")")
DATA=$(realpath -m "${K8SLAB_DATA:-/tmp/k8s-lab/data}") CLIENT=$(realpath -m "${K8SLAB_HOME:-/tmp/k8s-lab/home}")
VENV=${K8SLAB_VENV:-$(realpath -m "$HERE/../../.venv")}
API_PORT=${K8SLAB_API_PORT:-46977} NODES=${K8SLAB_NODES:-2}
BRIDGE=k8slab0 NET=172.29.7 PODS=10.244 SERVICES=10.96.0.0/16 SECURE=6643 ETCD=23790 ETCD_PEERS=23800 S3=5577
ADDRESS=$NET.1 PKI=$DATA/pki BIN=$DATA/build/bin LOG=$DATA/log API=https://$NET.1:6643
CGROUPS='cpu cpuacct cpuset memory devices freezer blkio pids systemd'

# shellcheck source=infra/lab/common.sh
. "$HERE/../lab/common.sh"
kc() {
  [ -x "$BIN/kubectl" ] || { say 'the lab is not up: k8s_lab.sh up'; return 1; }
  "$BIN/kubectl" --kubeconfig="$PKI/admin.conf" "$@"
}

why_not() {
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo 'the Kubernetes lab needs root and Debian'
  elif [ ! -d /sys/fs/cgroup/memory ]; then
    echo 'the Kubernetes lab needs cgroups of version 1: its Kubernetes is of 2021'
  elif ! unshare --net --mount --pid --uts --ipc --fork true 2>/dev/null; then
    echo 'the Kubernetes lab needs a machine on which root may make namespaces'
  elif [ ! -x "$VENV/bin/python" ] || ! "$VENV/bin/python" -c 'import importlib.util as u, sys
sys.exit(any(u.find_spec(name) is None for name in ("moto", "sky", "kubernetes")))'; then
    echo "the Kubernetes lab needs moto[server] and skypilot[kubernetes] in $VENV: make .venv/.installed-dev"
  fi
}

PROGRAMS='go:golang-go dpkg-source:dpkg-dev etcd:etcd-server containerd:containerd runc:runc debootstrap:debootstrap
  iptables:iptables conntrack:conntrack socat:socat nc:netcat-openbsd openssl:openssl rsync:rsync ip:iproute2 gcc:gcc
  ssh:openssh-client /usr/lib/cni/bridge:containernetworking-plugins'

# ---------------------------------------------------------------- who may talk to whom

certificate() {  # NAME SUBJECT [OTHER NAMES]
  openssl req -newkey rsa:2048 -nodes -keyout "$PKI/$1.key" -out "$PKI/$1.csr" -subj "$2" 2>/dev/null
  openssl x509 -req -in "$PKI/$1.csr" -CA "$PKI/ca.crt" -CAkey "$PKI/ca.key" -CAcreateserial -days 30 -sha256 \
    -extfile <(printf 'keyUsage=digitalSignature,keyEncipherment\nextendedKeyUsage=serverAuth,clientAuth\n%s' \
      "${3:+subjectAltName=$3}") -out "$PKI/$1.crt" 2>/dev/null
}

kubeconfig() {  # NAME
  cat > "$PKI/$1.conf" <<CONF
apiVersion: v1
kind: Config
current-context: k8slab
clusters: [{name: k8slab, cluster: {server: "$API", certificate-authority-data: $(base64 -w0 "$PKI/ca.crt")}}]
users: [{name: $1, user: {client-certificate-data: $(base64 -w0 "$PKI/$1.crt"), client-key-data: $(base64 -w0 "$PKI/$1.key")}}]
contexts: [{name: k8slab, context: {cluster: k8slab, user: $1}}]
CONF
}

certificates() {
  mkdir -p "$PKI"
  openssl req -x509 -newkey rsa:2048 -nodes -keyout "$PKI/ca.key" -out "$PKI/ca.crt" -days 30 -subj /CN=k8slab-ca \
    -addext 'keyUsage=critical,keyCertSign,cRLSign,digitalSignature' 2>/dev/null
  openssl genrsa -out "$PKI/accounts.key" 2048 2>/dev/null
  certificate apiserver /CN=kube-apiserver "IP:127.0.0.1,IP:$ADDRESS,IP:10.96.0.1,DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc,DNS:localhost"
  certificate admin /O=system:masters/CN=admin
  certificate controller-manager /CN=system:kube-controller-manager
  certificate scheduler /CN=system:kube-scheduler
  certificate proxy /CN=system:kube-proxy
  for name in admin controller-manager scheduler proxy; do kubeconfig $name; done
}

# ---------------------------------------------------------------- the control plane

start() {  # NAME COMMAND...
  local name=$1; shift
  setsid "$@" </dev/null >"$LOG/$name.log" 2>&1 9>&- &
  echo $! > "$DATA/run/$name.pid"
}
wait_for() { for _ in $(seq 300); do ! "$@" >/dev/null 2>&1 || return 0; sleep 0.2; done; return 1; }
failed() { tail -5 "$LOG"/*.log "$DATA"/nodes/*/kubelet.log >&2 2>/dev/null || true; down; say "$1"; exit 1; }

control_plane() {
  start etcd etcd --data-dir "$DATA/etcd" --unsafe-no-fsync \
    --listen-client-urls "http://127.0.0.1:$ETCD" --advertise-client-urls "http://127.0.0.1:$ETCD" \
    --listen-peer-urls "http://127.0.0.1:$ETCD_PEERS" --initial-advertise-peer-urls "http://127.0.0.1:$ETCD_PEERS" \
    --initial-cluster "default=http://127.0.0.1:$ETCD_PEERS"
  start apiserver "$BIN/kube-apiserver" --etcd-servers="http://127.0.0.1:$ETCD" --bind-address="$ADDRESS" \
    --secure-port=$SECURE --advertise-address="$ADDRESS" --service-cluster-ip-range=$SERVICES \
    --client-ca-file="$PKI/ca.crt" --tls-cert-file="$PKI/apiserver.crt" --tls-private-key-file="$PKI/apiserver.key" \
    --authorization-mode=Node,RBAC --service-account-issuer=https://kubernetes.default.svc \
    --service-account-key-file="$PKI/accounts.key" --service-account-signing-key-file="$PKI/accounts.key" \
    --allow-privileged=true --kubelet-client-certificate="$PKI/admin.crt" --kubelet-client-key="$PKI/admin.key" \
    --kubelet-certificate-authority="$PKI/ca.crt" --kubelet-preferred-address-types=InternalIP \
    --endpoint-reconciler-type=master-count --audit-log-path="$LOG/audit.log" --audit-policy-file="$HERE/audit.yaml"
  wait_for kc get --raw /readyz || failed 'kube-apiserver did not come up'
  start controller-manager "$BIN/kube-controller-manager" --kubeconfig="$PKI/controller-manager.conf" \
    --authentication-kubeconfig="$PKI/controller-manager.conf" --authorization-kubeconfig="$PKI/controller-manager.conf" \
    --service-account-private-key-file="$PKI/accounts.key" --root-ca-file="$PKI/ca.crt" --use-service-account-credentials \
    --cluster-signing-cert-file="$PKI/ca.crt" --cluster-signing-key-file="$PKI/ca.key" --leader-elect=false --port=0 \
    --secure-port=16257 --bind-address=127.0.0.1 --node-monitor-grace-period=40s --cert-dir="$DATA/run/controller-manager"
  start scheduler "$BIN/kube-scheduler" --kubeconfig="$PKI/scheduler.conf" --leader-elect=false --port=0 \
    --secure-port=16259 --bind-address=127.0.0.1 --authentication-kubeconfig="$PKI/scheduler.conf" \
    --authorization-kubeconfig="$PKI/scheduler.conf" --cert-dir="$DATA/run/scheduler"
  start dns "$VENV/bin/python" -B "$HERE/dns.py" "$ADDRESS" "$API" "$PKI/ca.crt" "$PKI/admin.crt" "$PKI/admin.key"
  start moto "$VENV/bin/python" -B -m moto.server -H "$ADDRESS" -p $S3
}

# ---------------------------------------------------------------- the nodes

node_files() {  # NODE NAME ADDRESS PODS
  local node=$1 name=$2 ip=$3 pods=$4
  mkdir -p "$node"/{cni,containerd}
  cp -al "$DATA/build/store" "$node/containerd/root" 2>/dev/null || cp -a "$DATA/build/store" "$node/containerd/root"
  (cd "$DATA/build/store" && find . -name '*.db' -exec cp --remove-destination {} "$node/containerd/root/{}" ';')
  cat > "$node/containerd.toml" <<TOML
version = 2
root = "$node/containerd/root"
state = "$node/containerd/state"
[grpc]
  address = "$node/containerd.sock"
[plugins."io.containerd.internal.v1.opt"]
  path = "$node/containerd/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "docker.io/k8slab/pause:1"
  disable_apparmor = true
  restrict_oom_score_adj = true
  stream_server_address = "127.0.0.1"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "$node/cni"
TOML
  cat > "$node/cni/10-k8slab.conflist" <<JSON
{"cniVersion": "0.3.1", "name": "k8slab", "plugins": [
  {"type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": false, "hairpinMode": true,
   "ipam": {"type": "host-local", "dataDir": "$node/cni/ips", "ranges": [[{"subnet": "$pods"}]], "routes": [{"dst": "0.0.0.0/0"}]}}]}
JSON
  cat > "$node/kubelet.yaml" <<YAML
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: $ip
port: 10250
healthzBindAddress: 127.0.0.1
authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: $PKI/ca.crt}}
authorization: {mode: Webhook}
tlsCertFile: $PKI/kubelet-$name.crt
tlsPrivateKeyFile: $PKI/kubelet-$name.key
cgroupDriver: cgroupfs
cgroupRoot: /k8slab/$name
cgroupsPerQOS: true
enforceNodeAllocatable: [pods]
failSwapOn: false
clusterDomain: cluster.local
clusterDNS: [$ADDRESS]
resolvConf: $node/resolv.conf
evictionHard: {memory.available: 100Mi, nodefs.available: 1%, imagefs.available: 1%, nodefs.inodesFree: 1%}
imageGCHighThresholdPercent: 99
imageGCLowThresholdPercent: 98
volumePluginDir: $node/volumeplugins
YAML
  echo "nameserver $ADDRESS" > "$node/resolv.conf"
}

cgroups() {  # NAME
  local kind folder
  for kind in $CGROUPS; do
    mkdir -p "/sys/fs/cgroup/$kind/k8slab/$1"
    [ "$kind" = cpuset ] || continue
    for folder in "/sys/fs/cgroup/cpuset/k8slab" "/sys/fs/cgroup/cpuset/k8slab/$1"; do
      cat /sys/fs/cgroup/cpuset/cpuset.cpus > "$folder/cpuset.cpus"
      cat /sys/fs/cgroup/cpuset/cpuset.mems > "$folder/cpuset.mems"
    done
  done
}

network() {  # NUMBER NAME ADDRESS
  local number=$1 name=$2 ip=$3 other
  ip netns add "$name"
  ip link add "k8sl$number" type veth peer name eth0 netns "$name"
  ip link set "k8sl$number" master "$BRIDGE" up
  ip -n "$name" link set lo up
  ip -n "$name" addr add "$ip/24" dev eth0
  ip -n "$name" link set eth0 up
  for other in $(seq "$NODES"); do
    [ "$other" = "$number" ] || ip -n "$name" route add "$PODS.$other.0/24" via "$NET.$((10 + other))"
  done
  ip -n "$name" route add unreachable default  # pods have no way out, and are told so at once
  ip route replace "$PODS.$number.0/24" via "$ip"
}

node() {  # NUMBER
  local number=$1 name=k8s-node$1 ip=$NET.$((10 + $1)) pods=$PODS.$1.0/24 node=$DATA/nodes/k8s-node$1
  node_files "$node" "$name" "$ip" "$pods"
  certificate "kubelet-$name" "/O=system:nodes/CN=system:node:$name" "IP:$ip,DNS:$name"
  kubeconfig "kubelet-$name"
  cgroups "$name"
  network "$number" "$name" "$ip"
  setsid nsenter --net="/run/netns/$name" unshare --mount --pid --uts --ipc --fork --mount-proc --kill-child \
    bash "$HERE/node.sh" "$node" "$name" "$ip" "$PODS.0.0/16" "$API" "$BIN" "$PKI" </dev/null >"$node/node.log" 2>&1 9>&- &
  echo $! > "$DATA/run/$name.pid"
}

ready() { [ "$(kc get nodes | grep -c ' Ready')" = "$NODES" ]; }

# ---------------------------------------------------------------- SkyPilot's user

write_home() {
  mkdir -p "$CLIENT/.kube" "$CLIENT/.sky/catalogs/v8/kubernetes"
  cp "$PKI/admin.conf" "$CLIENT/.kube/config"
  # The image is on the nodes and nowhere else; SkyPilot's template asks for it each time.
  cat > "$CLIENT/.sky/config.yaml" <<YAML
kubernetes:
  pod_config:
    spec:
      containers:
        - imagePullPolicy: IfNotPresent
          env:
            - {name: AWS_ENDPOINT_URL, value: "http://$ADDRESS:$S3"}
            - {name: AWS_DEFAULT_REGION, value: us-east-1}
YAML
  # What clusters get that name no image, such as a controller's; SkyPilot would fetch this table.
  printf '%s\n' Tag,Region,OS,OSVersion,ImageId,CreationDate skypilot:custom-{c,g}pu-ubuntu-2204-v1,,ubuntu,22.04,k8slab/node:1,20260101 \
    > "$CLIENT/.sky/catalogs/v8/kubernetes/images.csv"
  write_aws_login AKIAK8SLABK8SLABK8SL k8slab "http://$ADDRESS:$S3"
}

print_env() {
  cat <<ENV
export HOME=$CLIENT KUBECONFIG=$CLIENT/.kube/config PATH=$VENV/bin:$DATA/build/tools/bin:$BIN:\$PATH
ENV
  print_sky_env
}

# ---------------------------------------------------------------- up and down

up() {
  local why
  why=$(why_not); [ -z "$why" ] || { say "$why"; exit 3; }
  down  # what a lab that was killed may have left
  mkdir -p "$DATA"/{run,log,nodes}
  # shellcheck disable=SC2086
  install_packages "$DATA/apt.log" $PROGRAMS
  reserve_ports
  ln -sfn "$(K8SLAB_PYTHON=$VENV/bin/python "$HERE/build.sh")" "$DATA/build"
  ip link add $BRIDGE type bridge
  ip addr add "$ADDRESS/24" dev $BRIDGE
  ip link set $BRIDGE up
  ip route replace unreachable $SERVICES
  certificates
  control_plane
  for number in $(seq "$NODES"); do node "$number"; done
  write_home
  wait_for ready || failed 'the nodes did not come up'
  [ -z "${K8SLAB_FOR_PID:-}" ] || watch_over "$K8SLAB_FOR_PID"
  say "up: Kubernetes at $API"
}

watch_over() {
  echo "$1" > "$DATA/run/owner"
  setsid bash -c 'while kill -0 "$1" 2>/dev/null; do sleep 1; done; exec "$2" down-of "$1"' - "$1" "$SELF" \
    </dev/null >/dev/null 2>&1 9>&- &
}

crash() {  # NODE: with `unshare --kill-child`, all in its PID namespace goes with it
  case $1 in
  k8s-node[0-9]*) [ ! -e "$DATA/run/$1.pid" ] || { kill -9 "$(cat "$DATA/run/$1.pid")"; return; } ;;
  esac
  say "there is no node '$1'; they are k8s-node1, k8s-node2, ..., while the lab is up"
  return 1
}

down() {
  local file pid name link
  end_api
  for file in "$DATA"/run/k8s-node*.pid; do
    [ ! -e "$file" ] || crash "$(basename "$file" .pid)" 2>/dev/null || true
  done
  for file in "$DATA"/run/*.pid; do [ ! -e "$file" ] || kill -9 "$(cat "$file")" 2>/dev/null || true; done
  for name in $(ip netns | awk '/^k8s-node/{print $1}'); do
    for pid in $(ip netns pids "$name"); do kill -9 "$pid" 2>/dev/null || true; done
    ip netns del "$name" || true
  done
  for link in $(ip -br link | awk -F'[@ ]' '/^k8sl[0-9]/{print $1}'); do ip link del "$link" 2>/dev/null || true; done
  ip route del unreachable $SERVICES 2>/dev/null || true
  ip link del $BRIDGE 2>/dev/null || true
  for _ in 1 2 3; do find /sys/fs/cgroup/*/k8slab -depth -type d -exec rmdir {} + 2>/dev/null || true; done
  free_ports
  rm -rf "$DATA"/{run,log,nodes,etcd,pki,build,ports} "$CLIENT"
}

verb=${1:-}; [ $# = 0 ] || shift
case $verb in
up) only_one; up ;;
down) only_one; down ;;
down-of) only_one; [ "$(cat "$DATA/run/owner" 2>/dev/null)" != "$1" ] || down ;;
env) print_env ;;
end-api) end_api ;;
why-not) why_not ;;
kubectl) kc "$@" ;;
crash) crash "${1:-}" ;;
*) sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p}' "$SELF"; exit 2 ;;
esac
