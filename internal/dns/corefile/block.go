package corefile

import (
	"cmp"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/coredns/caddy/caddyfile"
)

// block is a server block.
type block struct {
	position
	zones      []string
	port       int
	bind       []string
	kubernetes *kubernetes
	forwards   []*forward
	cache      *Cache
	hosts      []Hosts
}

type kubernetes struct {
	position
	Kubernetes
}

type forward struct {
	position
	Forward
	from   string
	except []string
}

func (b *block) portOr53() int { return cmp.Or(b.port, 53) }

// directive is a plugin's line, or an option's within its braces.
type directive struct {
	position
	name string
	args []string
	body []directive
}

// ignored plugins change no answers: what they do, Portal does anyway or has no need for.
var ignored = map[string]bool{
	"errors": true, "loop": true, "reload": true, "trace": true, "pprof": true, "cancel": true, "debug": true, "timeouts": true, "multisocket": true,
}

func newBlock(file string, parsed caddyfile.ServerBlock, c *Config) (*block, error) {
	var list []directive
	for name, tokens := range parsed.Tokens {
		list = append(list, directives(file, name, tokens)...)
	}
	slices.SortStableFunc(list, func(a, b directive) int { return cmp.Or(cmp.Compare(a.file, b.file), cmp.Compare(a.line, b.line)) })
	b := &block{position: position{file, 1}}
	if len(list) > 0 {
		b.position = position{list[0].file, max(1, list[0].line-1)} // the parser does not say where the block begins
	}
	for _, key := range parsed.Keys {
		if err := b.key(key); err != nil {
			return nil, err
		}
	}
	for _, kubernetes := range []bool{true, false} { // first, because others need its zones
		for _, d := range list {
			if (d.name == "kubernetes") != kubernetes {
				continue
			}
			if err := b.plugin(d, c); err != nil {
				return nil, err
			}
		}
	}
	return b, nil
}

// directives splits the tokens of a plugin, which may be given several times.
func directives(file, name string, tokens []caddyfile.Token) (out []directive) {
	d := caddyfile.NewDispenserTokens(file, tokens)
	for d.Next() {
		one := directive{position: position{d.File(), d.Line()}, name: name, args: d.RemainingArgs()}
		for d.NextBlock() {
			one.body = append(one.body, directive{position: position{d.File(), d.Line()}, name: d.Val(), args: d.RemainingArgs()})
		}
		out = append(out, one)
	}
	return out
}

// key reads a zone that a server block is for: [dns://]ZONE[:PORT].
func (b *block) key(key string) error {
	if key == "" {
		return b.errorf("a server block begins with its zones: ZONE {")
	}
	rest := strings.TrimPrefix(key, "dns://")
	if strings.Contains(rest, "://") {
		return b.errorf("%s: only plain DNS is supported here; DNS over TLS and HTTPS have flags, --listen-tls and --listen-https", key)
	}
	name, port, given := strings.Cut(rest, ":")
	number := 0
	if given {
		n, err := strconv.ParseUint(port, 10, 16)
		if err != nil || n == 0 {
			return b.errorf("%s: %q is not a port", key, port)
		}
		number = int(n)
	}
	if len(b.zones) > 0 && number != b.port {
		return b.errorf("%s: the other zones of this server block have another port", key)
	}
	b.port = number
	zones, err := zonesOf(name)
	if err != nil {
		return b.errorf("%s: %v", key, err)
	}
	b.zones = append(b.zones, zones...)
	return nil
}

func (b *block) plugin(d directive, c *Config) error {
	first := func(otherwise string) string {
		if len(d.args) > 0 {
			return d.args[0]
		}
		return otherwise
	}
	switch d.name {
	case "kubernetes":
		return b.readKubernetes(d)
	case "forward":
		return b.readForward(d)
	case "cache":
		return b.readCache(d)
	case "hosts":
		return b.readHosts(d)
	case "autopath":
		if len(d.args) != 1 || d.args[0] != "@kubernetes" {
			return d.errorf("autopath: only @kubernetes is supported")
		}
		c.Autopath = true
	case "bufsize":
		n, err := strconv.Atoi(first("1232"))
		if err != nil || n < 512 || n > 4096 {
			return d.errorf("bufsize: want a number from 512 to 4096")
		}
		c.BufSize = n
	case "loadbalance":
		if len(d.args) > 1 || first("round_robin") != "round_robin" || len(d.body) > 0 {
			return d.errorf("loadbalance: only round_robin is supported")
		}
	case "log":
		c.Log = true
	case "health":
		c.Health = first(":8080")
	case "ready":
		c.Ready = first(":8181")
	case "prometheus":
		c.Prometheus = first("localhost:9153")
	case "bind":
		return b.readBind(d)
	case "transfer":
		return readTransfer(d, c)
	default:
		if !ignored[d.name] {
			return d.errorf("the plugin %q is not supported", d.name)
		}
	}
	return nil
}

func (b *block) readBind(d directive) error {
	if len(d.body) > 0 {
		return d.body[0].errorf("bind: the option %q is not supported", d.body[0].name)
	}
	for _, a := range d.args {
		if _, err := netip.ParseAddr(a); err != nil {
			return d.errorf("bind: %q is not an address", a)
		}
	}
	b.bind = append(b.bind, d.args...)
	return nil
}

func readTransfer(d directive, c *Config) error {
	for _, o := range d.body {
		if o.name != "to" {
			return o.errorf("transfer: the option %q is not supported", o.name)
		}
		for _, to := range o.args {
			to = strings.TrimSuffix(to, ":53")
			if _, err := netip.ParseAddr(to); err != nil && to != "*" {
				return o.errorf("transfer: %q is neither * nor an address", to)
			}
			c.TransferTo = append(c.TransferTo, to)
		}
	}
	return nil
}

// isCluster reports whether a zone belongs to the kubernetes plugin of the block.
func (b *block) isCluster(zone string) bool {
	return b.kubernetes != nil && slices.ContainsFunc(append(slices.Clone(b.kubernetes.Zones), b.kubernetes.Reverse...), func(k string) bool { return within(zone, k) })
}
