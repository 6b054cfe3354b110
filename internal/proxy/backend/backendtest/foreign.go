package backendtest

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"portal/internal/proxy/nf"
)

// testForeign works beside somebody else's tables, and leaves nothing but them.
func testForeign(t *testing.T, s *suite) {
	var before []string
	err := s.node.do(func() (err error) {
		if err := addForeign(); err != nil {
			return err
		}
		before, err = rulesOf("foreign")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	list := catalogue()
	s.set(list...)
	s.apply(t)
	s.restart(t)
	s.askAll(t, sample(list[0].probes(s, 2), 2))
	after := func(when string) {
		t.Helper()
		var now []string
		err := s.node.do(func() (err error) { now, err = rulesOf("foreign"); return err })
		if err != nil || !slices.Equal(before, now) {
			t.Errorf("%s the other tables are %v, before %v (%v)", when, now, before, err)
		}
	}
	after("at work")
	s.stop(t)
	after("after cleaning up")
	var left []string
	err = s.node.do(func() (err error) { left, err = rulesOf(""); return err })
	if err != nil || len(left) != len(before) {
		t.Errorf("rules after cleaning up: %v, expected only %v (%v)", left, before, err)
	}
	s.start(t)
}

// addForeign adds tables that have a chain at our hook with a rule.
func addForeign() error {
	s, err := nf.Dial()
	if err != nil {
		return err
	}
	defer s.Close()
	b := nf.NewBatch()
	for _, family := range []byte{unix.NFPROTO_IPV4, unix.NFPROTO_IPV6} {
		table := &nf.Table{Family: family, Name: "foreign"}
		b.Replace(table, nil)
		b.AddChain(table, nf.Chain{
			Name: "prerouting", Hook: nf.Hook{Type: "nat", Point: unix.NF_INET_PRE_ROUTING, Priority: -100}, Rules: []nf.Rule{{nf.Return}},
		})
	}
	return s.Commit(b)
}

// rulesOf lists the rules in the tables of a name, or in all.
func rulesOf(name string) (out []string, err error) {
	s, err := nf.Dial()
	if err != nil {
		return nil, err
	}
	defer s.Close()
	for _, family := range []byte{unix.NFPROTO_IPV4, unix.NFPROTO_IPV6} {
		var list []string
		err := s.Rules(&nf.Table{Family: family, Name: name}, "", func() { list = nil }, func(r nf.RuleInfo) {
			list = append(list, fmt.Sprintf("%d %s %s %d", r.Family, r.Table, r.Chain, r.Handle))
		})
		if err != nil && !errors.Is(err, unix.ENOENT) {
			return nil, err
		}
		out = append(out, list...)
	}
	slices.Sort(out)
	return out, nil
}
