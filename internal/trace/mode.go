package trace

import (
	"fmt"
	"strings"

	"portal/internal/plan"
)

// Mode is what is particular about a proxy mode, as far as a packet notices it.
type Mode struct {
	Name string
	plan.Traits
	// PassesOtherPorts: ports of a cluster IP that the Service does not have are not rejected.
	PassesOtherPorts bool
	// PassesFromNode: what the node itself sends to an external or load-balancer IP without endpoints is not rejected.
	PassesFromNode bool
	// RejectsFirst: what has no endpoints is rejected before source ranges are looked at.
	RejectsFirst bool
	// NoSCTP: Services of SCTP are rejected.
	NoSCTP bool
	// Choice is how an endpoint is chosen.
	Choice string
}

// modes are the proxy's; the modes' own tests show that they behave so.
var modes = []Mode{
	{Name: "nftables", Traits: plan.Traits{PrimaryNodePorts: true, DropsUnassigned: true}, Choice: "at random"},
	{
		Name: "iptables", Traits: plan.Traits{Loopback4: true, LoopbackByDefault: true}, Choice: "at random",
		PassesOtherPorts: true, PassesFromNode: true, RejectsFirst: true,
	},
	{Name: "ipvs", Choice: "by IPVS' scheduler"},
	{Name: "userspace", Traits: plan.Traits{Loopback4: true, Loopback6: true, Relays: true}, NoSCTP: true, Choice: "in turn"},
}

// ModeNames are the modes that a trace knows.
func ModeNames() (out []string) {
	for _, m := range modes {
		out = append(out, m.Name)
	}
	return out
}

func modeNamed(name string) (*Mode, error) {
	if name == "" {
		return &modes[0], nil
	}
	for i := range modes {
		if modes[i].Name == name {
			return &modes[i], nil
		}
	}
	return nil, fmt.Errorf("the proxy mode %q is not one of %s", name, strings.Join(ModeNames(), ", "))
}
