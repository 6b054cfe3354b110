// Package foreign finds and removes what kube-proxy left in the kernel: its iptables chains, nftables tables and IPVS servers.
// They would answer beside Portal's rules, as of the moment when kube-proxy ended. It knows nothing of Portal's own.
package foreign

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"

	"portal/internal/proxy/virtual"
)

// Leftover is one sort of rules of kube-proxy's.
type Leftover struct {
	// What is the sort: "iptables chains", "nftables tables", "IPVS virtual servers" or "IP sets".
	What string `json:"what"`
	// Where is the tool by which they are seen.
	Where string `json:"where"`
	Count int    `json:"count"`
}

func (l Leftover) String() string { return fmt.Sprintf("%d %s (%s)", l.Count, l.What, l.Where) }

// Find returns what kube-proxy left, or has: whether it runs can't be told.
func Find(ctx context.Context) ([]Leftover, error) { return walk(ctx, false) }

// Remove removes it and returns what it has removed. Chains of the kubelet and of others stay.
func Remove(ctx context.Context) ([]Leftover, error) { return walk(ctx, true) }

func walk(ctx context.Context, remove bool) (out []Leftover, err error) {
	var errs []error
	note := func(l Leftover, err error) {
		if l.Count > 0 {
			out = append(out, l)
		}
		if err != nil {
			errs = append(errs, err)
		}
	}
	for _, tool := range tools() {
		note(chains(ctx, tool, remove))
	}
	note(tables(ctx, remove))
	note(servers(remove))
	note(sets(remove)) // after the rules that refer to them
	return out, errors.Join(errs...)
}

// tools are the variants of iptables that are installed and in use. Asking the legacy ones would make their tables.
func tools() (out []string) {
	for _, t := range []struct{ name, legacy string }{
		{"iptables-nft", ""}, {"ip6tables-nft", ""},
		{"iptables-legacy", "/proc/net/ip_tables_names"}, {"ip6tables-legacy", "/proc/net/ip6_tables_names"},
	} {
		if _, err := exec.LookPath(t.name + "-save"); err != nil {
			continue
		}
		if t.legacy != "" {
			if names, _ := os.ReadFile(t.legacy); len(names) == 0 {
				continue
			}
		}
		out = append(out, t.name)
	}
	return out
}

// chains finds kube-proxy's chains with one variant of iptables, and removes them table by table, each in one step.
func chains(ctx context.Context, tool string, remove bool) (Leftover, error) {
	l := Leftover{What: "iptables chains", Where: tool}
	save, err := run(ctx, "", tool+"-save")
	if err != nil {
		return l, err
	}
	script, count := removal(save)
	l.Count = count
	if !remove || count == 0 {
		return l, nil
	}
	if _, err = run(ctx, script, tool+"-restore", "--noflush", "-w", "10"); err != nil {
		// Tables before the one that failed have been changed.
		text, unknown := run(ctx, "", tool+"-save")
		if unknown != nil {
			text = save
		}
		_, left := removal(text)
		l.Count -= left
	}
	return l, err
}

// removal turns the output of iptables-save into input of iptables-restore that removes kube-proxy's chains and all that
// leads to them, and counts them.
func removal(save string) (script string, count int) {
	var b strings.Builder
	var mine, jumps []string
	table := ""
	flush := func() {
		if len(mine) > 0 {
			fmt.Fprintln(&b, table)
			for _, c := range mine { // with --noflush, naming a chain empties it
				fmt.Fprintf(&b, ":%s - [0:0]\n", c)
			}
			for _, j := range jumps {
				fmt.Fprintln(&b, j)
			}
			for _, c := range mine {
				fmt.Fprintf(&b, "-X %s\n", c)
			}
			fmt.Fprintln(&b, "COMMIT")
		}
		count += len(mine)
		mine, jumps = nil, nil
	}
	for line := range strings.Lines(save) {
		line = strings.TrimSpace(line)
		switch {
		case strings.HasPrefix(line, "*"):
			table = line
		case strings.HasPrefix(line, ":"):
			if name, _, _ := strings.Cut(line[1:], " "); proxyChain(name) {
				mine = append(mine, name)
			}
		case strings.HasPrefix(line, "-A "):
			words := strings.Fields(line)
			target := slices.IndexFunc(words, func(w string) bool { return w == "-j" || w == "-g" })
			if target > 0 && target+1 < len(words) && proxyChain(words[target+1]) && !proxyChain(words[1]) {
				jumps = append(jumps, "-D "+line[3:])
			}
		case line == "COMMIT":
			flush()
		}
	}
	return b.String(), count
}

// proxyChain says whether a chain is kube-proxy's, of any mode since Kubernetes 1.20. Others that begin with KUBE- are the
// kubelet's (KUBE-FIREWALL, KUBE-KUBELET-CANARY, KUBE-IPTABLES-HINT) and kube-router's.
func proxyChain(name string) bool {
	if slices.Contains([]string{
		"KUBE-SERVICES", "KUBE-EXTERNAL-SERVICES", "KUBE-NODEPORTS", "KUBE-FORWARD", "KUBE-POSTROUTING", "KUBE-MARK-MASQ", "KUBE-PROXY-FIREWALL",
		"KUBE-PROXY-CANARY", "KUBE-NODE-PORT", "KUBE-LOAD-BALANCER", "KUBE-SOURCE-RANGES-FIREWALL", "KUBE-IPVS-FILTER", "KUBE-IPVS-OUT-FILTER",
	}, name) {
		return true
	}
	return slices.ContainsFunc([]string{"KUBE-SVC-", "KUBE-SVL-", "KUBE-SEP-", "KUBE-EXT-", "KUBE-FW-", "KUBE-XLB-"}, func(p string) bool { return strings.HasPrefix(name, p) })
}

// tables finds the tables of kube-proxy's nftables mode.
func tables(ctx context.Context, remove bool) (Leftover, error) {
	l := Leftover{What: "nftables tables", Where: "nft"}
	if _, err := exec.LookPath("nft"); err != nil {
		return l, nil
	}
	text, err := run(ctx, "", "nft", "list", "tables")
	if err != nil {
		return l, err
	}
	var errs []error
	for line := range strings.Lines(text) {
		words := strings.Fields(line) // table ip kube-proxy
		if len(words) != 3 || words[2] != "kube-proxy" {
			continue
		}
		if remove {
			if _, err := run(ctx, "", "nft", "delete", "table", words[1], words[2]); err != nil {
				errs = append(errs, err)
				continue
			}
		}
		l.Count++
	}
	return l, errors.Join(errs...)
}

const ipvsDevice = "kube-ipvs0"

// servers finds the virtual servers of kube-proxy's IPVS mode: at the addresses of its device, and node ports at others of
// this machine. The device goes with them.
func servers(remove bool) (Leftover, error) {
	l := Leftover{What: "IPVS virtual servers", Where: ipvsDevice}
	device, err := netlink.LinkByName(ipvsDevice)
	if err != nil {
		return l, nil // it has no IPVS mode's traces
	}
	addrs, err := netlink.AddrList(device, netlink.FAMILY_ALL)
	if err != nil {
		return l, fmt.Errorf("list the addresses of %s: %w", ipvsDevice, err)
	}
	on := map[netip.Addr]bool{}
	for _, a := range addrs {
		if ip, ok := netip.AddrFromSlice(a.IP); ok {
			on[ip.Unmap()] = true
		}
	}
	l.Count = 1 // the device itself
	table, err := virtual.Dial()
	if err == nil {
		defer table.Close()
		var all []virtual.Server
		all, err = table.Servers()
		for _, s := range all {
			if !on[s.Addr] && (s.Port < 30000 || s.Port > 32767) {
				continue
			}
			if remove {
				if e := table.DelServer(s); e != nil {
					err = errors.Join(err, e)
					continue
				}
			}
			l.Count++
		}
	}
	if errors.Is(err, virtual.ErrNone) {
		err = nil // so there are none
	}
	if remove {
		if e := netlink.LinkDel(device); e != nil {
			err = errors.Join(err, e)
			l.Count--
		}
	}
	if err != nil {
		err = fmt.Errorf("IPVS: %w", err)
	}
	return l, err
}

// sets finds the IP sets of kube-proxy's IPVS mode.
func sets(remove bool) (Leftover, error) {
	l := Leftover{What: "IP sets", Where: "ipset"}
	all, err := netlink.IpsetListAll()
	if err != nil {
		return l, nil // a kernel without them
	}
	var errs []error
	for _, s := range all {
		if !proxySet(s.SetName) {
			continue
		}
		if remove {
			if err := netlink.IpsetDestroy(s.SetName); err != nil {
				errs = append(errs, fmt.Errorf("destroy the IP set %s: %w", s.SetName, err))
				continue
			}
		}
		l.Count++
	}
	return l, errors.Join(errs...)
}

// setNames are kube-proxy's sets without what they begin with: KUBE-, or KUBE-6- for IPv6.
var setNames = []string{
	"LOOP-BACK", "CLUSTER-IP", "EXTERNAL-IP", "EXTERNAL-IP-LOCAL", "LOAD-BALANCER", "LOAD-BALANCER-LOCAL", "LOAD-BALANCER-FW",
	"LOAD-BALANCER-SOURCE-IP", "LOAD-BALANCER-SOURCE-CIDR", "NODE-PORT-TCP", "NODE-PORT-LOCAL-TCP", "NODE-PORT-UDP", "NODE-PORT-LOCAL-UDP",
	"NODE-PORT-SCTP-HASH", "NODE-PORT-LOCAL-SCTP-HASH", "HEALTH-CHECK-NODE-PORT", "IPVS-IPS",
}

// maxSetName is how long the kernel lets the name of a set be; kube-proxy cuts off what is more.
const maxSetName = 31

// proxySet says whether an IP set is kube-proxy's. Others that begin with KUBE- are those of kube-router, which k3s contains: KUBE-SRC-…
// and KUBE-DST-…, for network policies.
func proxySet(name string) bool {
	return slices.ContainsFunc(setNames, func(n string) bool {
		six := "KUBE-6-" + n
		return name == "KUBE-"+n || name == six[:min(len(six), maxSetName)]
	})
}

func run(ctx context.Context, stdin, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Stdin = strings.NewReader(stdin)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return string(out), nil
}
