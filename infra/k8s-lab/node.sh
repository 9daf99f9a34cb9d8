#!/usr/bin/env bash
# PID 1 of a node, in its own network, mount, PID, UTS and IPC namespace: k8s_lab.sh starts it.
#
#   node.sh NODE NAME ADDRESS PODS API BIN PKI      NODE is its folder, PODS the addresses of its pods
set -uo pipefail
NODE=$1 NAME=$2 ADDRESS=$3 PODS=$4 API=$5 BIN=$6 PKI=$7
mount --make-rprivate /
mkdir -p /run/netns
mount -t tmpfs netns /run/netns  # its pods' network namespaces go with it
mount --make-rshared /
hostname "$NAME"
# kubelet would set these for the whole machine. It finds files with the values that it wants, laid over them here.
for pair in vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1 \
  kernel/keys/root_maxkeys=1000000 kernel/keys/root_maxbytes=25000000; do
  file=${pair%=*}
  mkdir -p "$NODE/sys/$(dirname "$file")"
  echo "${pair#*=}" > "$NODE/sys/$file"
  mount --bind "$NODE/sys/$file" "/proc/sys/$file"
done
echo 1 > /proc/sys/net/ipv4/ip_forward
containerd --config "$NODE/containerd.toml" > "$NODE/containerd.log" 2>&1 &
for _ in $(seq 100); do
  ! ctr -a "$NODE/containerd.sock" version >/dev/null 2>&1 || break
  sleep 0.1
done
"$BIN/kubelet" --config="$NODE/kubelet.yaml" --kubeconfig="$PKI/kubelet-$NAME.conf" --root-dir="$NODE/kubelet" \
  --container-runtime=remote --container-runtime-endpoint="unix://$NODE/containerd.sock" --hostname-override="$NAME" \
  --node-ip="$ADDRESS" --cert-dir="$NODE/kubelet-pki" > "$NODE/kubelet.log" 2>&1 &
mkdir -p /run/k8slab
mount -t tmpfs locks /run/k8slab  # each node's own
touch /run/k8slab/xtables.lock
XTABLES_LOCKFILE=/run/k8slab/xtables.lock "$BIN/kube-proxy" --kubeconfig="$PKI/proxy.conf" --cluster-cidr="$PODS" \
  --hostname-override="$NAME" --proxy-mode=iptables --conntrack-max-per-core=0 --conntrack-tcp-timeout-established=0 \
  --conntrack-tcp-timeout-close-wait=0 --healthz-bind-address=127.0.0.1:10256 --metrics-bind-address=127.0.0.1:10249 \
  > "$NODE/kube-proxy.log" 2>&1 &
wait
