package test

import (
	"cmp"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// tables reads the kernel's nftables of the proxy and returns what they mean: numbers of pools and shapes, which are
// free, are replaced by what they lead to. What nothing leads to is listed as left over.
func (l *proxyLab) tables(t *testing.T) string {
	t.Helper()
	var out []string
	for _, family := range []string{"ip", "ip6"} {
		out = append(out, meaning(t, l.run(t, "nft", "-nn", "list", "table", family, "portal"))...)
	}
	return strings.Join(out, "\n")
}

var (
	block    = regexp.MustCompile(`(?ms)^\t(map|set|chain) (\S+) \{\n(.*?)^\t\}`)
	elements = regexp.MustCompile(`(?s)elements = \{(.*?)\}`)
	shaped   = regexp.MustCompile(`^(nodeport-)?to-`)
	numbered = regexp.MustCompile(`-\d+p\d`)
	leg      = regexp.MustCompile(`^(\d+)(?:p(\d+))?(m?)$`)
)

// meaning reads a table.
func meaning(t *testing.T, text string) (out []string) {
	t.Helper()
	sets, chains := map[string]map[string]string{}, map[string]string{}
	for _, b := range block.FindAllStringSubmatch(text, -1) {
		if b[1] == "chain" {
			chains[b[2]] = b[3]
			continue
		}
		sets[b[2]] = map[string]string{}
		if list := elements.FindStringSubmatch(b[3]); list != nil {
			for _, e := range strings.Split(list[1], ",") {
				key, data, _ := strings.Cut(strings.TrimSpace(e), " : ")
				sets[b[2]][key] = data
			}
		}
	}
	used := map[string]bool{}
	for key, data := range sets["services"] {
		f := strings.Split(data, " . ")
		if len(f) != 4 {
			t.Fatalf("services has %q for %q", data, key)
		}
		chain := strings.TrimPrefix(sets["shapes"][f[1]], "goto ")
		if strings.HasPrefix(key, "0.0.0.0 . 0 ") || strings.HasPrefix(key, ":: . 0 ") {
			continue // the canary
		}
		used[chain] = true
		out = append(out, fmt.Sprintf("%s to %s %s", key, f[2]+" . "+f[3], follow(sets, f[2]+" . "+f[3], chain)))
	}
	for _, name := range []string{"backends", "choices", "members"} {
		for key := range sets[name] {
			if !strings.HasPrefix(sets[name][key], "used") && !strings.HasPrefix(key, "0x00000000 . 0x00000000") {
				out = append(out, fmt.Sprintf("left over in %s: %s", name, key))
			}
		}
	}
	for _, name := range []string{"cluster-ips", "node-ips", "same", "sources"} {
		out = append(out, fmt.Sprint(name, slices.Sorted(maps.Keys(sets[name]))))
	}
	for name, rules := range chains {
		// Chains of shapes wait for another user. One for a pool of another number has the number in its rules, too.
		if ofShape := shaped.MatchString(name); !ofShape || used[name] && !numbered.MatchString(name) {
			out = append(out, name+" "+rules)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// follow says where a chain leads for a port, and marks what it uses.
func follow(sets map[string]map[string]string, id, chain string) string {
	mark := func(set, key string) string {
		data, ok := sets[set][key]
		if !ok {
			return "missing in " + set
		}
		data = strings.TrimPrefix(data, "used ")
		sets[set][key] = "used " + data
		return data
	}
	sticky := strings.Contains(chain, "-for-")
	var out []string
	for _, part := range strings.Split(chain, "-") {
		m := leg.FindStringSubmatch(part)
		if m == nil {
			out = append(out, part)
			continue
		}
		n, _ := strconv.Atoi(m[1])
		pool, _ := strconv.Atoi(cmp.Or(m[2], "0"))
		text := m[3]
		for i := range n {
			slot := fmt.Sprintf("%s . 0x%08x", id, pool<<20+i)
			endpoint := mark("backends", slot)
			text += " " + endpoint
			if sticky {
				choice := mark("choices", slot)
				member := mark("members", fmt.Sprintf("%s . 0x%08x . %s", id, pool, endpoint))
				text += fmt.Sprintf(" (%s %s)", choice, member)
			}
		}
		out = append(out, "["+strings.TrimSpace(text)+"]")
	}
	return strings.Join(out, "-")
}
