#!/usr/bin/env bash
# Make an image of your own in AWS, in which SkyPilot's runtime and a job's packages are installed.
#
#   build_aws.sh REGION INSTANCE_TYPE [REQUIREMENT...]
#
# Starts one on-demand instance by SkyPilot, lets it install what each node of a run would, removes all else from it
# (clean_node.sh), and makes an image of its disk. Prints the image's id, and ends the instance. Where that does not
# work it says how you do it, and exits with 1. If this machine dies meanwhile, the instance ends by itself.
# INSTANCE_TYPE is one of the kind that you train on (m6i.xlarge; g6.xlarge with a GPU); it is paid for some minutes.
# REQUIREMENTs are your job's packages; spotguard's own and boto3 come without saying. Needs sky, aws and python3 with
# spotguard on PATH. The image and its snapshot cost some cents a month until you deregister and delete them.
set -euo pipefail
[ $# -ge 2 ] || { sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p}' "$0"; exit 2; }
here=$(dirname "$(realpath "${BASH_SOURCE[0]}")")
region=$1 kind=$2; shift 2
cluster=spotguard-image-$(date +%m%d%H%M%S)
image='' available=''
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

instances() {  # those of the cluster that cost something
  aws ec2 describe-instances --region "$region" --query 'Reservations[].Instances[].InstanceId' --output text --filters \
    "Name=tag:skypilot-cluster-name,Values=$cluster-*" Name=instance-state-name,Values=pending,running,stopping,stopped
}

finish() {
  local code=$? left
  for _ in 1 2 3 4 5; do
    # `sky down` exits with 0 also where it failed: what counts is what EC2 says.
    sky down -y "$cluster" >&2 || true
    left=$(instances) || left=INSTANCE_ID
    [ -n "$left" ] || break
    sleep 20
  done
  if [ -n "$left" ]; then
    cat >&2 <<WORDS

AN INSTANCE OF $cluster MAY STILL COST MONEY. End it by one of these:
  sky down -y $cluster
  aws ec2 terminate-instances --region $region --instance-ids $left
WORDS
    code=1
  fi
  if [ -n "$image" ] && [ -z "$available" ]; then
    cat >&2 <<WORDS

The image $image is not ready, and costs money. Remove it and its snapshots:
  aws ec2 deregister-image --region $region --image-id $image
  aws ec2 describe-snapshots --region $region --owner-ids self --filters 'Name=description,Values=*$image*' \\
    --query 'Snapshots[].[SnapshotId]' --output text | xargs -rn1 aws ec2 delete-snapshot --region $region --snapshot-id
WORDS
  fi
  rm -rf "$folder"
  [ -n "$available" ] || [ "$code" != 0 ] || code=1  # a signal may have come after a command that succeeded
  exit "$code"
}

own=$(python3 - <<'PY'
import importlib.metadata

wanted = importlib.metadata.requires("spotguard") or []
plain = [each for each in wanted if "extra ==" not in each or "extra == 'aws'" in each]
print("\n".join(each.partition(";")[0].strip() for each in plain if "python_version" not in each))
PY
)
printf '%s\n' "$own" "$@" | base64 -w 0 > "$folder/requirements"
# What is imported first is compiled now. SkyPilot sets its autostop after the set-up only, so that begins with a guard
# of its own.
cat > "$folder/task.yaml" <<YAML
envs: {REQUIREMENTS: "$(cat "$folder/requirements")"}
setup: |
  set -euo pipefail
  sudo shutdown -P +120
  base64 --decode <<< "\$REQUIREMENTS" > /tmp/requirements.txt
  "\$HOME/.local/bin/uv" pip install --python "\$HOME/sky-user-env/bin/python" -r /tmp/requirements.txt
run: |
  set -e
  "\$HOME/sky-user-env/bin/python" -c 'import torch; print("torch", torch.__version__)'
  "\$HOME/skypilot-runtime/bin/python" -m compileall -q "\$HOME"/skypilot-runtime/lib/python3*/site-packages/sky >/dev/null || true
  "\$HOME/sky-user-env/bin/python" -m compileall -q "\$HOME"/sky-user-env/lib/python3*/site-packages >/dev/null || true
YAML
instances > /dev/null  # who may not ask for them could not see their end: known before they cost anything
trap finish EXIT
sky launch -y -c "$cluster" -i 10 --down --infra "aws/$region" --instance-type "$kind" --no-use-spot "$folder/task.yaml" >&2

instance=$(instances)
[ "$(wc -w <<< "$instance")" = 1 ] || { echo "no instance of $cluster" >&2; exit 1; }
# An on-demand instance that shuts itself down is only stopped, and its disk is paid for, unless this is said of it.
aws ec2 modify-instance-attribute --region "$region" --instance-id "$instance" \
  --attribute instanceInitiatedShutdownBehavior --value terminate
# Over SSH, since a job of SkyPilot's would end with SkyPilot. Nobody can log in afterwards, nor has to. It cleans no
# machine but that of this id.
keys=$HOME/.sky/generated
ssh -F "$keys/ssh/$cluster" -i "$keys/ssh-keys/$cluster.key" "$cluster" "bash -s -- $instance" \
  < "$here/clean_node.sh" >&2
# A reboot would lose the planned shutdown. Without one the image is of a disk to which all was written: `sync` was last.
image=$(aws ec2 create-image --region "$region" --instance-id "$instance" --name "$cluster" --no-reboot \
  --description 'SkyPilot runtime and the packages of a job' --query ImageId --output text)
echo "waiting for $image, some minutes, an hour at most" >&2
for _ in $(seq 240); do  # `aws ec2 wait` gives up after ten minutes
  state=$(aws ec2 describe-images --region "$region" --image-ids "$image" --query 'Images[0].State' --output text) ||
    state=unknown
  case $state in
    available) available=yes; break ;;
    failed | error | invalid | deregistered) break ;;
  esac
  sleep 15
done
[ -n "$available" ] || { echo "$image is $state" >&2; exit 1; }
echo "$image"
