package test

import (
	"os"
	"os/exec"
	"syscall"
	"testing"
)

// insideNamespace tells a test that it runs in the network namespace that it made.
const insideNamespace = "PORTAL_TEST_INSIDE"

// inNamespace says whether the test runs in new namespaces of the network and of mounts. If not, it runs this very test again in such
// ones, with these flags, and the caller is done.
func inNamespace(t *testing.T, flags ...string) bool {
	t.Helper()
	if os.Getenv(insideNamespace) != "" {
		return true
	}
	rootOnly(t)
	cmd := exec.Command("/proc/self/exe", append([]string{"-test.run", "^" + t.Name() + "$", "-test.v"}, flags...)...)
	cmd.Env = append(os.Environ(), insideNamespace+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Fatal(err)
	}
	return false
}

// nodeAddress is an address that is no loopback address, in a namespace that has a network.
const nodeAddress = "192.0.2.10"

// network is what a namespace needs to have an address and a way out.
func network(t *testing.T) {
	t.Helper()
	for _, args := range [][]string{
		{"link", "set", "lo", "up"},
		{"link", "add", "eth0", "type", "veth", "peer", "name", "far0"},
		{"addr", "add", nodeAddress + "/24", "dev", "eth0"},
		{"link", "set", "eth0", "up"},
		{"link", "set", "far0", "up"},
		{"route", "add", "default", "via", "192.0.2.1"},
	} {
		if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
			t.Fatalf("ip %v: %v %s", args, err, out)
		}
	}
}
