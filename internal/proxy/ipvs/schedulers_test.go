package ipvs

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	"portal/internal/intent"
	"portal/internal/plan"
	"portal/internal/proxy/backend/backendtest"
)

// TestSchedulers sends connections through every scheduler in the kernel and checks that each balances as its name
// promises. Package test/vm runs it in a machine that has IPVS.
func TestSchedulers(t *testing.T) {
	if err := hasIPVS(); err != nil && os.Getenv("PORTAL_VM") == "" {
		t.Skipf("%v; test/vm runs this in a kernel that has it", err)
	}
	const (
		// even: connections that stay open are spread evenly.
		even = "even"
		// perClient: a client always gets the same endpoint, and clients do not all get the same one.
		perClient = "per client"
		// perConnection: connections of one client are spread, though not evenly.
		perConnection = "per connection"
		// perAddress: everything to one Service goes to one endpoint while it isn't overloaded.
		perAddress = "per address"
	)
	promises := map[string]string{
		"rr": even, "wrr": even, "lc": even, "wlc": even, "sed": even, "nq": even,
		"sh": perClient, "mh": perConnection, "dh": perAddress, "lblc": perAddress, "lblcr": perAddress,
	}
	l := backendtest.NewLab(t, backendtest.Options{})
	for _, scheduler := range Schedulers {
		t.Run(scheduler, func(t *testing.T) {
			s := &scheduled{t: t, lab: l}
			s.program(scheduler)
			clients := l.Clients(t, 24)
			switch promises[scheduler] {
			case even:
				if got := s.held(12); !slices.Equal(got, []int{4, 4, 4}) {
					t.Errorf("12 open connections over 3 endpoints: %v, want 4 each", got)
				}
			case perClient:
				all := map[netip.Addr]bool{}
				for _, c := range clients {
					first := s.ask(c)
					all[first] = true
					if second := s.ask(c); second != first {
						t.Errorf("client %v got %v and then %v", c, first, second)
					}
				}
				if len(all) < 2 {
					t.Errorf("%d clients all got %v", len(clients), all)
				}
			case perConnection:
				if all := s.endpoints(slices.Repeat(clients[:1], 40)); len(all) < 2 {
					t.Errorf("40 connections of one client all went to %v", all)
				}
			case perAddress:
				if all := s.endpoints(clients); len(all) != 1 {
					t.Errorf("connections went to %v, want one endpoint", all)
				}
			default:
				t.Errorf("no promise is known of the scheduler %s", scheduler)
			}
		})
	}
}

// scheduled is a Service of three endpoints, balanced by one scheduler.
type scheduled struct {
	t   *testing.T
	lab *backendtest.Lab
}

var scheduledAt = netip.MustParseAddrPort("10.96.0.77:80")

// program makes the kernel serve it until the test ends.
func (s *scheduled) program(scheduler string) {
	s.t.Helper()
	key := intent.Key{Namespace: "test", Name: "scheduled"}
	entry := &intent.Entry{
		Service: &intent.Service{
			Key: key, Families: []intent.Family{intent.IPv4}, ClusterIPs: []netip.Addr{scheduledAt.Addr()},
			Ports: []intent.Port{{Name: "http", Protocol: intent.TCP, Port: scheduledAt.Port()}},
		},
		Slices: []*intent.Slice{{
			Key: intent.Key{Namespace: "test", Name: "scheduled-1"}, Service: key.Name, Family: intent.IPv4,
			Ports: []intent.EndpointPort{{Name: "http", Protocol: intent.TCP, Port: backendtest.ServerPort}},
		}},
	}
	for _, a := range s.lab.FarPods(intent.IPv4) {
		entry.Slices[0].Endpoints = append(entry.Slices[0].Endpoints,
			intent.Endpoint{Addr: a, NodeName: "elsewhere", Condition: intent.Ready | intent.Serving})
	}
	snap := plan.NewSnapshot(s.lab.Facts())
	snap.Set(key, plan.For(entry, snap.Facts))
	mode := New(Options{Scheduler: scheduler})
	ctx := context.Background()
	err := s.lab.Node.Do(func() error {
		if err := mode.Probe(ctx, []intent.Family{intent.IPv4}); err != nil {
			return err
		}
		back, err := mode.Open(ctx)
		if err != nil {
			return err
		}
		s.t.Cleanup(func() {
			if err := s.lab.Node.Do(func() error { _ = back.Close(); return mode.Cleanup(ctx) }); err != nil {
				s.t.Errorf("clean up: %v", err)
			}
		})
		return back.Apply(ctx, snap, snap.Delta())
	})
	if err != nil {
		s.t.Fatalf("program a Service with the scheduler %s: %v", scheduler, err)
	}
}

const schedulerPatience = 20 * time.Second

// ask makes a connection from a client's address, closes it, and returns the endpoint that answered.
func (s *scheduled) ask(client netip.Addr) netip.Addr {
	s.t.Helper()
	who, err := s.lab.Outside.Ask(intent.TCP, client, scheduledAt, schedulerPatience)
	if err != nil {
		s.t.Fatalf("%v asks %v: %v", client, scheduledAt, err)
	}
	return who.Addr()
}

// endpoints are those that answered a connection of each client.
func (s *scheduled) endpoints(clients []netip.Addr) map[netip.Addr]int {
	s.t.Helper()
	all := map[netip.Addr]int{}
	for _, c := range clients {
		all[s.ask(c)]++
	}
	return all
}

// held opens connections one after another, keeps all of them, and returns how many each endpoint got, in order.
func (s *scheduled) held(n int) (counts []int) {
	s.t.Helper()
	all := map[string]int{}
	for i := range n {
		f, err := s.lab.Outside.Hold(intent.TCP, scheduledAt, schedulerPatience)
		if err != nil {
			s.t.Fatalf("connection %d: %v", i, err)
		}
		defer f.Close()
		all[fmt.Sprint(f.Endpoint)]++
	}
	for _, n := range all {
		counts = append(counts, n)
	}
	slices.Sort(counts)
	return counts
}
