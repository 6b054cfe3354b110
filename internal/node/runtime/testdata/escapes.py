# Tries known ways out of a container as root in it, and prints a line for each: "held", or what it got. The last line says how many it tried.
# Arguments: a folder of the node's that containers must not see, and optionally an abstract socket of the node's that they must not reach.
import ctypes, os, socket, subprocess, sys, mmap
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
DATA = sys.argv[1]
SOCKET = sys.argv[2] if len(sys.argv) > 2 else ''

def call(number, *args):
    ctypes.set_errno(0)
    r = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) for a in args])
    return r, ctypes.get_errno()

def denied(number, *args, errnos=(1,)):
    r, e = call(number, *args)
    return r == -1 and e in errnos or 'returned %d, errno %d' % (r, e)

def shell(text):
    p = subprocess.run(['sh', '-c', text], capture_output=True, text=True)
    return p.returncode != 0 or 'succeeded: ' + p.stdout + p.stderr

def writes(path, text):
    try:
        with open(path, 'w') as f:
            f.write(text)
    except OSError:
        return True
    return not os.path.exists(path) or 'written'

def sees(path):
    try:
        found = os.listdir(path)
    except OSError:
        return True
    return not found or 'sees %s' % found

def device(path):
    try:
        os.mknod(path, 0o600 | 0o060000, os.makedev(*DISK))
    except OSError:
        return True
    try:
        os.close(os.open(path, os.O_RDONLY))
    except OSError:
        return True
    return 'the disk was opened'

DISK = (os.major(os.stat('/').st_dev) or 254, 0)
for line in open('/proc/partitions'):
    f = line.split()
    if len(f) == 4 and f[0].isdigit():
        DISK = (int(f[0]), int(f[1]))

def memory():
    try:
        os.mknod('/tmp/mem', 0o600 | 0o020000, os.makedev(1, 1))
        os.close(os.open('/tmp/mem', os.O_RDONLY))
    except OSError:
        return True
    return 'memory was opened'

def chroot():
    pid = os.fork()
    if pid == 0:
        os.makedirs('/tmp/jail', exist_ok=True)
        fd = os.open('/', os.O_RDONLY)
        os.chroot('/tmp/jail')
        os.fchdir(fd)
        for _ in range(100):
            os.chdir('..')
        os.chroot('.')
        os._exit(0 if sees(DATA) is True else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0 or 'the data directory is seen'

def other_architecture():
    if os.uname().machine != 'x86_64':
        return True
    pid = os.fork()
    if pid == 0:
        # mov eax, 20 (getpid of i386); int 0x80; ret
        code = b'\xb8\x14\x00\x00\x00\xcd\x80\xc3'
        m = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        m.write(code)
        f = ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(m)))
        f()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) < 0 or 'calls of another architecture work'

def vsock():
    try:
        socket.socket(40, socket.SOCK_STREAM)
    except OSError:
        return True
    return 'a socket to the host was made'

def mode(path):
    # The mode that it has anyway, so that a machine on which this succeeds is not harmed.
    try:
        os.chmod(path, os.stat(path).st_mode & 0o7777)
    except OSError:
        return True
    return 'changed'

def usable(path):
    with open(path, 'r+b', buffering=0) as f:
        f.write(b'x')
    return True

def abstract():
    if not SOCKET:
        return True
    s = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        s.connect('\0' + SOCKET)
    except OSError:
        return True
    return 'connected'

# What was open when the program began: nothing but the standard files may be, and nothing of the machine's.
def descriptors():
    for fd in os.listdir('/proc/self/fd'):
        try:
            target = os.readlink('/proc/self/fd/' + fd)
        except OSError:
            continue
        if int(fd) > 2 and target != '/proc/%d/fd' % os.getpid() or DATA in target:
            return '%s is %s' % (fd, target)
    return True

def own_program():
    # CVE-2019-5736: what started this process is not to be written by way of /proc.
    for pid in [p for p in os.listdir('/proc') if p.isdigit()]:
        try:
            exe = os.readlink('/proc/%s/exe' % pid)
            if 'portal' not in exe and 'memfd' not in exe:
                continue
            os.close(os.open('/proc/%s/exe' % pid, os.O_WRONLY))
            return 'opened ' + exe
        except OSError:
            pass
    return True

def reads_kernel(path):
    try:
        with open(path, 'rb') as f:
            return not f.read(1) or 'read'
    except OSError:
        return True

def links(name, target):
    # A link that leads out has to lead to the same path in here.
    path = '/tmp/' + name
    os.symlink(target, path)
    return sees(path + DATA)

def hidden_proc():
    # Only the container's own processes are in /proc.
    for p in os.listdir('/proc'):
        if not p.isdigit():
            continue
        try:
            line = open('/proc/%s/cmdline' % p).read()
        except OSError:
            continue
        words = line.split('\0')
        if words[0] == 'portal-shim' or words[0].endswith('portal') and words[1:2] == ['node']:
            return 'sees ' + words[0]
    return True

NEWNS, NEWUSER, NEWNET, NEWPID = 0x20000, 0x10000000, 0x40000000, 0x20000000
checks = {
    'mount': lambda: shell('mount -t tmpfs none /mnt'),
    'mount by the new calls': lambda: denied(430, 0, 0),
    'clone a mount tree': lambda: denied(428, -100, 0, 1),
    'change mount attributes': lambda: denied(442, -100, 0, 0, 0, 0),
    'unmount what protects /proc': lambda: shell('umount /proc/sys'),
    'remount /sys': lambda: shell('mount -o remount,rw /sys'),
    'unshare mounts': lambda: denied(272, NEWNS),
    'unshare users': lambda: denied(272, NEWUSER),
    'clone with a user namespace': lambda: denied(56, NEWUSER | 17, 0, 0, 0, 0),
    'clone with a network namespace': lambda: denied(56, NEWNET | 17, 0, 0, 0, 0),
    'clone3': lambda: denied(435, 0, 0, errnos=(38,)),
    'enter namespaces': lambda: shell('nsenter -t 1 -m -n -p true'),
    'pivot_root': lambda: denied(155, 0, 0),
    'the disk, in /tmp': lambda: device('/tmp/disk'),
    'the disk, in /dev': lambda: device('/dev/disk'),
    'the disk, in /dev/shm': lambda: device('/dev/shm/disk'),
    'physical memory': memory,
    'the mode of /dev/null': lambda: mode('/dev/null'),
    'the mode of /dev/urandom': lambda: mode('/dev/urandom'),
    'the mode of /dev/tty': lambda: mode('/dev/tty'),
    'the mode of what stdin is': lambda: mode(0),
    'and yet /dev/null works': lambda: usable('/dev/null'),
    'core_pattern': lambda: writes('/proc/sys/kernel/core_pattern', '|/tmp/x'),
    'modprobe path': lambda: writes('/proc/sys/kernel/modprobe', '/tmp/x'),
    'sysrq': lambda: writes('/proc/sysrq-trigger', 'h'),
    'uevent helper': lambda: writes('/sys/kernel/uevent_helper', '/tmp/x'),
    'huge pages': lambda: writes('/sys/kernel/mm/transparent_hugepage/enabled', 'never'),
    'release agent': lambda: writes('/sys/fs/cgroup/memory/release_agent', '/tmp/x'),
    'own limits': lambda: writes('/sys/fs/cgroup/memory/memory.limit_in_bytes', '-1'),
    'new control group': lambda: shell('mkdir /sys/fs/cgroup/memory/x'),
    'binfmt_misc': lambda: writes('/proc/sys/fs/binfmt_misc/register', ':x:'),
    'chroot and back': chroot,
    'the root of others': lambda: sees('/proc/1/root' + DATA),
    'the data directory': lambda: sees(DATA),
    'keyrings': lambda: denied(250, 0, -3, 1),
    'bpf': lambda: denied(321, 0, 0, 0),
    'perf': lambda: denied(298, 0, 0, -1, -1, 0),
    'userfaultfd': lambda: denied(323, 0),
    'io_uring': lambda: denied(425, 1, 0),
    'file handles': lambda: denied(304, 0, 0, 0),
    'kexec': lambda: denied(246, 0, 0, 0, 0),
    'kernel modules': lambda: denied(175, 0, 0, 0),
    'reboot': lambda: denied(169, 0, 0, 0, 0),
    'the clock': lambda: denied(164, 0, 0),
    'the host name': lambda: denied(170, 0, 0),
    'memory of others': lambda: denied(310, 1, 0, 0, 0, 0, 0),
    'descriptors of others': lambda: denied(438, 0, 0, 0),
    'swap': lambda: denied(167, 0, 0),
    'the kernel log': lambda: denied(103, 3, 0, 0),
    'calls of the future': lambda: denied(1000, errnos=(38,)),
    'calls of x32': lambda: denied(0x40000000 + 39, errnos=(38,)),
    'calls of i386': other_architecture,
    'sockets to the host': vsock,
    'ports of the hardware': lambda: denied(172, 3),
    'mount proc': lambda: shell('mkdir -p /tmp/p && mount -t proc proc /tmp/p'),
    'mount sysfs': lambda: shell('mkdir -p /tmp/s && mount -t sysfs sysfs /tmp/s'),
    'mount cgroup': lambda: shell('mkdir -p /tmp/c && mount -t cgroup -o pids none /tmp/c'),
    'bind /': lambda: shell('mkdir -p /tmp/b && mount --bind / /tmp/b'),
    'sysctls of the kernel': lambda: writes('/proc/sys/kernel/panic', '1'),
    'sysctls of memory': lambda: writes('/proc/sys/vm/drop_caches', '1'),
    'sysctls of forwarding': lambda: writes('/proc/sys/net/ipv4/ip_forward', '1'),
    'the OOM killer, raised above others': lambda: writes('/proc/self/oom_score_adj', '-1000'),
    'namespaces of others by their files': lambda: denied(308, os.open('/proc/1/ns/net', os.O_RDONLY), 0),
    'memory of the kernel': lambda: reads_kernel('/proc/kcore'),
    'keys of the kernel': lambda: reads_kernel('/proc/keys'),
    'processes of the node': hidden_proc,
    'links to the parent of the root': lambda: links('up', '../' * 64),
    'descriptors that were left open': descriptors,
    'the program that starts containers': own_program,
    'abstract sockets of the node': abstract,
    'interfaces': lambda: shell('ip link add escape type dummy || ip link add escape type bridge'),
    'addresses': lambda: shell('ip addr add 192.0.2.99/32 dev lo'),
    'routes': lambda: shell('ip route add 192.0.2.98/32 dev lo'),
    'filters': lambda: shell('nft add table ip escape'),
    'quotas': lambda: denied(179, 0, 0, 0, 0),
    'accounting': lambda: denied(163, 0),
    'fanotify': lambda: denied(300, 0, 0),
}
first = descriptors()
checks['descriptors that were left open'] = lambda: first
for name, check in checks.items():
    try:
        result = check()
    except Exception as e:
        result = 'raised %r' % e
    print(name + ':', 'held' if result is True else result, flush=True)
print('tried', len(checks))
