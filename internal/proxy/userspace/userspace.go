// Package userspace is the proxy mode in which this process carries the traffic itself: the kernel hands connections to
// any frontend to a few sockets, and the process connects to an endpoint and moves the data. It encodes a plan.Snapshot,
// decides nothing about traffic and knows no other mode.
package userspace

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/intent"
	"portal/internal/plan"
	"portal/internal/proxy/backend"
	"portal/internal/proxy/nf"
)

// Source is what endpoints see of the client.
type Source uint8

const (
	// Hide: endpoints see this node's address.
	Hide Source = iota
	// Preserve: endpoints on this node see the address of a client outside, unless the plan wants it rewritten. Everybody
	// else sees the node's: the answers would not come back this way.
	Preserve
	// Announce: every TCP connection begins with a PROXY protocol header (version 2), which endpoints must expect.
	Announce
)

// sources are the names that an administrator uses.
var sources = []string{Hide: "hide", Preserve: "preserve", Announce: "announce"}

func (s *Source) String() string { return sources[*s] }

// Set reads a name.
func (s *Source) Set(name string) error {
	i := slices.Index(sources, name)
	if i < 0 {
		return fmt.Errorf("must be one of %s", strings.Join(sources, ", "))
	}
	*s = Source(i)
	return nil
}

// Type is what a flag's help calls the value.
func (*Source) Type() string { return "string" }

// Options are what an administrator may decide. Zero values mean the defaults.
type Options struct {
	Source Source
	// ConnectTimeout is how long an endpoint may take to answer before the next one is tried.
	ConnectTimeout time.Duration
	// Shun is how long an endpoint that did not answer is only tried when no other does.
	Shun time.Duration
	// UDPIdle is how long the answers to a client's datagrams are waited for after the last of either side.
	UDPIdle time.Duration
	// FileShare: of so many file descriptors of the process one is for this proxy; 0: all are.
	FileShare int
}

// New returns the mode.
func New(o Options) backend.Mode {
	if o.ConnectTimeout == 0 {
		o.ConnectTimeout = time.Second
	}
	if o.Shun == 0 {
		o.Shun = 10 * time.Second
	}
	if o.UDPIdle == 0 {
		o.UDPIdle = time.Minute
	}
	return &mode{o}
}

type mode struct{ Options }

func (*mode) Name() string { return "userspace" }

// Traits are what the mode can do and does by default.
func (*mode) Traits() backend.Traits {
	return backend.Traits{Traits: plan.Traits{Loopback4: true, Loopback6: true, Relays: true}, Automatic: true}
}

// Probe lets the kernel check all rules, in tables of their own that the same transaction deletes.
func (m *mode) Probe(_ context.Context, families []intent.Family) error {
	if os.Geteuid() != 0 {
		return errors.New("the userspace mode redirects packets to itself: run it as root")
	}
	s, err := nf.Dial()
	if err != nil {
		return err
	}
	defer s.Close()
	for _, f := range families {
		b := nf.NewBatch()
		for i, add := range []func(*table, *nf.Batch){
			func(t *table, b *nf.Batch) { t.base(b, &plan.Facts{}, &listening{}, nil) },
			func(t *table, b *nf.Batch) { t.handover(b, &plan.Facts{}, nil, nil) },
		} {
			t := tableNamed(f, m.Source, fmt.Sprintf("%s-probe-%d-%d", tableName, os.Getpid(), i))
			add(t, b)
			b.DeleteTableLast(t.at)
		}
		if err := s.Commit(b); err != nil {
			return fmt.Errorf("the kernel does not take the rules that redirect IPv%d to this process: it needs nf_tables with nat, fib, reject and conntrack (%w)", f, err)
		}
	}
	return nil
}

// Open starts to listen; nothing is redirected here before the first Apply.
func (m *mode) Open(ctx context.Context) (backend.Backend, error) { return open(m.Options) }

// Cleanup removes the tables, and the route by which answers to preserved addresses come back.
func (m *mode) Cleanup(ctx context.Context) error {
	var errs []error
	for _, f := range families {
		errs = append(errs, closeReturn(f))
	}
	s, err := nf.Dial()
	if errors.Is(err, unix.EPROTONOSUPPORT) {
		return errors.Join(errs...)
	}
	if err != nil {
		return err
	}
	defer s.Close()
	return errors.Join(append(errs, s.Remove(newTable(intent.IPv4, Hide).at, newTable(intent.IPv6, Hide).at))...)
}

func (m *mode) Limits() []string {
	limits := []string{
		"connections end when this process ends: they are its own; until it is back, new ones are led to endpoints by the kernel, unless the process was killed",
		"SCTP Services are rejected",
		"a client is connected before an endpoint is: one that can't be reached shows as a connection that is reset",
	}
	switch m.Source {
	case Preserve:
		return append(limits, "endpoints see the address of clients outside, if they are on this node and the plan allows it; else this node's")
	case Announce:
		return append(limits, "endpoints see this node's address, and learn the client's from the PROXY protocol (TCP only)")
	}
	return append(limits, "endpoints see this node's address instead of the client's")
}
