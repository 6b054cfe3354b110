package test

import (
	"bytes"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/internal/lab"
)

// gap measures from now on for how long an address does not answer, until it does so again after somebody else owns it.
func gap(t *testing.T, l *lab.Lab, nodes map[string]string, addrs []netip.Addr, before string) map[netip.Addr]time.Duration {
	t.Helper()
	begin := time.Now()
	out := map[netip.Addr]time.Duration{}
	for len(out) < len(addrs) {
		if time.Since(begin) > lbLimit {
			for _, name := range l.NodeNames() {
				log, _ := os.ReadFile(l.Log(name))
				t.Logf("%s:\n%s", name, log[max(0, len(log)-3000):])
			}
			t.Fatalf("after %v, only %v have moved from %s:\n%s", lbLimit, out, before, on(t, l.Router, "ip", "neigh"))
		}
		for _, a := range addrs {
			if _, found := out[a]; found {
				continue
			}
			got := neighbour(t, l, nodes, a)
			if got == "" || strings.Contains(got, "FAILED") {
				// The router has given the old owner up, and asks again when somebody wants to go there.
				_, _ = l.Router.Exec(t.Context(), "curl", "-s", "--max-time", "1", "http://"+netip.AddrPortFrom(a, 80).String()+"/")
			}
			if got != before && l.Node(got) != nil {
				out[a] = time.Since(begin)
			}
		}
	}
	return out
}

// program is the process of `portal node` on a machine of the lab, as this computer numbers it.
func program(t *testing.T, name, dir string) int {
	t.Helper()
	entries, err := os.ReadDir("/proc")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		line, err := os.ReadFile("/proc/" + e.Name() + "/cmdline")
		args := bytes.Split(line, []byte{0})
		if err != nil || len(args) < 2 || string(args[1]) != "node" || !slices.ContainsFunc(args, func(a []byte) bool { return string(a) == lab.NodeDir(dir, name) }) {
			continue
		}
		var pid int
		if _, err := fmt.Sscan(e.Name(), &pid); err == nil {
			return pid
		}
	}
	t.Fatalf("no process runs node %s", name)
	return 0
}

// restarted: while a node's agent is stopped and started again, its address stays, somebody answers those who ask for it, and neither requests nor
// connections notice.
func restarted(t *testing.T, l *lab.Lab, nodes map[string]string, a netip.Addr) {
	answers(t, l, a, "/")
	before := neighbour(t, l, nodes, a)
	x := trafficOf(t, l, []reached{{"web", netip.AddrPortFrom(a, 80).String(), false}}, 20, 4)
	restartAgent(t, l, before, func() {
		// So that it has to be asked for again.
		on(t, l.Router, "ip", "neigh", "flush", "to", a.String())
		answers(t, l, a, "/")
		if got := neighbour(t, l, nodes, a); got != before {
			t.Fatalf("%s moved from %s to %s", a, before, got)
		}
	})
	x.report(t, nil)
	if log, err := os.ReadFile(filepath.Join(lab.NodeDir(l.Dir, before), "balancing", "standin.log")); err != nil || !strings.Contains(string(log), "standing in") {
		t.Errorf("nobody stood in: %v, %s", err, log)
	}
}

// cleanStop: a node that is cordoned, and then stopped, hands its addresses over at once.
func cleanStop(t *testing.T, l *lab.Lab, nodes map[string]string, a netip.Addr) {
	answers(t, l, a, "/")
	before := neighbour(t, l, nodes, a)
	labKubectl(t, l, "", "cordon", before)
	defer labKubectl(t, l, "", "uncordon", before)
	if err := syscall.Kill(program(t, before, l.Dir), syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	took := gap(t, l, nodes, []netip.Addr{a}, before)[a]
	t.Logf("%s was stopped, and another node took over after %v", before, took.Round(time.Millisecond))
	answers(t, l, a, "/")
	// The machine starts it again: it is a member again before the next part of the test.
	eventually(t, lbLimit, "three members", func() string {
		list, err := l.API.CoordinationV1().Leases("kube-system").List(t.Context(), metav1.ListOptions{LabelSelector: "portal.dev/lb-member=true"})
		if err != nil {
			return err.Error()
		}
		alive := 0
		for _, lease := range list.Items {
			if lease.Spec.HolderIdentity != nil && *lease.Spec.HolderIdentity != "" && time.Since(lease.Spec.RenewTime.Time) < time.Duration(*lease.Spec.LeaseDurationSeconds)*time.Second {
				alive++
			}
		}
		if alive < 3 {
			return fmt.Sprint(alive)
		}
		return ""
	})
}

// killedOwner: when a node's program is killed, or the machine loses its power, another node takes its addresses over within seconds.
func killedOwner(t *testing.T, l *lab.Lab, nodes map[string]string, addrs []netip.Addr) {
	var before string
	for _, a := range addrs {
		answers(t, l, a, "/")
		before = neighbour(t, l, nodes, a)
	}
	of := slices.DeleteFunc(slices.Clone(addrs), func(a netip.Addr) bool { return neighbour(t, l, nodes, a) != before })
	if err := l.Node(before).Kill(); err != nil {
		t.Fatal(err)
	}
	for a, took := range gap(t, l, nodes, of, before) {
		t.Logf("%s was killed, and another node took %s over after %v", before, a, took.Round(time.Millisecond))
		if took > 15*time.Second { // below 3 s on a machine with nothing else to do
			t.Errorf("%s moved only after %v", a, took)
		}
		answers(t, l, a, "/")
	}
	second := neighbour(t, l, nodes, of[0])
	if err := l.PowerOff(second); err != nil {
		t.Fatal(err)
	}
	left := slices.DeleteFunc(l.NodeNames(), func(n string) bool { return n == before || n == second })
	took := gap(t, l, nodes, of[:1], second)[of[0]]
	t.Logf("%s lost its power, and another node took %s over after %v", second, of[0], took.Round(time.Millisecond))
	if got := neighbour(t, l, nodes, of[0]); got != left[0] {
		t.Errorf("%s has the address; want %s", got, left[0])
	}
}
