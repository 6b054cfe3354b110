// Package corefile reads a Corefile as far as it maps to Portal's DNS server: the kubernetes block, and of the plugins
// around it those that every cluster has. What would change answers and has no counterpart is an error, not ignored.
package corefile

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Config is what a Corefile asks for.
type Config struct {
	Zones             []string
	Port              int
	Bind              []string
	Kubeconfig        string
	Context           string
	Endpoint          string
	TTL               int // -1: not given
	Pods              string
	Namespaces        []string
	Labels            string
	NamespaceLabels   string
	EndpointPodNames  bool
	NoEndpoints       bool
	IgnoreEmpty       bool
	Fallthrough       []string
	HasFallthrough    bool
	Upstreams         []string
	CacheTTL          time.Duration
	Cache             bool
	Autopath          bool
	Log               bool
	Health, Ready     string
	Prometheus        string
	TransferTo        []string
	kubernetesPresent bool
}

// harmless plugins need no counterpart: what they do, Portal does anyway or has no need of.
var harmless = map[string]bool{"errors": true, "reload": true, "loop": true, "loadbalance": true, "lameduck": true, "trace": true, "pprof": true, "cancel": true, "bufsize": true}

// Parse reads a Corefile.
func Parse(text string) (*Config, error) {
	p := &parser{lines: lex(text)}
	c := &Config{TTL: -1, Pods: "disabled"}
	for !p.end() {
		if err := p.serverBlock(c); err != nil {
			return nil, err
		}
	}
	if !c.kubernetesPresent {
		return nil, fmt.Errorf("the Corefile has no kubernetes block")
	}
	return c, nil
}

// line is a directive: its words, and whether a block follows.
type line struct {
	number int
	words  []string
}

func lex(text string) []line {
	var out []line
	for i, l := range strings.Split(text, "\n") {
		l, _, _ = strings.Cut(l, "#")
		var words []string
		for _, w := range strings.Fields(l) {
			words = append(words, strings.Trim(w, `"`))
		}
		if len(words) > 0 {
			out = append(out, line{i + 1, words})
		}
	}
	return out
}

type parser struct {
	lines []line
	at    int
}

func (p *parser) end() bool { return p.at >= len(p.lines) }

func (p *parser) next() line {
	l := p.lines[p.at]
	p.at++
	return l
}

func (l line) errorf(format string, args ...any) error {
	return fmt.Errorf("line %d: %s", l.number, fmt.Sprintf(format, args...))
}

// opens takes the brace off a line that begins a block.
func (l *line) opens() bool {
	if n := len(l.words); n > 0 && l.words[n-1] == "{" {
		l.words = l.words[:n-1]
		return true
	}
	return false
}

func (p *parser) serverBlock(c *Config) error {
	head := p.next()
	if !head.opens() {
		return head.errorf("want a server block: ZONE {")
	}
	var zones []string
	for _, w := range head.words {
		w = strings.TrimSuffix(strings.TrimPrefix(w, "dns://"), ",")
		name, port, ok := strings.Cut(w, ":")
		if ok {
			n, err := strconv.Atoi(port)
			if err != nil {
				return head.errorf("%q is no port", port)
			}
			c.Port = n
		}
		zones = append(zones, strings.TrimSuffix(name, "."))
	}
	for !p.end() {
		l := p.next()
		if l.words[0] == "}" {
			return nil
		}
		if err := p.plugin(c, l, zones); err != nil {
			return err
		}
	}
	return head.errorf("the block is not closed")
}

// block reads the lines of a plugin's block, if there is one.
func (p *parser) block(l *line) ([]line, error) {
	if !l.opens() {
		return nil, nil
	}
	var out []line
	for !p.end() {
		b := p.next()
		if b.words[0] == "}" {
			return out, nil
		}
		out = append(out, b)
	}
	return nil, l.errorf("the block is not closed")
}

func (p *parser) plugin(c *Config, l line, zones []string) error {
	block, err := p.block(&l)
	if err != nil {
		return err
	}
	args := l.words[1:]
	first := func(d string) string {
		if len(args) > 0 {
			return args[0]
		}
		return d
	}
	switch name := l.words[0]; name {
	case "kubernetes":
		return c.kubernetes(l, args, block, zones)
	case "forward":
		if len(args) < 2 || args[0] != "." {
			return l.errorf("forward: only \"forward . TO…\" maps")
		}
		c.Upstreams = append(c.Upstreams, args[1:]...)
	case "cache":
		c.Cache = true
		if n, err := strconv.Atoi(first("3600")); err == nil {
			c.CacheTTL = time.Duration(n) * time.Second
		}
	case "autopath":
		if first("") != "@kubernetes" {
			return l.errorf("autopath: only @kubernetes maps")
		}
		c.Autopath = true
	case "log":
		c.Log = true
	case "health":
		c.Health = first(":8080")
	case "ready":
		c.Ready = first(":8181")
	case "prometheus":
		c.Prometheus = first("localhost:9153")
	case "bind":
		c.Bind = append(c.Bind, args...)
	case "transfer":
		for _, b := range block {
			if b.words[0] == "to" {
				c.TransferTo = append(c.TransferTo, b.words[1:]...)
			}
		}
	default:
		if !harmless[name] {
			return l.errorf("the plugin %q has no counterpart", name)
		}
	}
	return nil
}

// kubernetes reads the block of that name. Its options are a table: how many words each takes, and what it sets.
func (c *Config) kubernetes(l line, zones []string, block []line, server []string) error {
	if c.kubernetesPresent {
		return l.errorf("a second kubernetes block")
	}
	c.kubernetesPresent = true
	if len(zones) == 0 {
		zones = server
	}
	for _, z := range zones {
		if z = strings.TrimSuffix(z, "."); z != "" && !strings.HasSuffix(z, ".arpa") {
			c.Zones = append(c.Zones, z)
		}
	}
	if len(c.Zones) == 0 {
		return l.errorf("kubernetes: want a zone that is not of addresses")
	}
	for _, b := range block {
		if err := c.option(b); err != nil {
			return err
		}
	}
	return nil
}

func (c *Config) option(b line) error {
	args := b.words[1:]
	want := func(least, most int) error {
		if len(args) < least || len(args) > most {
			return b.errorf("%s: takes %d to %d words, has %d", b.words[0], least, most, len(args))
		}
		return nil
	}
	switch b.words[0] {
	case "pods":
		if len(args) != 1 || args[0] != "disabled" && args[0] != "insecure" && args[0] != "verified" {
			return b.errorf("pods: want one of disabled, insecure, verified")
		}
		c.Pods = args[0]
	case "ttl":
		n := -1
		if len(args) == 1 {
			n, _ = strconv.Atoi(args[0])
		}
		if n < 0 || n > 3600 {
			return b.errorf("ttl: want a number from 0 to 3600")
		}
		c.TTL = n
	case "kubeconfig":
		if err := want(1, 2); err != nil {
			return err
		}
		c.Kubeconfig = args[0]
		if len(args) == 2 {
			c.Context = args[1]
		}
	case "endpoint":
		if err := want(1, 9); err != nil {
			return err
		}
		c.Endpoint = args[0]
	case "namespaces":
		if err := want(1, 1000); err != nil {
			return err
		}
		c.Namespaces = append(c.Namespaces, args...)
	case "labels":
		c.Labels = strings.Join(args, " ")
	case "namespace_labels":
		c.NamespaceLabels = strings.Join(args, " ")
	case "endpoint_pod_names":
		c.EndpointPodNames = true
	case "noendpoints":
		c.NoEndpoints = true
	case "ignore":
		if len(args) != 1 || args[0] != "empty_service" {
			return b.errorf("ignore: want empty_service")
		}
		c.IgnoreEmpty = true
	case "fallthrough":
		c.HasFallthrough = true
		c.Fallthrough = append(c.Fallthrough, args...)
	case "startup_timeout", "apiserver_qps", "apiserver_burst", "apiserver_max_inflight":
	default:
		return b.errorf("the option %q of kubernetes has no counterpart", b.words[0])
	}
	return nil
}
