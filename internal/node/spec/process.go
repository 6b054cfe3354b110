package spec

import (
	"fmt"
	"math"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// Image is what an image says about how it is run.
type Image struct {
	Entrypoint, Cmd []string
	Env             []string
	WorkingDir      string
	// User is UID or UID:GID. Names have been looked up.
	UID, GID *int64
	// Groups are the further ones that the image has the user in.
	Groups []int64
	// Named says that the image's user is a name: it is not known to be other than root.
	Named bool
}

// Process is what is run in a container, and with which rights.
type Process struct {
	Args            []string
	Dir             string
	UID, GID        uint32
	Groups          []uint32
	Capabilities    uint64
	NoNewPrivileges bool
	Unconfined      bool
	Privileged      bool
	ReadOnlyRoot    bool
	OOMScoreAdj     int
}

// ProcessOf reads a container's command, in which $(NAME) is one of vars, its security context, and its Pod's. memory is the node's.
func ProcessOf(pod *corev1.Pod, c *corev1.Container, image Image, vars map[string]string, memory int64) (Process, error) {
	var p Process
	command, args := c.Command, c.Args
	if len(command) == 0 {
		command = image.Entrypoint
		if len(args) == 0 {
			args = image.Cmd
		}
	}
	// What the image says is taken as it is.
	for _, list := range []struct{ words, own []string }{{command, c.Command}, {args, c.Args}} {
		for _, word := range list.words {
			if len(list.own) > 0 {
				word = Expand(word, vars)
			}
			p.Args = append(p.Args, word)
		}
	}
	p.Dir = c.WorkingDir
	if p.Dir == "" {
		p.Dir = image.WorkingDir
	}
	own, shared := c.SecurityContext, pod.Spec.SecurityContext
	if own == nil {
		own = &corev1.SecurityContext{}
	}
	if shared == nil {
		shared = &corev1.PodSecurityContext{}
	}
	if err := p.users(own, shared, image); err != nil {
		return p, err
	}
	p.Privileged = own.Privileged != nil && *own.Privileged
	p.ReadOnlyRoot = own.ReadOnlyRootFilesystem != nil && *own.ReadOnlyRootFilesystem
	var err error
	if p.Capabilities, err = capabilities(own); err != nil {
		return p, err
	}
	p.NoNewPrivileges = own.AllowPrivilegeEscalation != nil && !*own.AllowPrivilegeEscalation
	profile := own.SeccompProfile
	if profile == nil {
		profile = shared.SeccompProfile
	}
	p.Unconfined = p.Privileged
	if profile != nil {
		switch profile.Type {
		case corev1.SeccompProfileTypeUnconfined:
			p.Unconfined = true
		case corev1.SeccompProfileTypeLocalhost:
			return p, fmt.Errorf("seccompProfile.type Localhost: profiles of the node's own are not supported; use RuntimeDefault")
		}
	}
	p.OOMScoreAdj = oomScore(pod, c, memory)
	return p, nil
}

// users finds out who a container runs as: its own context, its Pod's, its image's, in this order.
func (p *Process) users(own *corev1.SecurityContext, shared *corev1.PodSecurityContext, image Image) error {
	pick := func(list ...*int64) *int64 {
		for _, n := range list {
			if n != nil {
				return n
			}
		}
		return new(int64)
	}
	uid, gid := pick(own.RunAsUser, shared.RunAsUser, image.UID), pick(own.RunAsGroup, shared.RunAsGroup, image.GID)
	nonRoot := shared.RunAsNonRoot
	if own.RunAsNonRoot != nil {
		nonRoot = own.RunAsNonRoot
	}
	if nonRoot != nil && *nonRoot {
		explicit := own.RunAsUser != nil || shared.RunAsUser != nil
		switch {
		case *uid == 0:
			return fmt.Errorf("runAsNonRoot: the container would run as root; set runAsUser")
		case !explicit && image.Named:
			return fmt.Errorf("runAsNonRoot: the image's user is a name, which could be root's; set runAsUser")
		}
	}
	ids := append([]int64{*uid, *gid}, shared.SupplementalGroups...)
	if shared.FSGroup != nil {
		ids = append(ids, *shared.FSGroup)
	}
	for _, n := range ids {
		// The kernel takes the largest of its 32 bits for "leave as it is", and the API allows no more than this.
		if n < 0 || n > math.MaxInt32 {
			return fmt.Errorf("user or group %d: must be a number from 0 to %d", n, math.MaxInt32)
		}
	}
	p.UID, p.GID = uint32(*uid), uint32(*gid)
	add := func(g int64) {
		if !slices.Contains(p.Groups, uint32(g)) {
			p.Groups = append(p.Groups, uint32(g))
		}
	}
	add(*gid)
	if policy := shared.SupplementalGroupsPolicy; policy == nil || *policy == corev1.SupplementalGroupsPolicyMerge {
		for _, g := range image.Groups {
			add(g)
		}
	}
	for _, g := range shared.SupplementalGroups {
		add(g)
	}
	if shared.FSGroup != nil {
		add(*shared.FSGroup)
	}
	return nil
}

// names of the capabilities, in the kernel's order.
var names = []string{
	"CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP", "LINUX_IMMUTABLE", "NET_BIND_SERVICE",
	"NET_BROADCAST", "NET_ADMIN", "NET_RAW", "IPC_LOCK", "IPC_OWNER", "SYS_MODULE", "SYS_RAWIO", "SYS_CHROOT", "SYS_PTRACE", "SYS_PACCT", "SYS_ADMIN",
	"SYS_BOOT", "SYS_NICE", "SYS_RESOURCE", "SYS_TIME", "SYS_TTY_CONFIG", "MKNOD", "LEASE", "AUDIT_WRITE", "AUDIT_CONTROL", "SETFCAP", "MAC_OVERRIDE",
	"MAC_ADMIN", "SYSLOG", "WAKE_ALARM", "BLOCK_SUSPEND", "AUDIT_READ", "PERFMON", "BPF", "CHECKPOINT_RESTORE",
}

// usual are those that a container has unless it says otherwise: enough for most programs, too little to leave the container.
var usual = []string{
	"CHOWN", "DAC_OVERRIDE", "FSETID", "FOWNER", "MKNOD", "NET_RAW", "SETGID", "SETUID", "SETFCAP", "SETPCAP", "NET_BIND_SERVICE", "SYS_CHROOT", "KILL", "AUDIT_WRITE",
}

func capabilities(own *corev1.SecurityContext) (uint64, error) {
	const all = 1<<41 - 1
	if own.Privileged != nil && *own.Privileged {
		return all, nil
	}
	bit := func(name string) (uint64, error) {
		name = strings.TrimPrefix(strings.ToUpper(name), "CAP_")
		if name == "ALL" {
			return all, nil
		}
		i := slices.Index(names, name)
		if i < 0 {
			return 0, fmt.Errorf("capabilities: %q is not one of Linux", name)
		}
		return 1 << i, nil
	}
	var set uint64
	for _, name := range usual {
		b, _ := bit(name)
		set |= b
	}
	if own.Capabilities == nil {
		return set, nil
	}
	// What is named says more than ALL, whether it is added or dropped. What is both stays.
	var dropped uint64
	for _, name := range own.Capabilities.Drop {
		b, err := bit(string(name))
		if err != nil {
			return 0, err
		}
		set &^= b
		if b != all {
			dropped |= b
		}
	}
	for _, name := range own.Capabilities.Add {
		b, err := bit(string(name))
		if err != nil {
			return 0, err
		}
		if b == all {
			b &^= dropped
		}
		set |= b
	}
	return set, nil
}

// The scores of those who go last and first when the machine has no memory left, and the priority from which on Pods are the node's own.
const (
	lastToGo, firstToGo = -997, 1000
	nodeCritical        = 2_000_001_000
)

// oomScore says who goes first when the machine has no memory left, as kubelets do: those that asked for none, then the others, the
// sooner the smaller the part of the machine's memory is that they asked for. A sidecar stays as long as what it is for.
func oomScore(pod *corev1.Pod, c *corev1.Container, memory int64) int {
	if p := pod.Spec.Priority; p != nil && *p >= nodeCritical {
		return lastToGo
	}
	switch pod.Status.QOSClass {
	case corev1.PodQOSGuaranteed:
		return lastToGo
	case corev1.PodQOSBurstable:
		score := burstableScore(c, memory)
		if c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways {
			for i := range pod.Spec.Containers {
				score = min(score, burstableScore(&pod.Spec.Containers[i], memory))
			}
		}
		return score
	}
	return firstToGo
}

func burstableScore(c *corev1.Container, memory int64) int {
	part := float64(c.Resources.Requests.Memory().Value()) / float64(max(memory, 1))
	return max(firstToGo+lastToGo, min(firstToGo-int(firstToGo*part), firstToGo-1))
}
