package audit

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/types"

	"portal/internal/alloc"
	"portal/internal/apiserver/registry/service"
	"portal/internal/servicerange"
)

// Check compares what Services hold with what is claimed for them.
//
//	held by      claimed for                finding            repair
//	web          web                        -
//	web          nobody                     NotAllocated       claim it for web
//	web          api, which lacks it        WrongReference     claim it for web
//	web, api     web                        AlreadyAllocated   none: api must get another
//	web          a user's Gateway           AlreadyAllocated   none: web must get another
//	nobody       web                        Orphaned           remove the claim
//	nobody       a user's Gateway           -
//
// It looks at nothing but the snapshot, and at each Service and claim a constant number of times.
func Check(s Snapshot) []Finding {
	c := &check{
		snapshot: &s,
		services: make(map[types.NamespacedName]*Service, len(s.Services)),
		holders:  make(map[alloc.Claim][]*Service, len(s.Claims)),
		claims:   make(map[alloc.Claim]*Claim, len(s.Claims)),
	}
	for i := range s.Claims {
		if claim := &s.Claims[i]; claim.On != (alloc.Claim{}) {
			c.claims[claim.On] = claim
		}
	}
	for i := range s.Services {
		c.service(&s.Services[i])
	}
	for on, holders := range c.holders {
		c.held(on, holders)
	}
	for i := range s.Claims {
		if claim := &s.Claims[i]; len(c.holders[claim.On]) == 0 {
			c.unheld(claim)
		}
	}
	for _, lost := range s.LostRanges {
		c.lostRange(lost)
	}
	sortFindings(c.findings)
	return c.findings
}

type check struct {
	snapshot *Snapshot
	services map[types.NamespacedName]*Service
	holders  map[alloc.Claim][]*Service
	claims   map[alloc.Claim]*Claim
	findings []Finding
}

// words are what a problem is called for addresses and for ports.
type words struct{ missing, twice, wrong, orphaned, unreadable Problem }

var (
	addressWords = words{
		ClusterIPNotAllocated, ClusterIPAlreadyAllocated, IPAddressWrongReference, IPAddressNotAllocated, IPAddressUnreadable,
	}
	portWords = words{
		PortNotAllocated, PortAlreadyAllocated, PortClaimWrongReference, PortClaimOrphaned, PortClaimUnreadable,
	}
)

func wordsFor(on alloc.Claim) words {
	if on.Addr.IsValid() {
		return addressWords
	}
	return portWords
}

func (c *check) add(f Finding) {
	f.Repairable = f.repair != nil
	c.findings = append(c.findings, f)
}

// service notes what a Service holds, and checks what needs no claim to be checked.
func (c *check) service(svc *Service) {
	name := nameOf(svc.Owner)
	c.services[name] = svc
	if svc.Flaw != "" {
		c.add(Finding{
			Problem: ServiceUnreadable, Service: name.String(), about: aboutService(svc.Owner),
			Message: fmt.Sprintf("the Service stored as %s can't be read: %s", svc.Key, svc.Flaw),
			Remedy:  fmt.Sprintf("put the Service back with etcdctl, or delete %s; until then claims that name it are left alone", svc.Key),
		})
		return
	}
	for _, ip := range svc.Invalid {
		c.add(Finding{
			Problem: ClusterIPNotValid, Service: name.String(), Claim: ip, about: aboutService(svc.Owner),
			Message: fmt.Sprintf("Service %s has the cluster IP %q, which is no address", name, ip),
			Remedy:  recreate(name),
		})
	}
	for _, addr := range svc.Held.Addresses {
		c.hold(svc, alloc.Claim{Addr: addr})
		if len(c.snapshot.LostRanges) == 0 && !servicerange.Covered(c.snapshot.Ranges, addr) {
			c.add(Finding{
				Problem: ClusterIPOutOfRange, Service: name.String(), Claim: addr.String(), about: aboutService(svc.Owner),
				Message: fmt.Sprintf("Service %s has the address %s, which is in no ServiceCIDR", name, addr),
				Remedy:  fmt.Sprintf("create a ServiceCIDR that covers %s, or %s", addr, recreate(name)),
			})
		}
	}
	for _, port := range svc.Held.Ports() {
		if port > 0 && port <= 65535 {
			c.hold(svc, alloc.Claim{Port: uint16(port)})
		}
		if c.snapshot.NodePorts.Contains(int(port)) {
			continue
		}
		c.add(Finding{
			Problem: PortOutOfRange, Service: name.String(), Claim: fmt.Sprintf("port %d", port), about: aboutService(svc.Owner),
			Message: fmt.Sprintf("Service %s has port %d, which is not in the node port range %v", name, port, c.snapshot.NodePorts),
			Remedy:  fmt.Sprintf("widen --service-node-port-range, or give Service %s another port", name),
		})
	}
}

// hold notes who holds something, the oldest first, and each once.
func (c *check) hold(svc *Service, on alloc.Claim) {
	holders := c.holders[on]
	for _, holder := range holders {
		if holder == svc {
			return
		}
	}
	holders = append(holders, svc)
	for i := len(holders) - 1; i > 0 && older(holders[i], holders[i-1]); i-- {
		holders[i], holders[i-1] = holders[i-1], holders[i]
	}
	c.holders[on] = holders
}

func older(a, b *Service) bool {
	if a.Created != b.Created {
		return a.Created < b.Created
	}
	return a.Key < b.Key
}

// held checks the claim on what one or more Services hold.
func (c *check) held(on alloc.Claim, holders []*Service) {
	claim := c.claims[on]
	keeper := keeper(claim, holders)
	for _, other := range holders {
		if other != keeper {
			c.twice(on, other, "Service "+nameOf(keeper.Owner).String())
		}
	}
	word, name := wordsFor(on), nameOf(keeper.Owner)
	finding := Finding{
		Service: name.String(), Claim: textOf(on), about: aboutService(keeper.Owner),
		Remedy: fmt.Sprintf("claim %s for Service %s", textOf(on), name),
		repair: &repair{on: on, key: keyOf(on), guard: keeper.Key, guardSeen: keeper.Modified, owner: &keeper.Owner},
	}
	if claim != nil {
		finding.repair.seen = claim.Modified
	}
	switch {
	case claim == nil:
		finding.Problem = word.missing
		finding.Message = fmt.Sprintf("Service %s has %s without a claim to it: another Service could be given the same", name, textOf(on))
	case claim.Flaw != "":
		finding.Problem = word.unreadable
		finding.Message = fmt.Sprintf("the claim of Service %s to %s can't be read: %s", name, textOf(on), claim.Flaw)
	case claim.names(keeper) && claim.Labelled:
		return
	case claim.names(keeper):
		finding.Problem = word.wrong
		finding.Message = fmt.Sprintf("the IPAddress %s of Service %s lacks the labels of its family and of an allocated address", textOf(on), name)
	case claim.Parent != "" && !claim.Managed:
		c.twice(on, keeper, claim.Parent)
		return
	case claim.Parent != "":
		finding.Problem = word.wrong
		finding.Message = fmt.Sprintf("Service %s has %s, but the claim is for %s", name, textOf(on), claim.Parent)
	default:
		finding.Problem = word.wrong
		finding.Message = fmt.Sprintf("Service %s has %s, but the claim is for %s", name, textOf(on), describe(claim.Owner))
		if c.lost(claim) {
			finding.repair = nil
			finding.Remedy = fmt.Sprintf("repair Service %s first, which can't be read and may hold %s too", nameOf(claim.Owner), textOf(on))
		}
	}
	c.add(finding)
}

// keeper is the holder that the claim names, by name at least; if it names none, the oldest.
func keeper(claim *Claim, holders []*Service) *Service {
	for _, holder := range holders {
		if claim != nil && claim.Flaw == "" && claim.Parent == "" && nameOf(claim.Owner) == nameOf(holder.Owner) {
			return holder
		}
	}
	return holders[0]
}

// twice says that a Service has what belongs to another. Only the administrator can know which may be disturbed.
func (c *check) twice(on alloc.Claim, svc *Service, owner string) {
	name := nameOf(svc.Owner)
	remedy := recreate(name)
	if !on.Addr.IsValid() {
		remedy = fmt.Sprintf("give Service %s another node port, or none to have one chosen", name)
	}
	c.add(Finding{
		Problem: wordsFor(on).twice, Service: name.String(), Claim: textOf(on), about: aboutService(svc.Owner),
		Message: fmt.Sprintf("Service %s has %s, which belongs to %s", name, textOf(on), owner),
		Remedy:  remedy + "; then repair, because that frees the claim",
	})
}

// unheld checks a claim on what no Service holds.
func (c *check) unheld(claim *Claim) {
	word, text := wordsFor(claim.On), textOf(claim.On)
	finding := Finding{Claim: text, about: aboutAPI(), repair: &repair{on: claim.On, key: claim.Key, seen: claim.Modified}}
	if !claim.isPort() {
		finding.about = aboutAddress(claim)
	}
	switch {
	case claim.Flaw != "":
		if claim.On == (alloc.Claim{}) {
			finding.Claim = claim.Key
		}
		finding.Problem = PortClaimUnreadable
		finding.Message = fmt.Sprintf("the claim stored as %s can't be read: %s", claim.Key, claim.Flaw)
		finding.Remedy = fmt.Sprintf("remove %s, which no Service has", claim.Key)
		if !claim.isPort() {
			// A user may have made it, and may want to know what became of it.
			finding.Problem, finding.repair = IPAddressUnreadable, nil
			finding.Remedy = fmt.Sprintf("put the IPAddress back with etcdctl, or delete %s; no Service has it", claim.Key)
		}
	case claim.Parent != "" || c.lost(claim):
		return
	default:
		name := nameOf(claim.Owner)
		finding.Problem, finding.Service = word.orphaned, name.String()
		finding.Message = fmt.Sprintf("%s is claimed for %s, which %s", text, describe(claim.Owner), c.why(name))
		finding.Remedy = fmt.Sprintf("remove the claim to %s", text)
		finding.repair.guard = servicePrefix + name.Namespace + "/" + name.Name
		if svc := c.services[name]; svc != nil {
			finding.repair.guardSeen = svc.Modified
		}
		if claim.isPort() {
			finding.about = aboutService(claim.Owner)
		}
		if !claim.Managed {
			finding.repair = nil
			finding.Remedy = fmt.Sprintf("delete the IPAddress %s, which a user made, unless it is meant to keep the address free", text)
		}
	}
	c.add(finding)
}

// lost says that the Service that a claim names can't be read: whether it holds what is claimed is not known.
func (c *check) lost(claim *Claim) bool {
	svc := c.services[nameOf(claim.Owner)]
	return svc != nil && svc.Flaw != ""
}

func (c *check) why(name types.NamespacedName) string {
	if c.services[name] == nil {
		return "does not exist"
	}
	return "does not have it"
}

func (c *check) lostRange(lost Unreadable) {
	name := lost.Key[len(rangePrefix):]
	c.add(Finding{
		Problem: ServiceCIDRUnreadable, Claim: lost.Key,
		about: corev1.ObjectReference{APIVersion: networkingv1.SchemeGroupVersion.String(), Kind: "ServiceCIDR", Name: name},
		Message: fmt.Sprintf("the ServiceCIDR stored as %s can't be read: %s; whether addresses are in range can't be said without it",
			lost.Key, lost.Flaw),
		Remedy: fmt.Sprintf("put the ServiceCIDR back with etcdctl, or delete %s", lost.Key),
	})
}

func recreate(name types.NamespacedName) string {
	return fmt.Sprintf("delete Service %s and create it again without a cluster IP, to have one chosen", name)
}

// describe is an owner as the claim names it, with what tells it from another of the same name.
func describe(o service.Owner) string {
	if o.UID == "" {
		return "Service " + nameOf(o).String()
	}
	return fmt.Sprintf("Service %s with UID %s", nameOf(o), o.UID)
}

func uid(o service.Owner) types.UID { return types.UID(o.UID) }
