#!/usr/bin/env bash
# Runs on the node of which build_aws.sh makes an image, as SkyPilot's user there: all goes that is not the image's.
#
#   bash -s -- INSTANCE [ROOT] < clean_node.sh   ROOT stands before each folder, the home too, for tests
#
# INSTANCE is the id of the machine that shall be cleaned. On any other nothing is touched: here it would be your home.
#
# SkyPilot copies the logins of all clouds that it knows onto a node, and the key by which its nodes are reached. Who may
# launch from the image could read them. So what stays is named here, and everything else goes: also the login of a
# cloud that SkyPilot learns tomorrow.
set -euo pipefail
shopt -s lastpipe  # what the end of a pipe reads stays, and the pipe fails where its beginning does

# keep FOLDER [NAME...]: of what is in FOLDER all goes that has none of these names. A removed file's blocks would still
# be in the snapshot, so small files are overwritten first, unless they vanish meanwhile. One with a second name is
# not: it may be a package's file, which uv has in its cache as well.
keep() {
  local folder=$1 name named=() gone=()
  shift
  [ -d "$folder" ] || return 0
  for name; do named+=(! -name "$name"); done
  sudo find "$folder" -mindepth 1 -maxdepth 1 "${named[@]}" -print0 | mapfile -d '' -t gone
  [ "${#gone[@]}" -gt 0 ] || return 0
  sudo find "${gone[@]}" -xdev -type f -links 1 -size -2048k -exec shred --iterations=1 {} + || true
  sudo rm -rf --one-file-system "${gone[@]}"
}

# The id of the EC2 instance that this is, by EC2's own word; fails where nobody says it, as on your machine.
this_instance() {
  local service=http://169.254.169.254/latest header=X-aws-ec2-metadata-token token
  local ask=(curl --silent --fail --noproxy '*' --connect-timeout 2 --max-time 5)  # SkyPilot installs uv by curl
  token=$("${ask[@]}" -X PUT -H "$header-ttl-seconds: 60" "$service/api/token") || return 1
  "${ask[@]}" -H "$header: $token" "$service/meta-data/instance-id"
}

main() {
  local instance=${1:-} root=${2:-} this
  this=$(this_instance) || this='no instance of EC2'
  if [ -z "$instance" ] || [ "$this" != "$instance" ]; then
    echo "clean_node.sh: shall clean '$instance', and this is $this: nothing was touched" >&2
    exit 2
  fi
  local home=$root$HOME
  # Once skylet is gone nothing on this node ends it. So it is told to end by itself, should nobody come back for it.
  # That is kept in /run, which is in memory, and so in no image.
  sudo shutdown -P +120
  pkill -KILL -f sky.skylet.skylet || true
  "$home/skypilot-runtime/bin/ray" stop --force > /dev/null 2>&1 || true

  # What a node would install: uv and its Pythons, SkyPilot's runtime, the environment with the job's packages, and a
  # conda that SkyPilot's image may have. Without SkyPilot's mark of its own wheel, in ~/.sky/wheels, each start would
  # install that anew.
  keep "$home" .bashrc .bash_profile .bash_logout .profile .condarc miniconda3 .local .sky sky-user-env skypilot-runtime
  keep "$home/.sky" wheels
  keep "$home/.local" bin lib share
  keep "$home/.local/share" uv
  keep "$home/.local/share/uv" python
  keep "$root/root" .bashrc .profile
  keep "$root/tmp"
  keep "$root/var/tmp"

  # A new instance gets its own at its first boot: host keys, who may log in, its id. Of this one neither those stay, nor
  # its user data and logs.
  if command -v cloud-init > /dev/null; then sudo cloud-init clean --logs; fi
  sudo rm -f "$root"/etc/ssh/ssh_host_* "$root/var/lib/dbus/machine-id"
  sudo truncate --size=0 "$root/etc/machine-id"
  keep "$root/var/log/journal"
  sudo find "$root/var/log" -ignore_readdir_race -xdev -type f -delete
  sync
}

# It comes by SSH on stdin: no command may read what is left of it, and half of it does nothing.
main "$@" < /dev/null
