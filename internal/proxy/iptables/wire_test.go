package iptables

import (
	"bufio"
	"context"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"portal/internal/intent"
	"portal/internal/proxy/nf"
)

// spoken are rules with all the words that this package uses, by family and table.
var spoken = map[intent.Family]map[string][]string{
	intent.IPv4: {
		"nat": {
			"-d 10.96.2.68 -p tcp --dport 80 -m statistic --mode random --probability 0.5000000000 -j DNAT --to-destination 10.244.11.84:8080",
			"-d 10.96.2.68 -p tcp --dport 80 -j DNAT --to-destination 10.244.11.85:8080",
			"-d 10.96.2.68 -p tcp --dport 8080 -j DNAT --to-destination 10.244.11.85:8080",
			"-d 10.96.2.68 -p tcp --dport 8080 -m addrtype --src-type LOCAL -g PORTAL-OTHER",
			"-d 10.96.2.68 -p udp --dport 53 -m statistic --mode random --probability 0.3333333333 -j DNAT --to-destination 10.244.11.84:53",
			"-d 10.96.2.68 -p sctp --dport 80 -j DNAT --to-destination 10.244.11.84:8080",
			"-p sctp --dport 0:99 -g PORTAL-OTHER",
			"-d 0.0.0.3/0.0.0.3 -g PORTAL-OTHER",
			"-d 0.0.1.128/0.0.1.128 -g PORTAL-OTHER",
			"-p tcp --dport 30000:30100 -g PORTAL-OTHER",
			"-s 10.244.0.0/16 -j RETURN",
			"-s 10.244.0.0/20 -g PORTAL-OTHER",
			"-s 192.0.2.1/32 -g PORTAL-OTHER",
			"-s 0.0.0.0/0 -g PORTAL-OTHER",
			"-i cali+ -j RETURN",
			"-i cbr0 -j RETURN",
			"-j PORTAL-OTHER",
			"-j MARK --set-xmark 0x4000/0x4000",
			"-j MARK --set-xmark 0x0/0x4000",
			"-m mark ! --mark 0x4000/0x4000 -j RETURN",
			"-m addrtype --dst-type LOCAL ! -d 127.0.0.0/8 -j PORTAL-OTHER",
			"-m addrtype --src-type LOCAL -g PORTAL-OTHER",
			`-m conntrack --ctstate DNAT -m bpf --bytecode "` + hairpin(intent.IPv4) + `" -j MARK --set-xmark 0x4000/0x4000`,
			"-j MASQUERADE --random-fully",
			"-d 10.96.2.68 -p tcp -m recent --name PORTAL-ABC --update --seconds 100 --reap -j DNAT --to-destination 10.1.1.1:80",
			"-p tcp -m statistic --mode random --probability 0.5000000000 -m recent --name PORTAL-ABC --set -j DNAT --to-destination 10.1.1.1:80",
		},
		"filter": {
			"-d 10.96.2.68 -p tcp --dport 80 -j REJECT --reject-with tcp-reset",
			"-d 10.96.2.68 -p udp --dport 80 -j REJECT",
			"-p sctp --dport 80 -j REJECT",
			"-s 10.0.0.0/8 -p tcp -j REJECT --reject-with tcp-reset",
			"-j DROP",
			"-p tcp --dport 32000 -j ACCEPT",
			"-d 127.0.0.0/8 ! -s 127.0.0.0/8 -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP",
			"-m conntrack --ctstate NEW -m conntrack ! --ctstate DNAT -j PORTAL-OTHER",
			"-m conntrack --ctstate INVALID -j DROP",
			"-m mark --mark 0x4000/0x4000 -j ACCEPT",
		},
	},
	intent.IPv6: {
		"nat": {
			"-d fd00:10:96::1 -p tcp --dport 80 -m statistic --mode random --probability 0.5000000000 -j DNAT --to-destination [fd00::2]:8080",
			"-d ::3/::3 -g PORTAL-OTHER",
			"-d 0:0:0:3::/0:0:0:3:: -g PORTAL-OTHER",
			"-s fd00:244::/32 -j RETURN",
			"-s fd00:244::/35 -j RETURN",
			"-m addrtype --dst-type LOCAL ! -d ::1 -j PORTAL-OTHER",
			`-m conntrack --ctstate DNAT -m bpf --bytecode "` + hairpin(intent.IPv6) + `" -j MARK --set-xmark 0x4000/0x4000`,
			"-j MASQUERADE --random-fully",
			"-d fd00::1 -p udp -m recent --name PORTAL-ABD --update --seconds 100 --reap -j DNAT --to-destination [fd00::2]:80",
		},
		"filter": {
			"-d fd00::1 -p tcp --dport 80 -j REJECT --reject-with tcp-reset",
			"-d fd00::1 -p udp --dport 80 -j REJECT",
		},
	},
}

// expressions are those of a chain's rules, as the kernel has them.
func expressions(t *testing.T, s *nf.Socket, f intent.Family, table, chain string) (out []string) {
	t.Helper()
	if err := newDirect(s).rules(f, table, chain, func(exprs []byte) { out = append(out, describe(exprs)) }); err != nil {
		t.Fatal(err)
	}
	return out
}

func describe(exprs []byte) string {
	var b strings.Builder
	for _, e := range nf.Attributes(exprs) {
		for typ, v := range nf.Attributes(e) {
			if typ == unix.NFTA_EXPR_NAME {
				fmt.Fprintf(&b, "\n  %s", nf.Text(v))
			} else {
				b.WriteString(" " + hex.EncodeToString(v))
			}
		}
	}
	return b.String()
}

// TestWireIsTheCommands writes every kind of rule twice, by the command and over netlink, and wants the kernel to have the
// same of both; and the command to read the same.
func TestWireIsTheCommands(t *testing.T) {
	alone(t)
	ctx := context.Background()
	s, err := nf.Dial()
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	d := newDirect(s)
	for f, byTable := range spoken {
		tool := tool{f, NFT}
		if err := tool.present(); err != nil {
			t.Fatal(err)
		}
		for table, rules := range byTable {
			err := tool.restore(ctx, func(b *bufio.Writer) {
				fmt.Fprintf(b, "*%s\n:PORTAL-OTHER - [0:0]\n:PORTAL-TOOL - [0:0]\n", table)
				for _, r := range rules {
					fmt.Fprintf(b, "-A PORTAL-TOOL %s\n", r)
				}
				b.WriteString("COMMIT\n")
			})
			if err != nil {
				t.Fatal(err)
			}
			tx, sec := begin(), newSection()
			sec.set("PORTAL-WIRE", rules)
			tx.write(f, table, &sec, map[string]bool{})
			if err := d.commit(tx); err != nil {
				t.Fatalf("IPv%d %s: %v", f, table, err)
			}
			want, got := expressions(t, s, f, table, "PORTAL-TOOL"), expressions(t, s, f, table, "PORTAL-WIRE")
			if len(want) != len(rules) || len(got) != len(rules) {
				t.Fatalf("%d rules of the command and %d of ours, not %d", len(want), len(got), len(rules))
			}
			for i, r := range rules {
				if got[i] != want[i] {
					t.Errorf("IPv%d %s %s\n is%s\n not%s", f, table, r, got[i], want[i])
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

// What this package never says is not guessed at.
func TestWireKnowsItsWords(t *testing.T) {
	for _, text := range []string{
		"", "-p tcp", "-p icmp -j DROP", "-j LOG", "-d nowhere -j DROP", "-d fd00::1 -j DROP", "-m set --match-set x src -j DROP",
		"! -p tcp -j DROP", "-p tcp --dport 99999 -j DROP", "-m conntrack --ctstate ODD -j DROP", "-j REJECT --reject-with icmp-net-prohibited",
		"-m addrtype --dst-type BROADCAST -j DROP", "-m statistic --mode nth --every 2 -j DROP", "-j DNAT --to-destination here",
	} {
		w := &wire{family: intent.IPv4}
		if _, err := w.appendRule(nil, text); err == nil {
			t.Errorf("%q was understood", text)
		}
	}
}
