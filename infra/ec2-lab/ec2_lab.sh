#!/usr/bin/env bash
# An EC2 with real nodes on this one machine, for a real SkyPilot with its AWS backend.
#
#   ec2_lab.sh up                   build the nodes' image (once, minutes), start EC2 (moto) at 172.31.0.1:5566
#   ec2_lab.sh env                  exports for a shell that uses the lab:  eval "$(ec2_lab.sh env)"
#   ec2_lab.sh down                 end and remove everything but the image, whatever state it is in
#   ec2_lab.sh down-of PID          the same, if the lab's server is still that process
#   ec2_lab.sh end-api              kill SkyPilot's API server, also one that has not come to serve yet
#   ec2_lab.sh why-not              say in one sentence why this machine cannot have a lab; nothing if it can
#
#   ec2_lab.sh status | events      the instances; what happened
#   ec2_lab.sh calls                each AWS call so far: when, what, by whom, and what was answered
#   ec2_lab.sh exec ID CMD...       run a command on a node, as root
#
#   ec2_lab.sh interrupt ID|NAME|all [SECONDS]   spot interruption: notice now, shutdown after SECONDS (120)
#   ec2_lab.sh rebalance ID|all     the metadata service recommends a rebalance
#   ec2_lab.sh crash ID             the instance dies at once, without notice
#   ec2_lab.sh cut|heal ID          network partition
#   ec2_lab.sh capacity ZONE N|any [spot|on-demand]   how many instances a zone gives; then InsufficientInstanceCapacity
#   ec2_lab.sh quota VCPUS [REGION|*] [spot|on-demand] [SECONDS]   how many vCPUs the account may have (0: any), then
#                                   MaxSpotInstanceCountExceeded, VcpuLimitExceeded; who ended counts for SECONDS (0) from then
#   ec2_lab.sh price ZONE USD [TYPE] [SECONDS]   the spot price from now on: in DescribeSpotPriceHistory, and in the catalogue
#                                   of EC2LAB_HOME; above on-demand's, instances get a notice of SECONDS (120), new ones are refused
#   ec2_lab.sh fault ACTION KIND [TIMES|all] [SECONDS] [REGION]   calls such as ec2:RunInstances or s3:* fail: throttle,
#                                   error (5xx), lost (done, but answered 5xx), slow, deny, unseen (RunInstances: other calls do not
#                                   know its instances for SECONDS). One time is a call with all its retries
#   ec2_lab.sh policy FILE BUCKET PREFIX | off   S3 asks for the rights of a policy as in infra/iam
#   ec2_lab.sh calm [REGION]        take back capacity, quotas, faults, rights; end every instance
#
# EC2LAB_DATA (/tmp/ec2-lab/data) holds all state, EC2LAB_HOME (/tmp/ec2-lab/home) is the home of SkyPilot's client and
# API server, EC2LAB_VENV (.venv) has moto[server] and skypilot, EC2LAB_API_PORT (46777) is the port of the API server.
# With EC2LAB_FOR_PID the lab comes down by itself once that process is gone.
#
# A node is a set of namespaces (net, UTS, mount, PID) on a bridge with no way out. Debian packages aside, nothing
# outside these folders and the image's cache is changed. Needs root and Debian 12.
set -euo pipefail
SELF=$(realpath "${BASH_SOURCE[0]}") HERE=$(dirname "$(realpath "${BASH_SOURCE[0]}")")
DATA=$(realpath -m "${EC2LAB_DATA:-/tmp/ec2-lab/data}") CLIENT=$(realpath -m "${EC2LAB_HOME:-/tmp/ec2-lab/home}")
VENV=${EC2LAB_VENV:-$(realpath -m "$HERE/../../.venv")}
API_PORT=${EC2LAB_API_PORT:-46777}
BRIDGE=ec2lab0 ADDRESS=172.31.0.1 PORT=5566 PUBLIC=198.51.100
export EC2LAB_DATA=$DATA EC2LAB_HOME=$CLIENT EC2LAB_VENV=$VENV EC2LAB_API_PORT=$API_PORT EC2LAB_BRIDGE=$BRIDGE

# shellcheck source=infra/lab/common.sh
. "$HERE/../lab/common.sh"
lab() {
  local verb=$1 word words=(); shift
  for word in "$@"; do words+=(--data-urlencode "$word"); done
  curl --noproxy '*' -sS --fail-with-body -G "http://$ADDRESS:$PORT/_lab/$verb" "${words[@]}"
}
alive() { [ -e "$DATA/server.pid" ] && grep -qs ec2-lab/server "/proc/$(cat "$DATA/server.pid")/cmdline"; }

why_not() {
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo 'the EC2 lab needs root and Debian'
  elif ! unshare --net --mount --pid --uts --fork true 2>/dev/null; then
    echo 'the EC2 lab needs a machine on which root may make namespaces'
  elif [ ! -x "$VENV/bin/python" ] || ! "$VENV/bin/python" -c 'import importlib.util as u, sys
sys.exit(any(u.find_spec(name) is None for name in ("moto", "werkzeug", "sky", "boto3")))'; then
    echo "the EC2 lab needs moto[server] and skypilot in $VENV: make .venv/.installed-dev"
  fi
}

write_home() {
  mkdir -p "$CLIENT"/.sky/catalogs/v8/{aws,common}
  write_aws_login AKIAEC2LABEC2LABEC2L ec2lab "http://$ADDRESS:$PORT"
  cp "$HERE"/catalogue/aws/*.csv "$CLIENT/.sky/catalogs/v8/aws/"
  cp "$HERE"/catalogue/common/*.csv "$CLIENT/.sky/catalogs/v8/common/"
}

up() {
  local why image
  why=$(why_not); [ -z "$why" ] || { say "$why"; exit 3; }
  ! alive || { say "up already: EC2 at http://$ADDRESS:$PORT"; return; }
  down  # what a lab that was killed may have left
  mkdir -p "$DATA"/{nodes,disks}
  install_packages "$DATA/apt.log" sshd:openssh-server ssh:openssh-client rsync:rsync ip:iproute2 curl:curl
  image=$(EC2LAB_PYTHON=${EC2LAB_PYTHON:-$VENV/bin/python} "$HERE/build_image.sh")
  ln -sfn "$image" "$DATA/image"
  ip link add "$BRIDGE" type bridge
  ip addr add "$ADDRESS/16" dev "$BRIDGE"
  ip link set "$BRIDGE" up
  ip route replace "$PUBLIC.0/24" dev "$BRIDGE" src "$ADDRESS"
  mount -t tmpfs -o mode=755 ec2lab-disks "$DATA/disks"
  reserve_ports
  write_home
  EC2LAB_IMAGE=$image EC2LAB_CATALOGUE=$CLIENT/.sky/catalogs/v8 EC2LAB_PUBLIC=$PUBLIC \
    setsid "$VENV/bin/python" "$HERE/server" "$DATA" "$ADDRESS" "$PORT" </dev/null >>"$DATA/server.log" 2>&1 9>&- &
  echo $! > "$DATA/server.pid"
  for _ in $(seq 300); do ! lab capacity >/dev/null 2>&1 || break; alive || break; sleep 0.2; done
  lab capacity >/dev/null 2>&1 || { tail -5 "$DATA/server.log" >&2; down; say 'EC2 did not come up'; exit 1; }
  say "up: EC2 at http://$ADDRESS:$PORT"
}

down() {
  local net pid
  end_api
  if alive; then
    kill "$(cat "$DATA/server.pid")"
    for _ in $(seq 50); do alive || break; sleep 0.2; done
    ! alive || kill -9 "$(cat "$DATA/server.pid")"
  fi
  for net in $(ip netns | awk '/^ec2-/{print $1}'); do  # of a server that was killed
    for pid in $(ip netns pids "$net"); do kill -9 "$pid" 2>/dev/null || true; done
    ip netns del "$net" || true
  done
  umount -l "$DATA/disks" 2>/dev/null || true
  ip route del "$PUBLIC.0/24" 2>/dev/null || true
  ip link del "$BRIDGE" 2>/dev/null || true
  free_ports
  rm -rf "$DATA"/{nodes,server.pid,calls.jsonl,image,ports} "$CLIENT"
}

print_env() {
  cat <<ENV
export HOME=$CLIENT PATH=$VENV/bin:$(cd "$DATA/image/" 2>/dev/null && pwd -P)/tools/bin:\$PATH
ENV
  print_sky_env
}

verb=${1:-}; [ $# = 0 ] || shift
case $verb in
up) only_one; up ;;
down) only_one; down ;;
down-of) only_one; [ "$(cat "$DATA/server.pid" 2>/dev/null)" != "$1" ] || down ;;
env) print_env ;;
end-api) end_api ;;
why-not) why_not ;;
status) lab books | "$VENV/bin/python" -c 'import json, sys
for n in json.load(sys.stdin): print(*(n[k] or "-" for k in ("id", "state", "reason", "zone", "market", "ip", "public", "name")))' ;;
events) lab events | "$VENV/bin/python" -c 'import json, sys
print("\n".join(json.load(sys.stdin)))' ;;
books | calls) lab "$verb" ;;
calm) lab calm ${1:+"region=$1"} ;;
exec) id=$1; shift; nsenter -t "$(cat "$DATA/nodes/$id/pid")" --net --uts --mount --pid -- "$@" ;;
interrupt) lab interrupt "id=$1" "seconds=${2:-120}" ;;
rebalance | crash | cut | heal) lab "$verb" "id=$1" ;;
capacity) lab capacity "zone=$1" "n=$2" "market=${3:-spot}" ;;
quota) lab quota "vcpus=$1" "region=${2:-*}" "market=${3:-spot}" "seconds=${4:-0}" ;;
price) lab price "zone=$1" "usd=$2" ${3:+"type=$3"} ${4:+"seconds=$4"} ;;
fault) lab fault "action=$1" "kind=$2" "times=${3:-1}" "seconds=${4:-0}" "region=${5:-*}" ;;
policy) [ "$1" = off ] && lab policy || lab policy "file=$(realpath "$1")" "bucket=$2" "prefix=$3" ;;
*) sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p}' "$SELF"; exit 2 ;;
esac
