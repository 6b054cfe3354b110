package harness

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"

	"portal/internal/lab"
)

// The AS of a lab's router, and of nodes by themselves.
const (
	RouterAS = 64500
	nodeAS   = 64512
)

// Bird is BIRD on a lab's router: a session with each node, and packets to an address shared among all nodes that announce it.
type Bird struct {
	lab    *lab.Lab
	socket string
	cancel context.CancelFunc
	ended  sync.WaitGroup
	log    locked
}

// StartBird runs BIRD with more options for its sessions, until it is closed. Its files are in dir.
func StartBird(l *lab.Lab, dir, options string) (*Bird, error) {
	path, err := exec.LookPath("bird")
	if err != nil {
		return nil, fmt.Errorf("%w: the Debian package is bird2", err)
	}
	conf := filepath.Join(dir, "bird.conf")
	if err := os.WriteFile(conf, []byte(birdConfig(l, options)), 0o600); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	b := &Bird{lab: l, socket: filepath.Join(dir, "bird.ctl"), cancel: cancel}
	// Connections of one client go different ways.
	for _, family := range []string{"ipv4", "ipv6"} {
		if _, err := l.Router.Exec(ctx, "sh", "-c", "echo 1 > /proc/sys/net/"+family+"/fib_multipath_hash_policy"); err != nil {
			cancel()
			return nil, err
		}
	}
	cmd := exec.CommandContext(ctx, path, "-f", "-c", conf, "-s", b.socket)
	cmd.Stderr = &b.log
	b.ended.Go(func() { _ = l.Router.Run(cmd) })
	return b, nil
}

func birdConfig(l *lab.Lab, options string) string {
	var out strings.Builder
	fmt.Fprintf(&out, `
log stderr all;
router id 192.168.100.1;
protocol device {}
protocol kernel { merge paths on; ipv4 { export all; import none; }; }
protocol kernel { merge paths on; ipv6 { export all; import none; }; }
protocol bfd { interface "*" { interval 200 ms; multiplier 3; }; }
template bgp node {
  local 192.168.100.1 as %d;
  passive on;
  graceful restart on;
  error wait time 1, 2;
  ipv4 { import all; export none; };
  ipv6 { import all; export none; };
  %s
}
`, RouterAS, options)
	for i, name := range l.NodeNames() {
		fmt.Fprintf(&out, "protocol bgp %s from node { neighbor 192.168.100.%d as %d; }\n", name, 11+i, nodeAS)
	}
	return out.String()
}

// Ask runs a command of BIRD's.
func (b *Bird) Ask(ctx context.Context, command ...string) (string, error) {
	return b.lab.Router.Exec(ctx, append([]string{"birdc", "-s", b.socket}, command...)...)
}

// Log is the end of what it logged.
func (b *Bird) Log() string { return b.log.tail(6000) }

// Close ends it.
func (b *Bird) Close() {
	b.cancel()
	b.ended.Wait()
}

// locked is a buffer that is read while a process writes to it.
type locked struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *locked) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *locked) tail(most int) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return string(l.text.Bytes()[max(0, l.text.Len()-most):])
}
