package trace

import (
	"testing"

	"portal/internal/proxy/backend"
	"portal/internal/proxy/iptables"
	"portal/internal/proxy/ipvs"
	"portal/internal/proxy/nftables"
	"portal/internal/proxy/userspace"
)

// TestModes: a trace knows each mode of the proxy, and plans for it as the mode itself has the proxy plan.
func TestModes(t *testing.T) {
	all := []backend.Mode{nftables.New(nftables.Options{}), iptables.New(iptables.Options{}), ipvs.New(ipvs.Options{}), userspace.New(userspace.Options{})}
	if len(modes) != len(all) {
		t.Errorf("a trace knows the modes %v, the proxy has %d", ModeNames(), len(all))
	}
	for _, m := range all {
		known, err := modeNamed(m.Name())
		if err != nil {
			t.Error(err)
			continue
		}
		if known.Traits != m.Traits().Traits {
			t.Errorf("%s: a trace plans with %+v, the proxy with %+v", m.Name(), known.Traits, m.Traits().Traits)
		}
	}
}
