// Package corefile reads a Corefile as far as Portal's DNS server can do what it says: one kubernetes plugin, forwarding with
// a cache in its own or other server blocks, and the plugins that every cluster has around them. What would change answers
// and is not supported is an error with its line, never ignored. The package does not know the server.
package corefile

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/coredns/caddy/caddyfile"
)

// Config is what a Corefile asks for.
type Config struct {
	Port       int // 0: not given
	Bind       []string
	Kubernetes Kubernetes
	// Forwards resolve names outside the cluster. A name belongs to the longest zone that contains it.
	Forwards []Forward
	// Refused are zones that a server block has and nothing in it answers for.
	Refused    []string
	Hosts      []Hosts
	Autopath   bool
	Log        bool
	BufSize    int // 0: not given
	Health     string
	Ready      string
	Prometheus string
	TransferTo []string
}

// Kubernetes is the kubernetes plugin.
type Kubernetes struct {
	Zones, Reverse   []string
	Kubeconfig       string
	Context          string
	Endpoint         string
	TTL              int // -1: not given
	Pods             string
	Namespaces       []string
	Labels           string
	NamespaceLabels  string
	EndpointPodNames bool
	NoEndpoints      bool
	IgnoreEmpty      bool
	Fallthrough      []string
}

// Forward is a forward plugin with the cache before it.
type Forward struct {
	Zones         []string
	To            []string
	TCP           bool
	Sequential    bool
	ServerName    string
	MaxConcurrent int // 0: not given
	Cache         *Cache
}

// Cache is a cache plugin.
type Cache struct {
	MinTTL, MaxTTL, MinNegativeTTL, MaxNegativeTTL time.Duration
	Entries                                        int // 0: not given
	Stale                                          time.Duration
}

// Hosts is a hosts plugin: names and addresses from a file and from the Corefile itself.
type Hosts struct {
	File        string
	Inline      []string
	Zones       []string
	TTL         int
	NoReverse   bool
	Fallthrough bool
	Reload      time.Duration
}

// position is where something is written.
type position struct {
	file string
	line int
}

func (p position) errorf(format string, args ...any) error {
	return fmt.Errorf("%s:%d: %s", p.file, p.line, fmt.Sprintf(format, args...))
}

// Parse reads a Corefile. Its name is used in errors, and to find what it imports.
func Parse(name, text string) (*Config, error) {
	parsed, err := caddyfile.Parse(name, strings.NewReader(text), nil)
	if err != nil {
		return nil, err
	}
	c := &Config{}
	var blocks []*block
	for _, b := range parsed {
		one, err := newBlock(name, b, c)
		if err != nil {
			return nil, err
		}
		blocks = append(blocks, one)
	}
	at := slices.IndexFunc(blocks, func(b *block) bool { return b.kubernetes != nil })
	if at < 0 {
		return nil, fmt.Errorf("%s: no server block has the kubernetes plugin", name)
	}
	if err := c.listen(blocks); err != nil {
		return nil, err
	}
	return c, c.assemble(blocks, blocks[at])
}

// listen takes the address from the blocks, which must agree on it.
func (c *Config) listen(blocks []*block) error {
	first := blocks[0]
	c.Port, c.Bind = first.port, first.bind
	for _, b := range blocks[1:] {
		if b.port != first.port {
			return b.errorf("port %d, but %d at line %d: all server blocks share one", b.portOr53(), first.portOr53(), first.line)
		}
		if !slices.Equal(b.bind, first.bind) {
			return b.errorf("bind is not the same as in the server block at line %d: all server blocks share their addresses", first.line)
		}
	}
	return nil
}

// assemble turns server blocks into zones, each of which one thing answers for.
func (c *Config) assemble(blocks []*block, cluster *block) error {
	owners := map[string]*block{}
	for _, b := range blocks {
		if b != cluster && b.kubernetes != nil {
			return b.kubernetes.errorf("a second kubernetes plugin")
		}
		for _, z := range b.zones {
			if other := owners[z]; other != nil {
				return b.errorf("the zone %s is in the server block at line %d, too", dotted(z), other.line)
			}
			owners[z] = b
		}
	}
	c.Kubernetes = cluster.kubernetes.Kubernetes
	for _, z := range append(slices.Clone(c.Kubernetes.Zones), c.Kubernetes.Reverse...) {
		switch owner := owners[longest(owners, z)]; {
		case owner == nil:
			return cluster.kubernetes.errorf("kubernetes: its zone %s is not within the zones of its server block", z)
		case owner != cluster:
			return owner.errorf("this server block has the zone %s, so the kubernetes plugin at line %d would never see it", z, cluster.kubernetes.line)
		}
	}
	for _, b := range blocks {
		if err := c.route(b, owners); err != nil {
			return err
		}
	}
	return nil
}

// route adds the forwards of a server block. owners has the block of each zone.
func (c *Config) route(b *block, owners map[string]*block) error {
	taken := map[string]bool{}
	for _, f := range b.forwards {
		out := f.Forward
		out.Cache = b.cache
		for _, z := range b.zones {
			switch {
			case within(f.from, z):
				z = f.from
			case !within(z, f.from):
				continue
			}
			if owner := owners[longest(owners, z)]; owner != b {
				return f.errorf("forward: queries for %s go to the server block at line %d and never come here", dotted(z), owner.line)
			}
			if taken[z] {
				return f.errorf("forward: another one is for %s, too", dotted(z))
			}
			if slices.ContainsFunc(c.Kubernetes.Zones, func(k string) bool { return z != k && within(z, k) }) && !slices.Contains(b.zones, z) {
				return f.errorf("forward: %s is within the kubernetes plugin's zone, which answers first; give it a server block of its own", z)
			}
			taken[z] = true
			out.Zones = append(out.Zones, dotted(z))
		}
		if len(out.Zones) == 0 {
			return f.errorf("forward: %s is not within the zones of the server block", dotted(f.from))
		}
		c.Forwards = append(c.Forwards, out)
		for _, z := range f.except {
			if !taken[z] {
				taken[z] = true
				c.Refused = append(c.Refused, dotted(z))
			}
		}
	}
	for _, z := range b.zones {
		if !taken[z] {
			c.Refused = append(c.Refused, dotted(z))
		}
	}
	// Within a block hosts comes before forward, also where that splits a zone.
	for _, h := range b.hosts {
		for _, z := range slices.Sorted(maps.Keys(taken)) {
			if !slices.Contains(h.Zones, dotted(z)) && slices.ContainsFunc(h.Zones, func(own string) bool { return within(z, strings.TrimSuffix(own, ".")) }) {
				h.Zones = append(h.Zones, dotted(z))
			}
		}
		c.Hosts = append(c.Hosts, h)
	}
	return nil
}

// Zones are kept without the final dot; the root is empty.
func dotted(zone string) string {
	if zone == "" {
		return "."
	}
	return zone
}

// within reports whether a zone is another or below it.
func within(zone, other string) bool {
	return other == "" || zone == other || strings.HasSuffix(zone, "."+other)
}

// longest returns the longest of the zones that contains another one.
func longest(zones map[string]*block, zone string) string {
	found := ""
	for z := range zones {
		if within(zone, z) && len(z) > len(found) {
			found = z
		}
	}
	return found
}
