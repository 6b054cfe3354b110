// Package announce decides which node announces an address: nodes are alive by their Leases, and for each address all of them come to the
// same choice among those that may serve it. How an address is announced, it does not know.
package announce

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"net/netip"
	"slices"
)

// Member is a node that is alive and announces addresses.
type Member struct {
	Name string
	// Holds are the addresses that it says it announces.
	Holds map[netip.Addr]bool
	// Leaving: its process has ended. It keeps what it holds for the next one, and gets nothing else.
	Leaving bool
}

// rank are the members that may announce an address, the best first. Who announces it already stays: to move it breaks connections.
// Otherwise each address has an order of its own, so that addresses are spread over nodes, and only those of a lost node move.
func rank(a netip.Addr, members []Member, eligible func(node string) bool) []string {
	type candidate struct {
		name  string
		holds bool
		score uint64
	}
	var all []candidate
	for _, m := range members {
		if eligible(m.Name) && (!m.Leaving || m.Holds[a]) {
			all = append(all, candidate{m.Name, m.Holds[a], score(a, m.Name)})
		}
	}
	slices.SortFunc(all, func(x, y candidate) int {
		if x.holds != y.holds {
			if x.holds {
				return -1
			}
			return 1
		}
		return cmp.Or(cmp.Compare(y.score, x.score), cmp.Compare(x.name, y.name))
	})
	var out []string
	for _, c := range all {
		out = append(out, c.name)
	}
	return out
}

func score(a netip.Addr, node string) uint64 {
	sum := sha256.Sum256([]byte(a.String() + " " + node))
	return binary.BigEndian.Uint64(sum[:])
}
