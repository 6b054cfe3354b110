package instance

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestListenHelper is no test: it listens in a process of its own, with a file open, until its standard input ends.
func TestListenHelper(t *testing.T) {
	path := os.Getenv("PORTAL_TEST_FILE")
	if path == "" {
		return
	}
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprintf(f, "%s\n", l.Addr())
	fmt.Println("holding")
	_, _ = os.Stdin.Read(make([]byte, 1))
}

// TestWhoIsInTheWay: whoever has a port or a file is named by process and command.
func TestWhoIsInTheWay(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	cmd := exec.Command("/proc/self/exe", "-test.run=^TestListenHelper$", "-test.v")
	cmd.Env = append(os.Environ(), "PORTAL_TEST_FILE="+path)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { in.Close(); _ = cmd.Wait() })
	buf, text := make([]byte, 1024), ""
	for !strings.Contains(text, "holding") {
		n, err := out.Read(buf)
		text += string(buf[:n])
		if err != nil {
			t.Fatalf("the helper ended: %s", text)
		}
	}
	want := fmt.Sprintf("pid %d (", cmd.Process.Pid)
	if h, found := UserOf(path); !found || !strings.HasPrefix(h.String(), want) {
		t.Errorf("the file is %v's, %v; want %s…", h, found, want)
	}
	address, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	at := strings.TrimSpace(string(address))
	_, port, _ := net.SplitHostPort(at)
	for _, wanted := range []string{at, ":" + port, "0.0.0.0:" + port, "localhost:" + port} {
		if h, found := ListenerAt(wanted); !found || h.PID != cmd.Process.Pid {
			t.Errorf("%s is %v's, %v; want %s…", wanted, h, found, want)
		}
	}
	_, err = net.Listen("tcp", at)
	if err = InUse(at, err); !errors.Is(err, unix.EADDRINUSE) || !strings.HasPrefix(err.Error(), "in use by "+want) {
		t.Errorf("%v; want in use by %s…", err, want)
	}
	if _, found := ListenerAt("127.0.0.2:" + port); found {
		t.Error("a listener at 127.0.0.1 is in the way of one at 127.0.0.2")
	}
	if _, found := UserOf(path + ".none"); found {
		t.Error("a file that is not there has a user")
	}
	other := errors.New("other")
	if InUse(at, other) != other {
		t.Error("another error was changed")
	}
}

// The kernel's tables have addresses as words in the machine's order.
func TestListening(t *testing.T) {
	const table = `  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:192B 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 101 1 0 100 0 0 10 0
   1: 0100007F:192B 0100007F:9C40 01 00000000:00000000 00:00000000 00000000     0        0 102 1 0 100 0 0 10 0
   2: 00000000000000000000000001000000:192B 00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000 00000000 0 0 103 1 0 100 0 0 10 0
   3: 00000000:0050 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 104 1 0 100 0 0 10 0
`
	for address, want := range map[string][]string{
		"127.0.0.1:6443": {"socket:[101]"}, "[::1]:6443": {"socket:[103]"}, "0.0.0.0:6443": {"socket:[101]", "socket:[103]"},
		"10.0.0.1:6443": nil, "10.0.0.1:80": {"socket:[104]"}, "127.0.0.1:81": nil,
	} {
		at := netip.MustParseAddrPort(address)
		if got := listening(table, at.Addr(), at.Port()); !slices.Equal(got, want) {
			t.Errorf("%s: %v, want %v", address, got, want)
		}
	}
}
