package ipvs

import (
	"fmt"
	"os"
	"strings"
)

// sysctl is the kernel's settings under net.
type sysctl interface {
	get(name string) (string, error)
	set(name, value string) error
}

type procfs struct{}

func (procfs) get(name string) (string, error) {
	b, err := os.ReadFile("/proc/sys/net/" + name)
	return strings.TrimSpace(string(b)), err
}

func (procfs) set(name, value string) error {
	return os.WriteFile("/proc/sys/net/"+name, []byte(value), 0)
}

type setting struct{ name, value string }

// settings are what IPVS needs set to serve as a Service proxy.
func (o *Options) settings() []setting {
	out := []setting{
		// Without connection tracking, sources of what IPVS forwards can't be rewritten.
		{"ipv4/vs/conntrack", "1"},
		// A connection whose endpoint is gone ends at its next packet, so that the client makes a new one.
		{"ipv4/vs/expire_nodest_conn", "1"},
		// A client with affinity to an endpoint that is leaving gets another.
		{"ipv4/vs/expire_quiescent_template", "1"},
		{"ipv4/ip_forward", "1"},
	}
	if o.StrictARP {
		out = append(out, setting{"ipv4/conf/all/arp_ignore", "1"}, setting{"ipv4/conf/all/arp_announce", "2"})
	}
	return out
}

// configure sets what is not set.
func configure(s sysctl, list []setting) error {
	for _, want := range list {
		have, err := s.get(want.name)
		if err != nil {
			return fmt.Errorf("read the setting net/%s: %w", want.name, err)
		}
		if have == want.value {
			continue
		}
		if err := s.set(want.name, want.value); err != nil {
			return fmt.Errorf("set net/%s to %s: %w", want.name, want.value, err)
		}
	}
	return nil
}
