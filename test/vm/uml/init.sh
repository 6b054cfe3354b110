#!/bin/sh
# The first process of the user-mode machine, whose root is the host's, read-only. Puts the host's files as they are under
# /run/vm/host, and runs the command that is beside this script. What it says goes to the first serial line, with its exit
# status at the end.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
busybox stty -F /dev/ttyS0 raw
exec </dev/null >/dev/ttyS0 2>&1
finish() {
  sync
  echo "vm-exit $1"
  sleep 0.3 # until the line has been sent
  busybox poweroff -f
}
mount -t tmpfs run /run || finish 125
mkdir -p /run/vm/host
cp "${0%/*}/command" /run/vm/command || finish 125
mount -t tmpfs tmp /tmp || finish 125
mount -r -t hostfs -o / host /run/vm/host || finish 125
mkdir -p /dev/pts /dev/shm
mount -t devpts pts /dev/pts
mount -t tmpfs shm /dev/shm
ln -s /proc/self/fd /dev/fd
ip link set lo up
cd /run/vm
env -i HOME=/run/vm PATH="$PATH" sh /run/vm/command
finish $?
