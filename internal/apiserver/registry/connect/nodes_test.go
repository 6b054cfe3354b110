package connect

import (
	"fmt"
	"testing"
	"time"
)

// TestTransportsOfNodes: a node's transport is kept while it is used, and forgotten afterwards.
func TestTransportsOfNodes(t *testing.T) {
	clock := time.Unix(1_800_000_000, 0)
	n := &Nodes{now: func() time.Time { return clock }}
	first := n.Transport("stays", "192.0.2.1", false)
	for minute := range 60 {
		n.Transport(fmt.Sprint("gone-", minute), "192.0.2.2", false)
		clock = clock.Add(time.Minute)
		if n.Transport("stays", "192.0.2.1", false) != first {
			t.Fatal("a transport that is used was forgotten")
		}
	}
	if len(n.transports) > 8 {
		t.Errorf("%d transports are kept, of 60 nodes that are gone", len(n.transports))
	}
	if n.Transport("stays", "192.0.2.3", false) == first {
		t.Error("a node with another address has the same transport")
	}
}

// TestCommands: what runs commands on a node is known by its path, however that is written.
func TestCommands(t *testing.T) {
	for path, want := range map[string]bool{
		"exec/default/p/c": true, "/exec/default/p/c": true, "//exec/default/p/c": true, "/x/../exec/default/p/c": true, "./run/a/b/c": true, "attach/a/b/c": true,
		"portForward/a/b": true, "cri/exec/token": true, "": false, "/": false, "pods": false, "metrics": false, "containerLogs/default/p/c": false, "executions": false,
	} {
		if got := isCommand(path); got != want {
			t.Errorf("%q: %v, want %v", path, got, want)
		}
	}
}
