package test

import (
	"regexp"
	"strings"
	"testing"
	"time"

	"portal/test/harness"
)

// TestDrift lets somebody remove what the proxy has written, in part or whole. It is back within a minute.
func TestDrift(t *testing.T) {
	t.Parallel()
	rootOnly(t)
	for name, commands := range map[string][]string{
		"tables deleted": {"delete table ip portal", "delete table ip6 portal"},
		"map flushed":    {"flush map ip portal services"},
		"rules flushed":  {"flush chain ip portal prerouting"},
		"ruleset gone":   {"flush ruleset"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newProxyLab(t, "nftables")
			l.steady(t)
			l.start(t)
			snap, _ := l.settled(t, 30*time.Second)
			before := l.tables(t)
			foreign := l.foreign(t)
			l.run(t, "nft", strings.Join(commands, "; ")) // at once: a check in between would find a second drift
			if name == "ruleset gone" {
				foreign = l.others(t) // theirs went, too
			}
			noticed := eventually(t, time.Minute, "the drift is noticed", func() string {
				if st := l.state(); st == nil || st.Drifts == 0 {
					return "not noticed"
				}
				return ""
			})
			repaired := eventually(t, 5*time.Second, "all is as it was", func() string {
				if there := l.run(t, "nft", "list", "tables"); !strings.Contains(there, "table ip portal\n") || !strings.Contains(there, "table ip6 portal\n") {
					return "there are only " + there // nothing, perhaps
				}
				if now := l.tables(t); now != before {
					return now
				}
				return ""
			})
			t.Logf("noticed after %s, repaired in %s", noticed.Round(100*time.Millisecond), repaired.Round(time.Millisecond))
			l.Judge(t, snap)
			if now := l.others(t); now != foreign {
				t.Errorf("others had\n%s\nand have\n%s", foreign, now)
			}
			if n := l.metric(t, "portal_proxy_drifts_total"); n != 1 {
				t.Errorf("the metrics say %v drifts", n)
			}
		})
	}
}

// foreign adds rules of somebody else in every way there is, and returns all that is not the proxy's.
func (l *proxyLab) foreign(t *testing.T) string {
	t.Helper()
	l.run(t, "nft", "add table inet foreign; add chain inet foreign forward { type filter hook forward priority 0; }; "+
		"add rule inet foreign forward counter; add table ip portal-not; add set ip portal-not s { type ipv4_addr; elements = { 192.0.2.7 } }")
	for _, tool := range []string{"iptables-nft", "ip6tables-nft", "iptables-legacy", "ip6tables-legacy"} {
		for _, rule := range []string{
			"-t nat -N THEIRS", "-t nat -A THEIRS -j RETURN", "-t nat -A PREROUTING -j THEIRS", "-t nat -A OUTPUT -j THEIRS", "-t nat -A POSTROUTING -j THEIRS",
			"-t filter -N THEIRS", "-t filter -A THEIRS -j RETURN", "-t filter -A INPUT -j THEIRS", "-t filter -A FORWARD -j THEIRS", "-t filter -A OUTPUT -j THEIRS",
			"-t mangle -A PREROUTING -j RETURN", "-t mangle -A OUTPUT -p tcp --dport 9 -j RETURN",
		} {
			l.run(t, tool, strings.Fields(rule)...)
		}
	}
	return l.others(t)
}

var (
	ours    = regexp.MustCompile(`(?ms)^table ip6? portal \{.*?^\}\n`)
	counted = regexp.MustCompile(`packets \d+ bytes \d+|\[\d+:\d+\]|(?m)^#.*$`)
)

// others is what the kernel has from others than the nftables mode.
func (l *proxyLab) others(t *testing.T) string {
	t.Helper()
	text := ours.ReplaceAllString(l.run(t, "nft", "-s", "list", "ruleset"), "")
	for _, tool := range []string{"iptables-legacy-save", "ip6tables-legacy-save"} {
		text += l.run(t, tool)
	}
	return counted.ReplaceAllString(text, "")
}

// TestModeSwitch changes the mode by restarts, under traffic, beside the rules of others; and cleans up in the end.
func TestModeSwitch(t *testing.T) {
	t.Parallel()
	rootOnly(t)
	l := newProxyLab(t, "nftables")
	targets := l.steady(t)
	foreign := l.foreign(t)
	l.start(t)
	l.settled(t, 30*time.Second)
	v := l.vigil(t, targets)
	for _, mode := range []string{"iptables", "nftables", "iptables", "nftables"} {
		l.stop(t)
		l.mode = mode
		l.start(t)
		snap, _ := l.settled(t, 30*time.Second)
		if mode == "iptables" {
			eventually(t, 10*time.Second, "nothing is left of the mode nftables", func() string {
				return strings.Join(ours.FindAllString(l.run(t, "nft", "list", "ruleset"), -1), "")
			})
			continue // what it writes is told from others' by its own tests
		}
		eventually(t, 10*time.Second, "nothing is left of the mode iptables", func() string {
			if now := l.others(t); now != foreign {
				return now + "\ninstead of\n" + foreign
			}
			return ""
		})
		l.Judge(t, snap)
	}
	v.end(t)

	l.stop(t)
	if text := l.run(t, "nft", "list", "ruleset"); !ours.MatchString(text) {
		t.Error("with the proxy, its rules went: traffic would stop")
	}
	for range 2 { // the second time, there is nothing to do
		if out := l.run(t, harness.Portal(), "proxy", "--cleanup"); out != "" {
			t.Errorf("--cleanup says %q", out)
		}
		if text := l.run(t, "nft", "list", "ruleset"); ours.MatchString(text) || strings.Contains(text, "PORTAL") {
			t.Errorf("after cleaning up, there is\n%s", text)
		}
		if now := l.others(t); now != foreign {
			t.Errorf("others had\n%s\nand have\n%s", foreign, now)
		}
	}
}
