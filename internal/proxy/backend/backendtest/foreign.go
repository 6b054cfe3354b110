package backendtest

import (
	"fmt"
	"slices"
	"testing"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
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

// addForeign adds a table that has a rule, a set and a chain at our hooks.
func addForeign() error {
	c, err := nftables.New()
	if err != nil {
		return err
	}
	for _, family := range []nftables.TableFamily{nftables.TableFamilyIPv4, nftables.TableFamilyIPv6} {
		table := c.AddTable(&nftables.Table{Name: "foreign", Family: family})
		chain := c.AddChain(&nftables.Chain{
			Name: "prerouting", Table: table, Type: nftables.ChainTypeNAT, Hooknum: nftables.ChainHookPrerouting,
			Priority: nftables.ChainPriorityNATDest,
		})
		c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{&expr.Verdict{Kind: expr.VerdictReturn}}})
	}
	return c.Flush()
}

// rulesOf lists the rules in the tables of a name, or in all.
func rulesOf(name string) (out []string, err error) {
	c, err := nftables.New()
	if err != nil {
		return nil, err
	}
	chains, err := c.ListChains()
	if err != nil {
		return nil, err
	}
	for _, chain := range chains {
		if name != "" && chain.Table.Name != name {
			continue
		}
		rules, err := c.GetRules(chain.Table, chain)
		if err != nil {
			return nil, err
		}
		for _, r := range rules {
			out = append(out, fmt.Sprintf("%d %s %s %d", chain.Table.Family, chain.Table.Name, chain.Name, r.Handle))
		}
	}
	slices.Sort(out)
	return out, nil
}
