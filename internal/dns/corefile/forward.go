package corefile

import (
	"slices"
	"strconv"
	"strings"
	"time"
)

// readForward reads a forward plugin.
func (b *block) readForward(d directive) error {
	if len(d.args) < 2 {
		return d.errorf("forward: want a zone and at least one server: forward . ADDRESS")
	}
	from, err := zonesOf(d.args[0])
	if err != nil {
		return d.errorf("forward: %v", err)
	}
	f := &forward{position: d.position, from: from[0], Forward: Forward{To: d.args[1:]}}
	for _, to := range f.To {
		if scheme, _, ok := strings.Cut(to, "://"); ok && scheme != "dns" && scheme != "tls" {
			return d.errorf("forward: %s: servers are addresses, tls://ADDRESS, or files like /etc/resolv.conf", to)
		}
	}
	for _, o := range d.body {
		if err := f.option(o); err != nil {
			return err
		}
	}
	b.forwards = append(b.forwards, f)
	return nil
}

func (f *forward) option(o directive) error {
	switch o.name {
	case "except":
		for _, a := range o.args {
			z, err := zonesOf(a)
			if err != nil {
				return o.errorf("except: %v", err)
			}
			f.except = append(f.except, z...)
		}
	case "force_tcp":
		f.TCP = true
	case "tls":
		if len(o.args) > 0 {
			return o.errorf("tls: certificates of its own are not supported; the system's are trusted")
		}
	case "tls_servername":
		if len(o.args) != 1 {
			return o.errorf("tls_servername: want one name")
		}
		f.ServerName = o.args[0]
	case "policy":
		if len(o.args) != 1 || !slices.Contains([]string{"random", "round_robin", "sequential"}, o.args[0]) {
			return o.errorf("policy: want one of random, round_robin, sequential")
		}
		f.Sequential = o.args[0] == "sequential"
	case "max_concurrent":
		n, err := strconv.Atoi(strings.Join(o.args, " "))
		if err != nil || n < 0 {
			return o.errorf("max_concurrent: want a number")
		}
		f.MaxConcurrent = n
	case "prefer_udp", "expire", "max_fails", "max_connect_attempts", "health_check", "max_idle_conns", "max_age", "failfast_all_unhealthy_upstreams":
		// These are about connections and health checks, for which Portal has fixed rules.
	default:
		return o.errorf("forward: the option %q is not supported", o.name)
	}
	return nil
}

// readCache reads a cache plugin. The cluster's own names are never cached: they are always up to date.
func (b *block) readCache(d directive) error {
	c := &Cache{MaxTTL: time.Hour, MaxNegativeTTL: 30 * time.Minute, MinTTL: 5 * time.Second, MinNegativeTTL: 5 * time.Second}
	zones := d.args
	if len(zones) > 0 {
		if n, err := strconv.Atoi(zones[0]); err == nil {
			if n <= 0 {
				return d.errorf("cache: want a TTL above 0")
			}
			c.MaxTTL, c.MaxNegativeTTL, zones = time.Duration(n)*time.Second, time.Duration(n)*time.Second, zones[1:]
		}
	}
	enabled := len(zones) == 0 // for names that are not the cluster's
	for _, z := range zones {
		switch z = strings.ToLower(strings.TrimSuffix(z, ".")); {
		case slices.Contains(b.zones, z):
			enabled = true
		case !b.isCluster(z):
			return d.errorf("cache: caching only %s is not supported", z)
		}
	}
	for _, o := range d.body {
		if err := c.option(o, b, &enabled); err != nil {
			return err
		}
	}
	if enabled {
		b.cache = c
	}
	return nil
}

func (c *Cache) option(o directive, b *block, enabled *bool) error {
	switch o.name {
	case "success", "denial":
		return c.capacity(o)
	case "serve_stale":
		c.Stale = time.Hour
		if len(o.args) > 0 {
			d, err := time.ParseDuration(o.args[0])
			if err != nil || d < 0 {
				return o.errorf("serve_stale: want a duration")
			}
			c.Stale = d
		}
	case "disable":
		if len(o.args) == 0 || o.args[0] != "success" && o.args[0] != "denial" {
			return o.errorf("disable: want success or denial")
		}
		for _, z := range o.args[1:] {
			if z = strings.ToLower(strings.TrimSuffix(z, ".")); !b.isCluster(z) {
				return o.errorf("disable: %s is not the cluster's; its names can't be left out of the cache", dotted(z))
			}
		}
		if len(o.args) == 1 {
			if o.args[0] == "denial" {
				c.MaxNegativeTTL = 0
				return nil
			}
			*enabled = false
		}
	case "prefetch", "servfail":
		// Portal refreshes popular entries anyway, and caches failures for a second.
	default:
		return o.errorf("cache: the option %q is not supported", o.name)
	}
	return nil
}

// capacity reads success or denial: CAPACITY [TTL [MINTTL]].
func (c *Cache) capacity(o directive) error {
	var n [3]int
	if len(o.args) < 1 || len(o.args) > 3 {
		return o.errorf("%s: want CAPACITY [TTL [MINTTL]]", o.name)
	}
	for i, a := range o.args {
		v, err := strconv.Atoi(a)
		if err != nil || v < 0 {
			return o.errorf("%s: %q is not a number", o.name, a)
		}
		n[i] = v
	}
	c.Entries += n[0]
	least, most := &c.MinTTL, &c.MaxTTL
	if o.name == "denial" {
		least, most = &c.MinNegativeTTL, &c.MaxNegativeTTL
	}
	if len(o.args) > 1 {
		*most = time.Duration(n[1]) * time.Second
	}
	if len(o.args) > 2 {
		*least = time.Duration(n[2]) * time.Second
	}
	return nil
}
