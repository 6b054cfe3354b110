package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

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
		want error // nil: another one
	}{
		"a kubeconfig": {[]string{"--kubeconfig", ""}, context.Canceled},
		"a token":      {[]string{"--server", server, "--token", "abcdef.0123456789abcdef", "--unsafe-skip-ca-hash"}, context.Canceled},
		"no token":     {[]string{"--server", server}, nil},
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
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			data := filepath.Join(dir, "some", "where")
			if name == "a token" { // the folder may be somebody's
				if err := os.MkdirAll(filepath.Join(data, "logs"), 0o700); err != nil {
					t.Fatal(err)
				}
			}
			cmd := newNodeCommand()
			cmd.SetOut(io.Discard)
			cmd.SetErr(io.Discard)
			cmd.SilenceErrors, cmd.SilenceUsage = true, true
			cmd.SetArgs(append(c.args, "--name", "n", "--node-ip", "192.0.2.1", "--data-dir", data, "--cgroup-root", group, "--bridge", fmt.Sprint("t", os.Getpid()),
				"--proxy-mode", "none", "--dns", "none", "--report=false"))
			ended := make(chan error, 1)
			go func() { ended <- cmd.ExecuteContext(ctx) }()
			if c.want != nil {
				for begun := false; !begun; time.Sleep(10 * time.Millisecond) {
					select {
					case err := <-ended:
						t.Fatalf("it ended: %v", err)
					default:
					}
					_, err := os.Stat(filepath.Join(data, "images"))
					begun = err == nil && (name != "a kubeconfig" || groups.Exist())
				}
				cancel()
			}
			if err := <-ended; err == nil || c.want != nil && !errors.Is(err, c.want) {
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
