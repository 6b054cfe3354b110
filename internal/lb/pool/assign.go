package pool

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/labels"
)

// Request is what a Service asks for.
type Request struct {
	Owner
	Labels, NamespaceLabels map[string]string
	// IPv4 and IPv6 are the families that the Service has; the first of them is IPv6 if IPv6First. All are needed if All.
	IPv4, IPv6, All bool
	IPv6First       bool
	Internal        bool
	// Pool is the one that was asked for, empty for any. PoolFrom is where.
	Pool, PoolFrom string
	// Addresses are those that were asked for, at most one of each family, and AddressesFrom is where.
	Addresses     []netip.Addr
	AddressesFrom string
	// Current are the addresses that the Service is known by: kept if they are its own or free.
	Current []netip.Addr
}

// Refusal is why a Service gets no address, in words for its user.
type Refusal struct{ Message string }

func (r *Refusal) Error() string { return r.Message }

// Result is what a Service gets.
type Result struct {
	Addresses []netip.Addr
	// Notes say what was asked for and not given.
	Notes []string
}

// Assign chooses addresses for a Service and enters them: those that it has if it may keep them, those that it asks for, or free ones. The choice
// depends on nothing but the table, the pools and the request. A refusal leaves the Service without addresses.
func (t *Table) Assign(pools Set, r *Request) (Result, *Refusal) {
	had := slices.Concat(t.Of(r.UID), r.Current)
	t.Release(r.UID)
	var out Result
	var missing []string
	var families []bool // whether it is IPv4
	if r.IPv4 {
		families = append(families, true)
	}
	if r.IPv6 {
		families = append(families, false)
		if r.IPv6First {
			slices.Reverse(families)
		}
	}
	if r.Pool != "" && pools.Named(r.Pool) == nil {
		return out, &Refusal{fmt.Sprintf("%s: there is no pool %q: %s", r.PoolFrom, r.Pool, pools.names())}
	}
	for _, v4 := range families {
		a, note, why := t.choose(pools, r, v4, had)
		if note != "" {
			out.Notes = append(out.Notes, note)
		}
		if why != "" {
			missing = append(missing, why)
			continue
		}
		out.Addresses = append(out.Addresses, a)
	}
	for _, a := range r.Addresses {
		if a.Is4() && !r.IPv4 || a.Is6() && !r.IPv6 {
			out.Notes = append(out.Notes, fmt.Sprintf("%s: %s is ignored: the Service has no address of that family (spec.ipFamilies)", r.AddressesFrom, a))
		}
	}
	if len(out.Addresses) == 0 || r.All && len(missing) > 0 {
		if len(families) == 0 {
			missing = []string{"the Service has no IP family (spec.ipFamilies)"}
		}
		return Result{Notes: out.Notes}, &Refusal{strings.Join(missing, "; ")}
	}
	for _, a := range out.Addresses {
		t.Hold(a, r.Owner)
	}
	return out, nil
}

// choose finds an address of one family. Either the address is valid, or why says that there is none.
func (t *Table) choose(pools Set, r *Request, v4 bool, had []netip.Addr) (_ netip.Addr, note, why string) {
	family := "IPv6"
	if v4 {
		family = "IPv4"
	}
	for _, a := range r.Addresses {
		if a.Is4() != v4 {
			continue
		}
		if p := pools.Of(a); p == nil {
			note = fmt.Sprintf("%s: %s is ignored, and another address given: it is in no pool", r.AddressesFrom, a)
		} else if reason := p.refuses(r); reason != "" {
			note = fmt.Sprintf("%s: %s is ignored, and another address given: %s", r.AddressesFrom, a, reason)
		} else if reason := t.reserved(a); reason != "" && !slices.Contains(had, a) {
			note = fmt.Sprintf("%s: %s is ignored, and another address given: it is %s", r.AddressesFrom, a, reason)
		} else if reason := t.taken(a, r); reason != "" {
			return netip.Addr{}, "", fmt.Sprintf("%s: %s", r.AddressesFrom, reason)
		} else {
			return a, "", ""
		}
	}
	// What it has, it keeps. An address that nobody may have without asking is kept too, while the pool allows it: who no longer asks
	// for it does not ask for another address.
	for _, a := range had {
		if p := pools.Of(a); p != nil && a.Is4() == v4 && p.refuses(r) == "" && t.taken(a, r) == "" {
			return a, note, ""
		}
	}
	if a, found := t.shared(pools, r, v4); found {
		return a, note, ""
	}
	var tried []string
	for _, p := range pools {
		if p.refuses(r) != "" || p.Manual && r.Pool == "" {
			continue
		}
		has := false
		for _, span := range p.Ranges {
			if span.First.Is4() != v4 {
				continue
			}
			has = true
			if a, found := t.free(span); found {
				return a, note, ""
			}
		}
		if has {
			tried = append(tried, t.exhausted(p))
		}
	}
	if len(tried) > 0 {
		return netip.Addr{}, note, fmt.Sprintf("no %s address: %s", family, strings.Join(tried, ", "))
	}
	if r.Pool != "" {
		if reason := pools.Named(r.Pool).refuses(r); reason != "" {
			return netip.Addr{}, note, fmt.Sprintf("no %s address: %s", family, reason)
		}
		return netip.Addr{}, note, fmt.Sprintf("no %s address: pool %s has none", family, r.Pool)
	}
	kind := "external"
	if r.Internal {
		kind = "internal"
	}
	return netip.Addr{}, note, fmt.Sprintf("no %s address: no %s pool with such addresses is for this Service; %s", family, kind, pools.names())
}

// refuses says why a Service may not have an address of the pool; empty: it may.
func (p *Pool) refuses(r *Request) string {
	switch {
	case r.Pool != "" && r.Pool != p.Name:
		return fmt.Sprintf("it is of pool %s, not of %s", p.Name, r.Pool)
	case r.Internal && !p.Internal:
		return fmt.Sprintf("pool %s is not internal, and the Service asks for an internal balancer", p.Name)
	case !r.Internal && p.Internal && r.Pool == "" && !r.asks(p):
		return fmt.Sprintf("pool %s is internal, and the Service does not ask for an internal balancer", p.Name)
	case !p.namespaceAllowed(r):
		return fmt.Sprintf("pool %s is not for the namespace %s", p.Name, r.Namespace)
	case p.ServiceSelector != nil && !p.ServiceSelector.Matches(labels.Set(r.Labels)):
		return fmt.Sprintf("pool %s is for Services with other labels (%s)", p.Name, p.ServiceSelector)
	}
	return ""
}

// asks says whether an address of the pool was asked for by itself.
func (r *Request) asks(p *Pool) bool { return slices.ContainsFunc(r.Addresses, p.Contains) }

func (p *Pool) namespaceAllowed(r *Request) bool {
	if len(p.Namespaces) == 0 && p.NamespaceSelector == nil {
		return true
	}
	return slices.Contains(p.Namespaces, r.Namespace) || p.NamespaceSelector != nil && p.NamespaceSelector.Matches(labels.Set(r.NamespaceLabels))
}

// taken says why an address can't be given to a Service beside those who have it; empty: it can.
func (t *Table) taken(a netip.Addr, r *Request) string {
	for _, o := range t.claims[a] {
		switch {
		case o.UID == r.UID:
		case o.Namespace != r.Namespace: // a key is no secret: anybody could join
			return fmt.Sprintf("%s is in use by a Service of another namespace", a)
		case r.Share == "" || o.Share != r.Share:
			return fmt.Sprintf("%s is in use by Service %s; to share it, give both the same key", a, &o)
		case o.Backends != r.Backends:
			return fmt.Sprintf("%s is shared by Service %s: with externalTrafficPolicy Local, those who share an address must select the same Pods", a, &o)
		}
		for _, p := range r.Ports {
			if o.UID != r.UID && slices.Contains(o.Ports, p) {
				return fmt.Sprintf("%s is shared by Service %s, which has the port %s too", a, &o, p)
			}
		}
	}
	return ""
}

// shared is the lowest address that the Service may share by its key.
func (t *Table) shared(pools Set, r *Request, v4 bool) (best netip.Addr, found bool) {
	if r.Share == "" {
		return best, false
	}
	for a := range t.claims {
		p := pools.Of(a)
		if a.Is4() != v4 || p == nil || p.refuses(r) != "" || p.Manual && r.Pool == "" || t.taken(a, r) != "" {
			continue
		}
		if !found || a.Less(best) {
			best, found = a, true
		}
	}
	return best, found
}

// free is the first address of a range that nobody has.
func (t *Table) free(span Range) (netip.Addr, bool) {
	a, known := t.from[span]
	if !known {
		a = span.First
	}
	for ; a.IsValid() && a.Compare(span.Last) <= 0; a = a.Next() {
		if r, found := t.rangeOf(a); found {
			a = r.addresses().Last
			continue
		}
		if len(t.claims[a]) == 0 && t.Reserved[a] == "" {
			t.from[span] = a
			return a, true
		}
	}
	t.from[span] = span.Last
	return netip.Addr{}, false
}
