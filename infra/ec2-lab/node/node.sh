#!/usr/bin/env bash
# One emulated EC2 instance: PID 1 of its own network, UTS, mount and PID namespace. Started by server/nodes.py.
#
#   node.sh HERE   HERE is the instance's folder:
#     vars       shell: NAME IP REGION ENDPOINT IMAGE INFRA PYTHON, and DISK: a folder on a tmpfs for what the
#                instance writes (upper layers). It survives a stop, not a termination. MADE: what another
#                instance had written when an image was made of it, or nothing. PLAIN is set if its AMI has
#                no wheel of SkyPilot's
#     userdata   the cloud-init user-data as RunInstances got it
#     imds.json  what the metadata service says
#
# The root is an overlay on this machine's own root, so a node costs no copies and sees the same programs; what
# it writes is its own. The machine's /root, /tmp and the repository are hidden; /home/ubuntu lies on the image.
set -euo pipefail
here=$1
# shellcheck disable=SC1091
. "$here/vars"
read -r pid _ < /proc/self/stat  # our PID outside: /proc is still the machine's

hostname "$NAME"
mount --make-rprivate /
root=$DISK/root
mkdir -p "$DISK"/{up,work,home-up,home-work,root}
chown 1000:1000 "$DISK/home-up" && chmod 755 "$DISK/home-up"
mount -t overlay "$NAME" -o "lowerdir=${MADE:+$MADE/up:}/,upperdir=$DISK/up,workdir=$DISK/work" "$root"
mkdir -p "$root/home/ubuntu" "$root/run" "$root/old"
mount -t overlay "$NAME-home" -o "lowerdir=${MADE:+$MADE/home-up:}$IMAGE/home,upperdir=$DISK/home-up,workdir=$DISK/home-work" "$root/home/ubuntu"
mkdir -p "$DISK/tmp" && chmod 1777 "$DISK/tmp"
mount --bind "$DISK/tmp" "$root/tmp"
[ -e "$root/etc/ec2lab-booted" ] || tar -C "$IMAGE/sudo" -c . | tar -C "$root" -x --keep-directory-symlink
mount -t tmpfs -o mode=755 run "$root/run"
mount -t tmpfs -o mode=755 root "$root/root"
while read -r prefix; do  # where the image's interpreters live, if below a folder that is hidden
  mkdir -p "$root$prefix" && mount --bind "$prefix" "$root$prefix"
done < "$IMAGE/interpreters"
mount -t tmpfs hidden "$root$(dirname "$INFRA")"
mount --rbind /dev "$root/dev" && mount -t tmpfs -o mode=1777 shm "$root/dev/shm"
mount -t sysfs -o ro sys "$root/sys" && mount --rbind /sys/fs/cgroup "$root/sys/fs/cgroup"
mount -t proc proc "$root/proc"
mkdir -p "$root/run/sshd" "$root/run/imds"
mount --bind "$here" "$root/run/imds"  # its metadata service runs here too, and reads imds.json there
mkdir "$root/run/lab" && mount --bind "$INFRA" "$root/run/lab"
echo "$pid" > "$here/pid"
cd "$root" && pivot_root . old && umount -l /old && cd /

# shellcheck disable=SC2016  # what is written there is expanded there
boot() {  # once per disk: what an AMI and cloud-init would have done
  sed -i '/:1000:/d' /etc/passwd /etc/group
  echo 'ubuntu:x:1000:1000:Ubuntu:/home/ubuntu:/bin/bash' >> /etc/passwd
  echo 'ubuntu:x:1000:' >> /etc/group
  echo 'ubuntu:*:19000:0:99999:7:::' >> /etc/shadow
  sed -i -E 's#^hosts:.*#hosts: files#' /etc/nsswitch.conf
  : > /etc/resolv.conf
  printf 'Defaults secure_path="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"\nroot ALL=(ALL:ALL) ALL\n@includedir /etc/sudoers.d\n' > /etc/sudoers
  mkdir -p /etc/sudoers.d /usr/local/bin /usr/local/sbin
  printf 'auth sufficient pam_permit.so\naccount sufficient pam_permit.so\nsession sufficient pam_permit.so\n' > /etc/pam.d/sudo
  # No systemd here. What SkyPilot asks of it is not needed; a shutdown ends PID 1, as `shutdown -P +120` in 120 minutes.
  printf '#!/bin/sh\nexit 0\n' > /usr/local/bin/systemctl
  printf '#!/bin/sh\n[ "$2" = restart ] || [ "$2" = reload ] && kill -HUP "$(cat /run/sshd.pid)"\nexit 0\n' > /usr/local/sbin/service
  printf '#!/bin/sh\nkill -TERM 1\n' > /usr/local/sbin/poweroff
  printf '%s\n' '#!/bin/bash' 'for when; do :; done; [[ $when = +[0-9]* ]] || exec poweroff' \
    '(setsid bash -c "sleep ${when#+}m; poweroff" < /dev/null > /dev/null 2>&1 &)' > /usr/local/sbin/shutdown
  chmod 755 /usr/local/bin/systemctl /usr/local/sbin/{service,poweroff,shutdown}
  ln -sf poweroff /usr/local/sbin/halt
  printf '%s\n' 'HostKey /etc/ssh/ssh_host_ed25519_key' 'PidFile /run/sshd.pid' 'UsePAM no' 'PasswordAuthentication no' \
    'Subsystem sftp /usr/lib/openssh/sftp-server' \
    "SetEnv AWS_ENDPOINT_URL=$ENDPOINT AWS_DEFAULT_REGION=$REGION PIP_NO_INDEX=1 UV_OFFLINE=1 UV_PYTHON_DOWNLOADS=never" \
    > /etc/ssh/sshd_config
  rm -f /etc/ssh/ssh_host_*
  ssh-keygen -q -t ed25519 -N '' -f /etc/ssh/ssh_host_ed25519_key
  "$PYTHON" /run/lab/ec2-lab/node/cloud_init.py < /run/imds/userdata
  # A controller on a node plans by SkyPilot's tables, which it would fetch from the internet.
  [ -z "$PLAIN" ] || rm -rf /home/ubuntu/.sky/wheels
  mkdir -p /home/ubuntu/.sky/catalogs
  cp -r /run/lab/ec2-lab/catalogue /home/ubuntu/.sky/catalogs/v8
  chown -R 1000:1000 /home/ubuntu/.sky
  touch /etc/ec2lab-booted
}
[ -e /etc/ec2lab-booted ] || boot
printf '127.0.0.1 localhost\n%s %s\n' "$IP" "$NAME" > /etc/hosts
echo "$NAME" > /etc/hostname

stop() {  # as systemd does at shutdown: SIGTERM to all, and SIGKILL when their time is up
  trap '' TERM
  kill -TERM -1 2>/dev/null || true
  for _ in $(seq $((10 * ${SHUTDOWN_S:-20}))); do
    kill -0 -1 2>/dev/null || break
    sleep 0.1
  done
  exit 0
}
trap stop TERM
unset IMAGE MADE
export HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
"$PYTHON" /run/lab/ec2-lab/node/metadata.py serve /run/imds/imds.json 2>/run/imds/imds.log &
[ ! -x /etc/rc.local ] || /etc/rc.local &  # what is begun at each boot, as on Debian
/usr/sbin/sshd -D -e 2>/run/imds/sshd.log &
while :; do wait -n || sleep 1; done  # this also reaps orphans
