# What the labs have in common; sourced. Whoever does sets DATA, the folder of all its state, before it calls any of
# this, CLIENT, the home of SkyPilot's client and API server, and API_PORT, that of the API server.
RESERVED=/proc/sys/net/ipv4/ip_local_reserved_ports

say() { printf '%s\n' "$*" >&2; }

only_one() {  # nobody brings a lab up while another is being taken down
  mkdir -p "$DATA"
  exec 9>"$DATA.lock"
  flock 9
}

install_packages() {  # LOG PROGRAM:PACKAGE...: those of which the program, or the file, is not there
  local log=$1 missing='' pair program policy=/usr/sbin/policy-rc.d made=; shift
  for pair in "$@"; do
    program=${pair%:*}
    command -v "$program" >/dev/null || [ -x "/usr/sbin/$program" ] || missing+=" ${pair#*:}"
  done
  [ -n "$missing" ] || return 0
  say "installing$missing"
  [ -e "$policy" ] || { printf '#!/bin/sh\nexit 101\n' > "$policy"; chmod +x "$policy"; made=1; }  # start no daemon
  # shellcheck disable=SC2086
  { apt-get -o DPkg::Lock::Timeout=600 update -qq && DEBIAN_FRONTEND=noninteractive \
    apt-get -o DPkg::Lock::Timeout=600 install -y -qq --no-install-recommends $missing; } >"$log" 2>&1 ||
    { tail -5 "$log" >&2; exit 1; }
  [ -z "$made" ] || rm "$policy"
}

# Both ports are among those from which the kernel picks one for each connection: a server whose port a connection
# of somebody else has just been given does not start. Another lab may have reserved its own: ours are added and taken away.
queue_port() { echo $((50000 + (11 + API_PORT - 46580) % 10000)); }  # of SkyPilot's server/requests/queues/mp_queue.py
reserve_ports() {
  { tr ',' '\n' < "$RESERVED"; printf '%s\n' "$API_PORT" "$(queue_port)"; } | grep . | sort -un | paste -sd, > "$DATA/ports" &&
    cat "$DATA/ports" > "$RESERVED" ||
    say "cannot reserve the ports $API_PORT and $(queue_port): SkyPilot's API server may find one of them taken"
}
free_ports() {
  { tr ',' '\n' < "$RESERVED" | grep -vxE "$API_PORT|$(queue_port)|" | paste -sd, > "$RESERVED"; } 2>/dev/null || true
}

# Whoever has the lab's home as its own, or a file of it open, was started from it: SkyPilot's API server, its workers
# (which overwrite what they were started with by a title), controllers of runs.
of_the_lab() {
  local pid
  { grep -lsz "^HOME=$CLIENT\$" /proc/[0-9]*/environ; find /proc/[0-9]*/fd -lname "$CLIENT/*" 2>/dev/null; } |
    cut -d/ -f3 | sort -u | while read -r pid; do
    case $(readlink "/proc/$pid/exe") in *python*) echo "$pid" ;; esac  # and no shell of yours, nor make
  done
}

# Each is given a moment to end its own children.
end_api() {
  local pid signal
  for signal in TERM KILL; do
    for pid in $(of_the_lab); do kill -"$signal" "$pid" 2>/dev/null || true; done
    for _ in $(seq 20); do [ -n "$(of_the_lab)" ] || return 0; sleep 0.1; done
  done
}

print_sky_env() {  # what a shell has to have beside its HOME and PATH
  cat <<ENV
export PYTHONPATH=$(realpath "$(dirname "${BASH_SOURCE[0]}")/plugin")\${PYTHONPATH:+:\$PYTHONPATH}
export SKYPILOT_API_SERVER_LOCAL_PORT=$API_PORT SKYPILOT_DISABLE_USAGE_COLLECTION=1 AWS_EC2_METADATA_DISABLED=true
unset AWS_PROFILE AWS_CONFIG_FILE SKYPILOT_API_SERVER_ENDPOINT AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_ENDPOINT_URL
ENV
}

write_aws_login() {  # ACCESS-KEY SECRET ENDPOINT: of SkyPilot's user, whose SkyPilot asks nothing outside
  mkdir -p "$CLIENT"/{.aws,.sky}
  printf '[default]\naws_access_key_id = %s\naws_secret_access_key = %s\n' "$1" "$2" > "$CLIENT/.aws/credentials"
  printf '[default]\nregion = us-east-1\nendpoint_url = %s\n' "$3" > "$CLIENT/.aws/config"
  printf 'plugins:\n  - class: spotlab_plugin.NoInternet\n' > "$CLIENT/.sky/plugins.yaml"
}
