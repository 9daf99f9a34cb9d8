#!/usr/bin/env bash
# Make an image of your own in AWS, in which SkyPilot's runtime and a job's packages are installed.
#
#   build_aws.sh REGION INSTANCE_TYPE [REQUIREMENT...]
#
# Starts one on-demand instance by SkyPilot, lets it install what each node of a run would, removes all else from it
# (clean_node.sh), and makes an image of its disk. Prints the image's id, and ends the instance whatever happens.
# INSTANCE_TYPE is one of the kind that you train on (m6i.xlarge; g6.xlarge with a GPU); it is paid for some minutes.
# REQUIREMENTs are your job's packages; spotguard's own and boto3 come without saying. Needs sky, aws and python3 with
# spotguard on PATH. The image and its snapshot cost some cents a month until you deregister and delete them.
set -euo pipefail
[ $# -ge 2 ] || { sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p}' "$0"; exit 2; }
here=$(dirname "$(realpath "${BASH_SOURCE[0]}")")
region=$1 kind=$2; shift 2
cluster=spotguard-image-$(date +%m%d%H%M%S)
folder=$(mktemp -d)
trap 'sky down -y "$cluster" >&2 || true; rm -rf "$folder"' EXIT

own=$(python3 - <<'PY'
import importlib.metadata

wanted = importlib.metadata.requires("spotguard") or []
plain = [each for each in wanted if "extra ==" not in each or "extra == 'aws'" in each]
print("\n".join(each.partition(";")[0].strip() for each in plain if "python_version" not in each))
PY
)
printf '%s\n' "$own" "$@" | base64 -w 0 > "$folder/requirements"
# What is imported first is compiled now.
cat > "$folder/task.yaml" <<YAML
envs: {REQUIREMENTS: "$(cat "$folder/requirements")"}
setup: |
  set -euo pipefail
  base64 --decode <<< "\$REQUIREMENTS" > /tmp/requirements.txt
  "\$HOME/.local/bin/uv" pip install --python "\$HOME/sky-user-env/bin/python" -r /tmp/requirements.txt
run: |
  set -e
  "\$HOME/sky-user-env/bin/python" -c 'import torch; print("torch", torch.__version__)'
  "\$HOME/skypilot-runtime/bin/python" -m compileall -q "\$HOME"/skypilot-runtime/lib/python3*/site-packages/sky >/dev/null || true
  "\$HOME/sky-user-env/bin/python" -m compileall -q "\$HOME"/sky-user-env/lib/python3*/site-packages >/dev/null || true
YAML
sky launch -y -c "$cluster" --infra "aws/$region" --instance-type "$kind" --no-use-spot "$folder/task.yaml" >&2

instance=$(aws ec2 describe-instances --region "$region" --query 'Reservations[].Instances[].InstanceId' --output text \
  --filters "Name=tag:skypilot-cluster-name,Values=$cluster-*" Name=instance-state-name,Values=running)
[ "$(wc -w <<< "$instance")" = 1 ] || { echo "no instance of $cluster" >&2; exit 1; }
# Over SSH, since a job of SkyPilot's would end with SkyPilot. Nobody can log in afterwards, nor has to.
keys=$HOME/.sky/generated
ssh -F "$keys/ssh/$cluster" -i "$keys/ssh-keys/$cluster.key" "$cluster" 'bash -s' < "$here/clean_node.sh" >&2
image=$(aws ec2 create-image --region "$region" --instance-id "$instance" --name "$cluster" \
  --description 'SkyPilot runtime and the packages of a job' --query ImageId --output text)
echo "waiting for $image, some minutes" >&2
aws ec2 wait image-available --region "$region" --image-ids "$image"
echo "$image"
