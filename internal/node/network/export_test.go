package network

import (
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"portal/internal/nettest"
)

// Namespace is a network namespace of the test's own.
type Namespace struct {
	*nettest.Namespace
	Path string
}

func NewNamespace(t *testing.T) *Namespace {
	t.Helper()
	n := nettest.NewNamespace(t)
	return &Namespace{n, fmt.Sprintf("/proc/self/fd/%d", n.Handle)}
}

// Sysctls are what a Pod's runtime sets.
func (n *Namespace) Sysctls(t *testing.T) {
	n.Do(func() {
		for name, value := range PodSysctls() {
			if err := os.WriteFile("/proc/sys/"+strings.ReplaceAll(name, ".", "/"), []byte(value), 0); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
	})
}

// Serve answers with who asked, until the test ends.
func (n *Namespace) Serve(t *testing.T, address string) {
	n.Do(func() {
		l, err := net.Listen("tcp", address)
		if err != nil {
			t.Error(err)
			return
		}
		t.Cleanup(func() { l.Close() })
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				host, _, _ := net.SplitHostPort(c.RemoteAddr().String())
				fmt.Fprint(c, host)
				c.Close()
			}
		}()
	})
}

// Ask makes a connection and returns what is answered.
func (n *Namespace) Ask(address string) (answer string, err error) {
	n.Do(func() {
		var c net.Conn
		if c, err = net.DialTimeout("tcp", address, 2*time.Second); err != nil {
			return
		}
		defer c.Close()
		data, e := io.ReadAll(c)
		answer, err = string(data), e
	})
	return answer, err
}

// Run runs a command and returns its output, whether it succeeds or not.
func (n *Namespace) Run(t *testing.T, args ...string) string {
	t.Helper()
	var out []byte
	n.Do(func() { out, _ = exec.Command(args[0], args[1:]...).CombinedOutput() })
	return string(out)
}

// ServeUDP answers each datagram with who sent it, until the test ends.
func (n *Namespace) ServeUDP(t *testing.T, address string) {
	n.Do(func() {
		c, err := net.ListenPacket("udp", address)
		if err != nil {
			t.Error(err)
			return
		}
		t.Cleanup(func() { c.Close() })
		go func() {
			buf := make([]byte, 1500)
			for {
				_, from, err := c.ReadFrom(buf)
				if err != nil {
					return
				}
				host, _, _ := net.SplitHostPort(from.String())
				_, _ = c.WriteTo([]byte(host), from)
			}
		}()
	})
}

// Socket is where one client sends datagrams from, again and again.
type Socket struct{ net.Conn }

// DialUDP opens one.
func (n *Namespace) DialUDP(t *testing.T, address string) (s Socket) {
	t.Helper()
	n.Do(func() {
		c, err := net.Dial("udp", address)
		if err != nil {
			t.Fatal(err)
		}
		s.Conn = c
	})
	t.Cleanup(func() { s.Close() })
	return s
}

// Ask sends a datagram, a few times if need be, and returns the answer.
func (s Socket) Ask() (string, error) {
	buf := make([]byte, 1500)
	var err error
	for range 3 {
		if _, err = s.Write([]byte("?")); err != nil {
			time.Sleep(50 * time.Millisecond)
			continue // of an earlier one
		}
		_ = s.SetReadDeadline(time.Now().Add(500 * time.Millisecond))
		var n int
		if n, err = s.Read(buf); err == nil {
			return string(buf[:n]), nil
		}
	}
	return "", err
}

// Handle is the namespace's.
