package iptables

import (
	"context"
	"errors"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"portal/internal/intent"
	"portal/internal/plan"
	"portal/internal/proxy/backend"
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

// When the kernel refuses what we say, commands say it; and if they are the better speakers, they go on.
func TestCommandsTakeOver(t *testing.T) {
	b, s := started(t, 100)
	applied(t, b, s)
	refuse := func([]byte) error { return unix.EOPNOTSUPP }
	works := b.direct.transact
	b.direct.transact = refuse
	grow(s, 7, 3)
	applied(t, b, s)
	if b.direct == nil {
		t.Fatal("one change that was refused, and commands write everything")
	}
	if saved(t, intent.IPv4)["nat -A PORTAL-SERVICES -j PORTAL-VIPS"] != 1 {
		t.Fatal("the command wrote nothing")
	}
	b.direct.transact = works
	grow(s, 8, 3)
	applied(t, b, s)
	want := saved(t, intent.IPv4)
	for rule, n := range want {
		if n != 1 {
			t.Errorf("%d times: %s", n, rule)
		}
	}
	if err := b.Check(t.Context()); err != nil {
		t.Error(err)
	}
	b.direct.transact = refuse
	s.Forget()
	applied(t, b, s)
	if b.direct != nil {
		t.Error("all was refused, and still commands do not write")
	}
	if got := saved(t, intent.IPv4); len(got) != len(want) {
		t.Errorf("%d rules, not %d", len(got), len(want))
	}
	if err := b.Check(t.Context()); err != nil {
		t.Error(err)
	}
}

// What was prepared and then refused is written by Apply, once.
func TestPreparingFails(t *testing.T) {
	for _, late := range []bool{false, true} {
		b, s := started(t, 100)
		works := b.direct.transact
		prepare := func() error {
			err := b.Prepare(t.Context(), s)
			if err == nil {
				s.Prepared()
			}
			return err
		}
		if late {
			if err := prepare(); err != nil {
				t.Fatal(err)
			}
			for n := range 100 {
				grow(s, 100+n, 2)
			}
			if err := b.prepared(); err != nil {
				t.Fatal(err)
			}
		}
		b.direct.transact = func([]byte) error { return unix.ENOMEM }
		if err := prepare(); err != nil {
			t.Fatal(err) // it is known later
		}
		if err := b.prepared(); !errors.Is(err, unix.ENOMEM) {
			t.Fatalf("preparing led to %v", err)
		}
		b.direct.transact = works
		applied(t, b, s)
		rules := saved(t, intent.IPv4)
		for rule, n := range rules {
			if n != 1 {
				t.Errorf("%d times: %s", n, rule)
			}
		}
		if err := b.Check(t.Context()); err != nil {
			t.Error(err)
		}
		if !late {
			continue
		}
		fresh, same := started(t, 200)
		applied(t, fresh, same)
		if want := saved(t, intent.IPv4); len(dnats(rules)) != len(dnats(want)) {
			t.Errorf("%d endpoints, not %d", len(dnats(rules)), len(dnats(want)))
		}
	}
}

func dnats(rules map[string]int) (out []string) {
	for rule := range rules {
		if strings.Contains(rule, "-j DNAT") {
			out = append(out, rule)
		}
	}
	return out
}

// TestPreparesWhileWriting: what comes while the kernel is busy waits, and nothing is lost.
func TestPreparesWhileWriting(t *testing.T) {
	b, s := started(t, 100)
	works, free := b.direct.transact, make(chan struct{})
	b.direct.transact = func(msg []byte) error { <-free; return works(msg) }
	if err := b.Prepare(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	s.Prepared()
	for n := range 100 {
		grow(s, 100+n, 2)
	}
	if err := b.Prepare(t.Context(), s); !errors.Is(err, backend.ErrLater) {
		t.Fatalf("while the kernel was busy, preparing led to %v", err)
	}
	close(free)
	applied(t, b, s)
	if n := len(dnats(saved(t, intent.IPv4))); n != 400 {
		t.Errorf("%d endpoints, not 400", n)
	}
	if err := b.Check(t.Context()); err != nil {
		t.Error(err)
	}
}
