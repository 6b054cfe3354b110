package iptables

import (
	"bufio"
	"bytes"
	"context"
	"encoding/hex"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"portal/internal/intent"
	"portal/internal/proxy/nf"
)

// every are rules with all that this package uses, by family and table.
func every() map[intent.Family]map[string][]rule {
	p, a, e := netip.MustParsePrefix, netip.MustParseAddr, netip.MustParseAddrPort
	other, bit := goes("PORTAL-OTHER"), mark(0x4000)
	vip := func(proto intent.Protocol, port uint16) rule {
		return rule{dst: host(a("10.96.2.68")), proto: proto, ports: onePort(port)}
	}
	vip6 := rule{dst: host(a("fd00:10:96::1")), proto: intent.TCP, ports: onePort(80)}
	oneIn := func(r rule, n int) rule { r.oneIn = n; return r }
	recent := func(r rule, seconds uint32) rule { r.recent = recentMatch{"PORTAL-ABC", seconds}; return r }
	to, to6 := toEndpoint(e("10.244.11.84:8080")), toEndpoint(e("[fd00::2]:8080"))
	state := func(states uint16, not bool) stateMatch { return stateMatch{states, not} }
	return map[intent.Family]map[string][]rule{
		intent.IPv4: {
			"nat": {
				oneIn(vip(intent.TCP, 80), 2).with(to), vip(intent.TCP, 80).with(to), oneIn(vip(intent.UDP, 53), 3).with(to),
				oneIn(vip(intent.TCP, 80), 7).with(to), oneIn(vip(intent.TCP, 80), 199).with(to),
				vip(intent.SCTP, 80).with(to), {proto: intent.SCTP, ports: portRange{0, 99}, to: other},
				{dst: address{addr: a("0.0.0.3"), mask: a("0.0.0.3")}, to: other},
				{dst: address{addr: a("0.0.1.128"), mask: a("0.0.1.128")}, to: other},
				{proto: intent.TCP, ports: portRange{30000, 30100}, to: other},
				{src: within(p("10.244.0.0/16")), to: returns}, {src: within(p("10.244.0.0/20")), to: other},
				{src: within(p("192.0.2.1/32")), to: other}, {src: within(p("0.0.0.0/0")), to: other},
				{in: "cali+", to: returns}, {in: "cbr0", to: returns}, {to: jump("PORTAL-OTHER")},
				{to: bit.set()}, {to: bit.clear()}, bit.isNot().with(returns),
				{local: localDestination, dst: outside(p("127.0.0.0/8")), to: jump("PORTAL-OTHER")},
				{local: localSource, to: other},
				{state: state(stateDNAT, false), hairpin: intent.IPv4, to: bit.set()},
				{to: masquerades},
				recent(rule{dst: host(a("10.96.2.68")), proto: intent.TCP}, 100).with(to),
				recent(oneIn(rule{proto: intent.TCP}, 2), 0).with(to),
			},
			"filter": {
				vip(intent.TCP, 80).with(target{kind: reject, reset: true}), vip(intent.UDP, 80).with(target{kind: reject}),
				{proto: intent.SCTP, ports: onePort(80), to: target{kind: reject}},
				{src: within(p("10.0.0.0/8")), proto: intent.TCP, to: target{kind: reject, reset: true}},
				{to: drops}, {proto: intent.TCP, ports: onePort(32000), to: accepts},
				{dst: within(loopback4), src: outside(loopback4), state: state(stateRelated|stateEstablished|stateDNAT, true), to: drops},
				{state: state(stateNew, false), state2: state(stateDNAT, true), to: jump("PORTAL-OTHER")},
				{state: state(stateInvalid, false), to: drops}, bit.is().with(accepts),
			},
		},
		intent.IPv6: {
			"nat": {
				oneIn(vip6, 2).with(to6), vip6.with(to6),
				{dst: address{addr: a("::3"), mask: a("::3")}, to: other},
				{dst: address{addr: a("0:0:0:3::"), mask: a("0:0:0:3::")}, to: other},
				{src: within(p("fd00:244::/32")), to: returns}, {src: within(p("fd00:244::/35")), to: returns},
				{local: localDestination, dst: outside(p("::1/128")), to: jump("PORTAL-OTHER")},
				{state: state(stateDNAT, false), hairpin: intent.IPv6, to: bit.set()},
				{to: masquerades},
				recent(rule{dst: host(a("fd00::1")), proto: intent.UDP}, 100).with(to6),
			},
			"filter": {
				vip6.with(target{kind: reject, reset: true}),
				{dst: host(a("fd00::1")), proto: intent.UDP, ports: onePort(80), to: target{kind: reject}},
			},
		},
	}
}

// expressions are those of a chain's rules, as the kernel has them.
func expressions(t *testing.T, s *nf.Socket, table *nf.Table, chain string) (out []string) {
	t.Helper()
	err := s.Rules(table, chain, func() { out = nil }, func(r nf.RuleInfo) { out = append(out, hex.EncodeToString(r.Expressions)) })
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// TestPrintersAgree writes every kind of rule twice, by the command and over netlink, and wants the kernel to have the
// same of both; and the command to read the same.
func TestPrintersAgree(t *testing.T) {
	alone(t)
	ctx := context.Background()
	s, err := nf.Dial()
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for f, byTable := range every() {
		tool := tool{f, NFT}
		if err := tool.present(); err != nil {
			t.Fatal(err)
		}
		for table, rules := range byTable {
			err := tool.restore(ctx, func(b *bufio.Writer) {
				fmt.Fprintf(b, "*%s\n:PORTAL-OTHER - [0:0]\n:PORTAL-TOOL - [0:0]\n", table)
				for _, r := range rules {
					fmt.Fprintf(b, "-A PORTAL-TOOL %s\n", &r)
				}
				b.WriteString("COMMIT\n")
			})
			if err != nil {
				t.Fatal(err)
			}
			b, sec := nf.NewBatch(), newSection()
			sec.set("PORTAL-WIRE", rules)
			sec.write(b, f, table, map[string]chainDigest{})
			if err := s.Commit(b); err != nil {
				t.Fatalf("IPv%d %s: %v", f, table, err)
			}
			in := tableOf(f, table)
			want, got := expressions(t, s, in, "PORTAL-TOOL"), expressions(t, s, in, "PORTAL-WIRE")
			if len(want) != len(rules) || len(got) != len(rules) {
				t.Fatalf("%d rules of the command and %d of ours, not %d", len(want), len(got), len(rules))
			}
			for i := range rules {
				listed, _ := hex.DecodeString(got[i])
				if a, b := nf.AppendMeaning(nil, rules[i].appendExprs(nil, f)), nf.AppendMeaning(nil, listed); len(a) == 0 || !bytes.Equal(a, b) {
					t.Errorf("IPv%d %s %s means\n %x, but what the kernel lists of it\n %x", f, table, &rules[i], a, b)
				}
				if got[i] != want[i] {
					t.Errorf("IPv%d %s %s\n is  %s\n not %s", f, table, &rules[i], got[i], want[i])
				}
			}
			text := func(chain string) []string {
				out, err := tool.run(ctx, nil, tool.name(""), "-t", table, "-S", chain)
				if err != nil {
					t.Fatal(err)
				}
				return slices.Collect(strings.Lines(strings.ReplaceAll(string(out), chain, "X")))
			}
			if a, b := text("PORTAL-TOOL"), text("PORTAL-WIRE"); !slices.Equal(a, b) {
				t.Errorf("IPv%d %s: the command reads\n%s not\n%s", f, table, b, a)
			}
		}
	}
}
