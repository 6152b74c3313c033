#!/bin/bash
# Boots systemd as process 1 of private namespaces, on an overlay of / that is thrown away at the end.
#
# usage: boot.sh CGROUP UNITS CHECKOUT
#
# CGROUP is an empty cgroup v2 folder, UNITS holds all units that process 1 may know besides those in the overlay's
# /etc/systemd/system and /usr/lib/systemd/system, which are made empty. CHECKOUT is mounted at its own path. Runs until process 1 ends; SIGKILL to
# this script's process group ends everything, because process 1 dies with its parent.
set -euo pipefail
export CGROUP=$1 UNITS=$2 CHECKOUT=$3

# Both shells give their place to what they start. Only what becomes process 1 joins the cgroup: a process that stays in
# the cgroup's root would keep systemd from handing out controllers.
exec unshare --fork --kill-child=SIGKILL --pid --mount --uts --ipc --propagation private bash -euc '
echo 0 >"$CGROUP/cgroup.procs"
exec unshare --cgroup bash -euc "$1"
' boot '
mount -t tmpfs tmpfs /run
mkdir /run/root /run/changes
mount -t tmpfs tmpfs /run/changes
mkdir /run/changes/upper /run/changes/work
mount -t overlay overlay -o lowerdir=/,upperdir=/run/changes/upper,workdir=/run/changes/work /run/root
cd /run/root

mount -t proc proc proc
mount --rbind /sys sys
umount -R sys/fs/cgroup
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount --rbind /dev dev
mount -t tmpfs -o mode=1777 tmpfs dev/shm
mount -t mqueue mqueue dev/mqueue 2>/dev/null || true
mount -t tmpfs -o mode=755 tmpfs run
mount -t tmpfs -o mode=1777 tmpfs tmp
mkdir -p ".$CHECKOUT" run/units run/before
mount --bind "$CHECKOUT" ".$CHECKOUT"
cp -a "$UNITS/." run/units/
rm -rf etc/systemd/system usr/lib/systemd/system var/log/journal
mkdir -p etc/systemd/system usr/lib/systemd/system
# Images for containers forbid packages to start their services.
rm -f usr/sbin/policy-rc.d
printf "[Journal]\\nReadKMsg=no\\n" >etc/systemd/journald.conf

pivot_root . run/before
umount -l /run/before
exec env -i container=tensord-test PATH=/usr/sbin:/usr/bin:/sbin:/bin \
  SYSTEMD_UNIT_PATH=/etc/systemd/system:/run/units:/usr/lib/systemd/system SYSTEMD_LOG_TARGET=journal \
  /lib/systemd/systemd --system --unit=test.target --show-status=no --default-standard-output=journal
'
