package shim

import (
	"encoding/json"
	"time"
)

// Sandbox is what a Pod's containers share. The agent writes it to sandbox.json in the Pod's folder before it starts the shim.
type Sandbox struct {
	ID       string
	Hostname string `json:",omitempty"` // empty: the machine's
	// Tmpfs are mounted in the shim's mount namespace: nobody else sees them, and they are gone when the last process is.
	Tmpfs []Tmpfs `json:",omitempty"`
	// Sysctls are written in the Pod's namespaces.
	Sysctls map[string]string `json:",omitempty"`
	// OwnNetwork and OwnIPC say that these namespaces are the Pod's own.
	OwnNetwork, OwnIPC bool
	// SharedPID gives all containers one PID namespace.
	SharedPID bool `json:",omitempty"`
}

// Tmpfs is a file system in memory.
type Tmpfs struct {
	Path string
	Size int64  // 0: half of the memory, as the kernel has it
	Mode string // octal
}

// Container is all that starting a container needs.
type Container struct {
	ID string
	// Meta is the agent's own, and comes back in the Status.
	Meta json.RawMessage `json:",omitempty"`
	// Dir is the container's folder: status.json, and the overlay's upper and work.
	Dir     string
	Root    Root
	Mounts  []Mount
	Process Process
	// Cgroups are the folders that the container's processes belong to, one of each hierarchy.
	Cgroups []string
	// OOMFile has the kernel's count of processes that were killed for want of memory.
	OOMFile string `json:",omitempty"`
	// CgroupMounts are mounted read-only below /sys/fs/cgroup.
	CgroupMounts []CgroupMount `json:",omitempty"`
	HostPID      bool          `json:",omitempty"`
	// Privileged shows the machine's devices, and hides and protects nothing.
	Privileged bool `json:",omitempty"`
	Shm        string
	Log        Log
	// Stdin keeps a pipe open for who attaches; else there is nothing to read. StdinOnce closes it when the first who attached has gone.
	Stdin     bool `json:",omitempty"`
	StdinOnce bool `json:",omitempty"`
	// Proc is a mounted /proc of the PID namespace that containers share. The shim fills it in.
	Proc string `json:",omitempty"`
}

// Root is a container's root file system: folders under an overlay.
type Root struct {
	Lower    []string // the uppermost first
	ReadOnly bool     `json:",omitempty"`
	// Hide are paths in it that an empty folder or file is put over.
	Hide []string `json:",omitempty"`
}

// Mount is a folder or file of the machine, in a container.
type Mount struct {
	Source string
	// SubPath is a path below Source that must not lead out of it.
	SubPath  string `json:",omitempty"`
	Target   string
	ReadOnly bool `json:",omitempty"`
	// Slave lets mounts that the machine makes below Source appear in the container.
	Slave bool `json:",omitempty"`
	// Devices lets device files work.
	Devices bool `json:",omitempty"`
}

// CgroupMount is a hierarchy of control groups.
type CgroupMount struct {
	Type string // cgroup or cgroup2
	Name string // the folder, for cgroup; it is the controller, too
}

// Process is what is executed, and with which rights.
type Process struct {
	Args   []string
	Env    []string
	Dir    string
	UID    uint32
	GID    uint32
	Groups []uint32 `json:",omitempty"`
	// Capabilities are the most that the process and its children can have: bit n is capability n.
	Capabilities    uint64
	NoNewPrivileges bool `json:",omitempty"`
	// Unconfined turns the filter of system calls off.
	Unconfined  bool `json:",omitempty"`
	OOMScoreAdj int
	Rlimits     []Rlimit `json:",omitempty"`
	TTY         bool     `json:",omitempty"`
}

// Rlimit is a resource limit of a process.
type Rlimit struct {
	Resource   int
	Soft, Hard uint64
}

// Log is where a container's output goes, in the format of the CRI.
type Log struct {
	Path     string
	MaxSize  int64
	MaxFiles int
}

// Status is what is known of a container: status.json in its folder.
type Status struct {
	ID       string
	Sandbox  string
	Meta     json.RawMessage `json:",omitempty"`
	PID      int             `json:",omitempty"` // of its first process, while it runs
	Started  time.Time
	Finished time.Time // zero: it runs
	ExitCode int
	Signal   int  `json:",omitempty"`
	OOM      bool `json:",omitempty"`
	// StartError is why it never ran.
	StartError string `json:",omitempty"`
}

// Running says whether it runs.
func (s *Status) Running() bool { return s.Finished.IsZero() }

// Files in a Pod's folder, and in a container's.
const (
	SandboxFile = "sandbox.json"
	SocketFile  = "shim.sock"
	PIDFile     = "shim.pid"
	LogFile     = "shim.log"
	StatusFile  = "status.json"
)

// Request is what the agent asks of a shim: one packet, with open files beside it.
type Request struct {
	Op Op
	ID string `json:",omitempty"` // of the container
	// Signal is for OpSignal.
	Signal int `json:",omitempty"`
	// Stdin asks OpAttach for the container's standard input.
	Stdin bool `json:",omitempty"`
	// KillOnClose ends the process of OpExec when the connection is closed.
	KillOnClose bool `json:",omitempty"`
}

// Op is what is asked.
type Op string

// What can be asked.
const (
	// OpStart starts a container: its Container is in the file beside the request. The answer comes when it runs or can't.
	OpStart Op = "start"
	// OpExec starts a process in a container: an Exec is in the first file; then come standard input, output and error unless it has
	// a terminal, whose other end comes beside the answer. One answer when it runs, and one when it has ended.
	OpExec Op = "exec"
	// OpAttach answers with files: the container's standard input if it was asked for and there is one, which for one with a terminal is the
	// terminal; then what can be read of its output from now on, and of its errors unless it has a terminal. The connection is held
	// as long as somebody is attached.
	OpAttach Op = "attach"
	// OpEndInput says, on the connection of an OpAttach, that there is no more input. It has no answer.
	OpEndInput Op = "end-input"
	// OpSignal signals a container's first process.
	OpSignal Op = "signal"
	// OpWatch answers with the Status of every container, and again whenever one changes.
	OpWatch Op = "watch"
	// OpForget forgets a container that has ended.
	OpForget Op = "forget"
	// OpStop kills all containers and ends the shim.
	OpStop Op = "stop"
)

// Exec is a further process in a container: with the rights, environment and folder of the container's own unless it says otherwise.
type Exec struct {
	Args []string
	TTY  bool `json:",omitempty"`
}

// Answer is a packet from a shim.
type Answer struct {
	Error    string  `json:",omitempty"`
	Status   *Status `json:",omitempty"`
	Listed   bool    `json:",omitempty"` // all Status have been sent once
	ExitCode *int    `json:",omitempty"` // of an OpExec that has ended
	// Of an OpAttach: whether the first file is the standard input, and whether there is a terminal.
	Stdin bool `json:",omitempty"`
	TTY   bool `json:",omitempty"`
}
