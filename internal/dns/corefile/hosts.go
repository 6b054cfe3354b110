package corefile

import (
	"strconv"
	"strings"
	"time"
)

// readHosts reads a hosts plugin. It comes before the kubernetes plugin, so it has to let names that it does not have pass.
func (b *block) readHosts(d directive) error {
	h := Hosts{TTL: 3600, Reload: 5 * time.Second, File: "/etc/hosts"}
	if len(d.args) > 0 {
		h.File = d.args[0]
	}
	zones := b.zones
	if len(d.args) > 1 {
		zones = nil
		for _, a := range d.args[1:] {
			z, err := zonesOf(a)
			if err != nil {
				return d.errorf("hosts: %v", err)
			}
			zones = append(zones, z...)
		}
	}
	for _, z := range zones {
		h.Zones = append(h.Zones, dotted(z))
	}
	for _, o := range d.body {
		if err := h.option(o); err != nil {
			return err
		}
	}
	if !h.Fallthrough {
		return d.errorf("hosts: only with fallthrough is supported; without it the names of %s that it does not have would all be denied", strings.Join(h.Zones, " "))
	}
	b.hosts = append(b.hosts, h)
	return nil
}

func (h *Hosts) option(o directive) error {
	number := func() (int, error) {
		n, err := strconv.Atoi(strings.Join(o.args, " "))
		if err != nil || n < 0 || n > 65535 {
			return 0, o.errorf("%s: want a number of seconds", o.name)
		}
		return n, nil
	}
	var err error
	switch o.name {
	case "ttl":
		h.TTL, err = number()
	case "no_reverse":
		h.NoReverse = true
	case "reload":
		if h.Reload, err = time.ParseDuration(strings.Join(o.args, " ")); err != nil || h.Reload < 0 {
			return o.errorf("reload: want a duration")
		}
	case "fallthrough":
		if len(o.args) > 0 {
			return o.errorf("hosts: fallthrough for some zones only is not supported")
		}
		h.Fallthrough = true
	default:
		if !strings.ContainsAny(o.name, ".:") || len(o.args) == 0 {
			return o.errorf("hosts: the option %q is not supported", o.name)
		}
		h.Inline = append(h.Inline, o.name+" "+strings.Join(o.args, " "))
	}
	return err
}
