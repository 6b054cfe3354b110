package pool

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Port is a port that a Service has at an address.
type Port struct {
	Protocol string
	Port     uint16
}

func (p Port) String() string { return fmt.Sprintf("%s/%d", p.Protocol, p.Port) }

// MarshalText and UnmarshalText write a port like TCP/80.
func (p Port) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// UnmarshalText is the opposite of MarshalText.
func (p *Port) UnmarshalText(text []byte) error {
	if n, err := fmt.Sscanf(strings.Replace(string(text), "/", " ", 1), "%s %d", &p.Protocol, &p.Port); n != 2 {
		return fmt.Errorf("port %q: %w", text, err)
	}
	return nil
}

// Owner is a Service that has an address.
type Owner struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	UID       string `json:"uid"`
	// Class is that of the balancer that gave the address, empty for the default.
	Class string `json:"class,omitempty"`
	// Share is the key by which others of the namespace may have the address too, and Backends what must be the same for it: see Request.
	Share    string `json:"share,omitempty"`
	Backends string `json:"backends,omitempty"`
	Ports    []Port `json:"ports"`
}

func (o *Owner) String() string { return o.Namespace + "/" + o.Name }

// Claim is that an address belongs to Services.
type Claim struct {
	Address netip.Addr `json:"address"`
	Owners  []Owner    `json:"owners"`
}

// Table says which Service has which address.
type Table struct {
	claims map[netip.Addr][]Owner
	// byUID are the addresses of each owner, sorted: a pass asks for those of every Service.
	byUID map[string][]netip.Addr
	// from is where the search for a free address of a range begins: all before it are taken.
	from map[Range]netip.Addr
	// Reserved are addresses that nobody gets, and why: they are those of machines. Who has one keeps it.
	Reserved map[netip.Addr]string
	// ReservedRanges are more of them.
	ReservedRanges []Reserved
}

// NewTable is one without claims.
func NewTable() *Table {
	return &Table{claims: map[netip.Addr][]Owner{}, byUID: map[string][]netip.Addr{}, from: map[Range]netip.Addr{}}
}

// Read reads what Write wrote; nothing is an empty table.
func Read(data []byte) (*Table, error) {
	t := NewTable()
	if len(data) == 0 {
		return t, nil
	}
	var list []Claim
	if err := json.Unmarshal(data, &list); err != nil {
		return nil, fmt.Errorf("read the claims: %w", err)
	}
	for _, c := range list {
		if _, found := t.claims[c.Address]; found || len(c.Owners) == 0 || !c.Address.IsValid() {
			return nil, fmt.Errorf("read the claims: the address %s is there twice, or without an owner", c.Address)
		}
		for _, o := range c.Owners {
			t.Hold(c.Address, o)
		}
	}
	return t, nil
}

// Write is the table as text: the same for equal tables, one claim a line.
func (t *Table) Write() []byte {
	out := []byte("[")
	for i, c := range t.Claims() {
		if i > 0 {
			out = append(out, ',')
		}
		line, _ := json.Marshal(c) // of plain types
		out = append(append(out, '\n'), line...)
	}
	return append(out, "\n]\n"...)
}

// Claims are in the order of their addresses, and owners in that of their names.
func (t *Table) Claims() (out []Claim) {
	for a, owners := range t.claims {
		owners = slices.Clone(owners)
		slices.SortFunc(owners, func(x, y Owner) int {
			return cmp.Or(cmp.Compare(x.Namespace, y.Namespace), cmp.Compare(x.Name, y.Name), cmp.Compare(x.UID, y.UID))
		})
		out = append(out, Claim{a, owners})
	}
	slices.SortFunc(out, func(x, y Claim) int { return x.Address.Compare(y.Address) })
	return out
}

// Clone is a copy that can be changed.
func (t *Table) Clone() *Table {
	out := NewTable()
	for a, owners := range t.claims {
		out.claims[a] = slices.Clone(owners)
	}
	for uid, addrs := range t.byUID {
		out.byUID[uid] = slices.Clone(addrs)
	}
	out.Reserved, out.ReservedRanges = t.Reserved, t.ReservedRanges
	return out
}

// Of are the addresses of a Service, by its UID: IPv4 first.
func (t *Table) Of(uid string) []netip.Addr { return slices.Clone(t.byUID[uid]) }

// Entries are the claims of a Service, by its UID, as they were entered.
func (t *Table) Entries(uid string) map[netip.Addr]Owner {
	out := map[netip.Addr]Owner{}
	for _, a := range t.Of(uid) {
		for _, o := range t.claims[a] {
			if o.UID == uid {
				out[a] = o
			}
		}
	}
	return out
}

// Owners are the UIDs of all Services that have an address.
func (t *Table) Owners() map[string]Owner {
	out := map[string]Owner{}
	for _, owners := range t.claims {
		for _, o := range owners {
			out[o.UID] = o
		}
	}
	return out
}

// Release frees all addresses of a Service.
func (t *Table) Release(uid string) {
	for _, a := range t.byUID[uid] {
		owners := slices.DeleteFunc(t.claims[a], func(o Owner) bool { return o.UID == uid })
		if len(owners) == 0 {
			delete(t.claims, a)
			clear(t.from)
			continue
		}
		t.claims[a] = owners
	}
	delete(t.byUID, uid)
}

// Used is how many addresses of a pool are claimed.
func (t *Table) Used(p *Pool) (n int) {
	for a := range t.claims {
		if p.Contains(a) {
			n++
		}
	}
	return n
}

// Hold claims an address for a Service beside those it was assigned: it has left it, and others may still see it there. It must be held as it
// was claimed before, so that those who share it are not driven off by ports or a key that the Service has only now.
func (t *Table) Hold(a netip.Addr, o Owner) {
	i, found := slices.BinarySearchFunc(t.byUID[o.UID], a, netip.Addr.Compare)
	if found {
		return
	}
	t.byUID[o.UID] = slices.Insert(t.byUID[o.UID], i, a)
	t.claims[a] = append(t.claims[a], o)
}
