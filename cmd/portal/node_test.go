package main

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/node/runtime"
)

// TestUnregisteredNode: a node that never reached its server, or could not be started, leaves nothing behind but what was there before.
func TestUnregisteredNode(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	silent, err := net.Listen("tcp", "127.0.0.1:0") // accepts, and never answers
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	server := "https://" + silent.Addr().String()
	for name, c := range map[string]struct {
		args []string
		stop bool // it is asked to end; if not, it ends by itself, with an error
	}{
		"a kubeconfig": {[]string{"--kubeconfig", ""}, true},
		"a token":      {[]string{"--server", server, "--token", "abcdef.0123456789abcdef", "--unsafe-skip-ca-hash"}, true},
		"no token":     {[]string{"--server", server}, false},
	} {
		t.Run(name, func(t *testing.T) {
			dir, group := t.TempDir(), fmt.Sprintf("portal-test-%d/a/b", os.Getpid())
			if c.args[0] == "--kubeconfig" {
				c.args[1] = filepath.Join(t.TempDir(), "config")
				text := fmt.Sprintf("apiVersion: v1\nkind: Config\nclusters: [{name: c, cluster: {server: %q}}]\ncontexts: [{name: c, context: {cluster: c}}]\ncurrent-context: c\n", server)
				if err := os.WriteFile(c.args[1], []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			groups, err := runtime.FindCgroups(strings.Split(group, "/")[0])
			if err != nil {
				t.Fatal(err)
			}
			data := filepath.Join(dir, "some", "where")
			if name == "a token" { // the folder may be somebody's
				if err := os.MkdirAll(filepath.Join(data, "logs"), 0o700); err != nil {
					t.Fatal(err)
				}
			}
			self, err := os.Executable()
			if err != nil {
				t.Fatal(err)
			}
			cmd := exec.CommandContext(t.Context(), self, slices.Concat([]string{"node"}, c.args, []string{
				"--name", "n", "--node-ip", "192.0.2.1", "--data-dir", data, "--cgroup-root", group, "--bridge", fmt.Sprint("t", os.Getpid()),
				"--proxy-mode", "none", "--dns", "none", "--report=false",
			})...)
			cmd.Env = append(os.Environ(), asPortal+"=yes")
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			ended := make(chan error, 1)
			go func() { ended <- cmd.Wait() }()
			if c.stop {
				for begun := false; !begun; time.Sleep(10 * time.Millisecond) {
					select {
					case err := <-ended:
						t.Fatalf("it ended: %v", err)
					default:
					}
					_, err := os.Stat(filepath.Join(data, "images"))
					begun = err == nil && (name != "a kubeconfig" || groups.Exist())
				}
				if err := cmd.Process.Signal(unix.SIGTERM); err != nil {
					t.Fatal(err)
				}
			}
			if err := <-ended; (err == nil) != c.stop {
				t.Errorf("it ended with %v", err)
			}
			if groups.Exist() {
				t.Error("its control groups are left")
			}
			var left []string
			_ = filepath.WalkDir(dir, func(path string, _ os.DirEntry, _ error) error {
				left = append(left, strings.TrimPrefix(path, dir))
				return nil
			})
			want := "[]"
			if name == "a token" {
				want = "[ /some /some/where /some/where/logs]"
			}
			if got := fmt.Sprint(left); got != want {
				t.Errorf("left are %s, want %s", got, want)
			}
		})
	}
}

// TestNodeMistakes: a flag that is wrong is named, with what is wrong, before anything is made.
func TestNodeMistakes(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "data")
	for _, c := range []struct{ flag, value, want string }{
		{"pod-cidr", "10.244.1.5", `--pod-cidr: 10.244.1.5/32 has no room for Pods`},
		{"pod-cidr", "fd00::/127", `--pod-cidr: fd00::/127 has no room for Pods`},
		{"pod-cidr", "10.244.1.0/33", `--pod-cidr: "10.244.1.0/33" is neither an address nor a prefix`},
		{"pod-cidr", "10.244.1.0/24,10.244.2.0/24", `--pod-cidr: "10.244.1.0/24,10.244.2.0/24" has more than one prefix of a family`},
		{"node-ip", "somewhere", `--node-ip: "somewhere" is no IP address`},
		{"node-ip", "0.0.0.0", `--node-ip: 0.0.0.0 is no address by which others can reach this machine`},
		{"node-ip", "127.0.0.1", `--node-ip: 127.0.0.1 is no address`},
		{"cluster-dns", "dns", `--cluster-dns: "dns" is no IP address`},
		{"stream-address", "x", `--stream-address: "x" is no IP address`},
		{"bridge", "a/b", `--bridge: "a/b" can't be the name of an interface`},
		{"zone", "a b", `--zone: "a b" can't be a label's value`},
		{"cluster-domain", "Cluster Local", `--cluster-domain: "Cluster Local" is no DNS zone`},
		{"cgroup-root", "../x", `--cgroup-root: "../x" must not contain '..'`},
	} {
		cmd := newNodeCommand()
		cmd.SetOut(io.Discard)
		cmd.SetErr(io.Discard)
		cmd.SilenceErrors, cmd.SilenceUsage = true, true
		cmd.SetArgs([]string{"--kubeconfig", filepath.Join(dir, "none"), "--name", "n", "--data-dir", dir, "--" + c.flag, c.value})
		err := cmd.ExecuteContext(t.Context())
		var usage usageError
		if !errors.As(err, &usage) || !strings.HasPrefix(err.Error(), c.want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("--%s %s: %v, want %s", c.flag, c.value, err, c.want)
		}
	}
	if _, err := os.Lstat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s: %v", dir, err)
	}
}
