#!/bin/busybox sh
# The first process of the guest: loads the modules, puts the host's files (read-only) under /host and runs /command
# there. What the command says goes to the second serial line, with its exit status at the end.
bb=/bin/busybox
$bb mkdir -p /proc /sys /dev /host
$bb mount -t proc proc /proc
$bb mount -t sysfs sys /sys
$bb mount -t devtmpfs dev /dev
$bb stty -F /dev/ttyS1 raw
exec >/dev/ttyS1 2>&1
finish() {
  $bb sync
  echo "vm-exit $1"
  $bb sleep 0.3 # until the line has been sent
  $bb poweroff -f
}
while read -r module; do
  $bb insmod "/modules/$module" || finish 125
done </modules/order
# So small a machine would track no more than 8192 flows, and forget living ones for new ones where a test makes more.
echo 32768 >/sys/module/nf_conntrack/parameters/hashsize || finish 125
echo 262144 >/proc/sys/net/netfilter/nf_conntrack_max || finish 125
$bb mount -t virtiofs -o ro host /host || finish 125
$bb mkdir /plain
$bb mount --bind /host /plain || finish 125
for d in tmp run; do $bb mount -t tmpfs "$d" "/host/$d" || finish 125; done
for d in proc sys dev; do $bb mount --bind "/$d" "/host/$d" || finish 125; done
$bb mkdir -p /host/run/vm/host /host/dev/shm
$bb mount --bind /plain /host/run/vm/host || finish 125
$bb mount -t tmpfs shm /host/dev/shm
$bb cp /command /host/run/vm/command
$bb ip link set lo up
$bb chroot /host /usr/bin/env -i HOME=/run/vm PATH="/usr/sbin:/usr/bin:/sbin:/bin" sh /run/vm/command
finish $?
