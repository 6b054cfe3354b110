package iptables

import (
	"bytes"
	"context"
	"log/slog"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/intent"
	"portal/internal/plan"
	"portal/internal/proxy/backend"
	"portal/internal/proxy/nf"
	"portal/internal/proxy/nf/nftest"
)

// started is the nft variant at work on some Services, in a namespace of its own.
func started(t *testing.T, services int) (*tablesBackend, *plan.Snapshot) {
	t.Helper()
	alone(t)
	s := plan.NewSnapshot(facts)
	for n := range services {
		grow(s, n, 2)
	}
	b, err := New(Options{Variant: NFT}).Open(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return b.(*tablesBackend), s
}

func grow(s *plan.Snapshot, n, endpoints int) {
	e := cluster(n, endpoints)
	s.Set(e.Service.Key, plan.For(e, facts))
}

func applied(t *testing.T, b *tablesBackend, s *plan.Snapshot) {
	t.Helper()
	if err := b.Apply(t.Context(), s, s.Delta()); err != nil {
		t.Fatal(err)
	}
	s.Acknowledge()
}

// saved is what the command reads, without counters and in any order.
func saved(t *testing.T, f intent.Family) map[string]int {
	t.Helper()
	tool := tool{f, NFT}
	out := map[string]int{}
	for _, table := range tables {
		text, err := tool.run(context.Background(), nil, tool.name("-save"), "-t", table)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(text)) {
			if strings.HasPrefix(line, "-A ") {
				out[table+" "+strings.TrimSpace(line)]++
			}
		}
	}
	return out
}

// When the kernel refuses what we write, commands write it for a time; then netlink is tried again.
func TestFallBackAndReturn(t *testing.T) {
	b, s := started(t, 100)
	now := time.Now()
	b.now = func() time.Time { return now }
	var log bytes.Buffer
	b.log = slog.New(slog.NewTextHandler(&log, nil))
	applied(t, b, s)
	faults := nftest.On(b.direct.Socket)
	refuse := func(nf.Message) unix.Errno { return unix.EOPNOTSUPP }
	expect := func(when string, fallbacks uint64, overNetlink bool) {
		t.Helper()
		if b.Fallbacks() != fallbacks {
			t.Errorf("%s: %d fallbacks, not %d", when, b.Fallbacks(), fallbacks)
		}
		before := faults.Transactions
		grow(s, 7, 1+len(s.Services[cluster(7, 0).Service.Key].Frontends[0].Routes[0].Pool.Endpoints)%4)
		applied(t, b, s)
		if (faults.Transactions > before) != overNetlink {
			t.Errorf("%s: %d transactions over netlink", when, faults.Transactions-before)
		}
		for rule, n := range saved(t, intent.IPv4) {
			if n != 1 {
				t.Errorf("%s: %d times: %s", when, n, rule)
			}
		}
		if err := b.Check(t.Context()); err != nil {
			t.Errorf("%s: %v", when, err)
		}
	}
	var _ backend.FallsBack = b
	expect("at first", 0, true)
	faults.Refuse = refuse
	expect("when netlink fails", 0, true)
	faults.Refuse = nil
	expect("right after it", 1, false)
	if !strings.Contains(log.String(), "falling back") {
		t.Errorf("the log says %q", log.String())
	}
	now = now.Add(firstPause)
	expect("a minute later", 1, true)
	expect("afterwards", 1, true)
	// Fallbacks in a row are paid with longer pauses, but never for ever.
	faults.Refuse = refuse
	for n := range 10 {
		grow(s, 8, 1+n%4)
		applied(t, b, s)
		now = now.Add(longestPause)
	}
	if b.fallbacks != 11 || b.pause != longestPause {
		t.Errorf("%d fallbacks, the last for %v", b.fallbacks, b.pause)
	}
	faults.Refuse = nil
	expect("when netlink works again", 11, true)
}

// TestDrift: whatever is missing of ours or was replaced is noticed and named, one rule of a leaf too.
func TestDrift(t *testing.T) {
	for _, commands := range []bool{false, true} {
		b, s := started(t, 100)
		if commands {
			b.direct = nil
		}
		for _, c := range []struct{ harm, names string }{
			{"iptables-nft -t nat -D PORTAL-MARK 1", "PORTAL-MARK has 1 rules instead of 2"},
			{"iptables-nft -t nat -D $(iptables-nft -t nat -S | grep -m1 -o 'PORTAL-VIPS-[0-9]* .*DNAT.*')", "PORTAL-VIPS-"},
			{"iptables-nft -t nat -A PORTAL-SERVICES -j RETURN", "PORTAL-SERVICES has"},
			{"iptables-nft -t nat -R PORTAL-MARK 2 -j RETURN", "PORTAL-MARK has other rules"},
			{`chain=$(iptables-nft -t nat -S | grep -m1 -o 'PORTAL-VIPS-[0-9]* .*DNAT' | cut -d' ' -f1)
				iptables-nft -t nat -R $chain 1 -p tcp -j DNAT --to-destination 192.0.2.66:80`, "has other rules"},
			{"iptables-nft -t filter -D FORWARD -j PORTAL-FORWARD", "FORWARD -j PORTAL-FORWARD"},
			{"iptables-nft -t filter -F PORTAL-NEW", "PORTAL-NEW has 0 rules"},
			{"iptables-nft -t nat -F", "PREROUTING -j PORTAL-SERVICES"},
			{"nft flush ruleset", "PORTAL-"},
		} {
			s.Forget()
			applied(t, b, s)
			if err := b.Check(t.Context()); err != nil {
				t.Fatalf("before %q: %v", c.harm, err)
			}
			if out, err := exec.Command("sh", "-c", c.harm).CombinedOutput(); err != nil {
				t.Fatalf("%s: %v %s", c.harm, err, out)
			}
			if err := b.Check(t.Context()); err == nil || !strings.Contains(err.Error(), c.names) {
				t.Errorf("after %q (commands: %v): %v", c.harm, commands, err)
			}
		}
	}
}
