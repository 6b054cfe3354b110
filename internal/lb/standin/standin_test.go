package standin

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

const (
	asVariable = "PORTAL_TEST_AS"
	patience   = time.Minute
)

// The test binary is also the process that stands in, and a machine whose network namespace a test has for itself.
func TestMain(m *testing.M) {
	if os.Getenv(asVariable) != "standin" {
		os.Exit(m.Run())
	}
	ctx, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer cancel()
	until, err := time.Parse(time.RFC3339Nano, os.Args[2])
	if err == nil {
		o := Options{Dir: os.Args[1], Until: until, Ready: Ready, Log: slog.New(slog.NewTextHandler(os.Stderr, nil))}
		for _, a := range os.Args[3:] {
			o.Addresses = append(o.Addresses, netip.MustParseAddr(a))
		}
		err = Serve(ctx, o)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// machine runs a test again in a network namespace of its own. It returns false in the process that only waits for that.
func machine(t *testing.T) bool {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("network namespaces need root")
	}
	if os.Getenv(asVariable) == "machine" {
		return true
	}
	cmd := exec.Command("/proc/self/exe", "-test.run=^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), asVariable+"=machine")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if !strings.Contains(string(out), "--- PASS: "+t.Name()) {
		t.Fatalf("it did not run:\n%s", out)
	}
	return false
}

func sh(t *testing.T, script string) string {
	t.Helper()
	out, err := exec.Command("bash", "-ec", script).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", script, err, out)
	}
	return string(out)
}

func eventually(t *testing.T, what string, so func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !so(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited in vain: %s", what)
		}
	}
}

// TestStandIn: a process answers for addresses until it is asked to end, until its time is over, or until another machine has taken them.
func TestStandIn(t *testing.T) {
	if !machine(t) {
		return
	}
	sh(t, `mount --make-rprivate /; mount -t tmpfs tmpfs /run; mkdir /run/netns; ip link set lo up
ip netns add r; ip link add here type veth peer name eth0 netns r
ip link set here up; ip address add 192.0.2.1/24 dev here; ip address add 2001:db8::1/64 dev here nodad
ip -n r link set eth0 up; ip -n r address add 192.0.2.2/24 dev eth0; ip -n r address add 2001:db8::2/64 dev eth0 nodad`)
	t.Setenv(asVariable, "standin")
	dir := filepath.Join(t.TempDir(), strings.Repeat("a-long-name/", 8), "lb")
	start := func(lasting time.Duration, addrs ...string) {
		t.Helper()
		args := append([]string{dir, time.Now().Add(lasting).Format(time.RFC3339Nano)}, addrs...)
		if err := Start(dir, "/proc/self/exe", args...); err != nil {
			t.Fatal(err)
		}
	}
	mac := strings.TrimSpace(sh(t, "ip -br link show here | awk '{print $3}'"))
	ask := func(a string) { sh(t, "ip netns exec r bash -c 'echo > /dev/udp/"+a+"/9' || true") }
	// The other machine finds out who has an address by sending there.
	answered := func(a string) bool {
		t.Helper()
		sh(t, "ip -n r neigh flush to "+a)
		ask(a)
		for range 50 {
			if strings.Contains(sh(t, "ip -n r neigh show "+a), mac) {
				return true
			}
			time.Sleep(20 * time.Millisecond)
		}
		return false
	}
	running := func() bool {
		_, err := os.Stat(filepath.Join(dir, socketName))
		return err == nil
	}
	const v4, v6 = "192.0.2.10", "2001:db8::10"
	if answered(v4) {
		t.Fatal("somebody answers before anybody should")
	}
	start(time.Hour, v4, v6)
	for _, a := range []string{v4, v6} {
		eventually(t, "an answer for "+a, func() bool { return answered(a) })
	}
	start(time.Hour, v4) // takes the place of the first
	eventually(t, "an answer of the second process", func() bool { return answered(v4) })
	if answered(v6) {
		t.Error("the first process goes on")
	}
	if err := End(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	if answered(v4) || running() {
		t.Errorf("it was asked to end, and goes on; %v", running())
	}
	if err := End(t.Context(), dir); err != nil {
		t.Errorf("without anybody standing in: %v", err)
	}
	start(2*time.Second, v4)
	eventually(t, "the end of its time", func() bool { return !running() && !answered(v4) })
	start(time.Hour, v4)
	eventually(t, "an answer", func() bool { return answered(v4) })
	// Another machine has it, and is heard as such when it asks for somebody.
	sh(t, "ip -n r address add "+v4+"/24 dev eth0; ip -n r route add 192.0.2.99 dev eth0 src "+v4)
	eventually(t, "the other machine to have its address", func() bool {
		sh(t, "ip -n r neigh flush to 192.0.2.99")
		ask("192.0.2.99")
		return !running()
	})
}

// TestStartFails: what can't be started says why.
func TestStartFails(t *testing.T) {
	t.Setenv(asVariable, "standin")
	dir := filepath.Join(t.TempDir(), "lb")
	err := Start(dir, "/proc/self/exe", dir, "no time")
	if err == nil || !strings.Contains(err.Error(), "no time") {
		t.Errorf("a process that ends at once: %v", err)
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := Start(dir, "/proc/self/exe", dir, "no time"); err == nil || !strings.Contains(err.Error(), "0700") {
		t.Errorf("a folder that others can enter: %v", err)
	}
}
