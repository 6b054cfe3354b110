// Package route decides which route a request takes: a pure function of a compiled list of routes, the request's host and its path. It
// knows nothing of connections, endpoints or Kubernetes.
//
// # Paths
//
// A path is compared as it was sent; nothing is rewritten, and the endpoint gets the very bytes that were compared. What a client may
// spell in several ways is treated like this:
//
//   - %XX is compared as the byte that it stands for (/%61 is /a), except %2F, which is no separator but part of its element.
//   - Empty elements count: //a is not /a, and /a//b is not /a/b. One slash at the end of a prefix counts for nothing, as Ingress has it.
//   - Elements . and .. (also as %2e), broken % sequences and %00 have no one meaning: CheckPath refuses them, so that no endpoint
//     resolves a path to one that another route leads elsewhere.
package route

import (
	"fmt"
	"strings"

	"portal/internal/lb/config"
)

// Table is a compiled list of routes. It never changes, and many may use it at once.
type Table struct {
	hosts     map[string]*paths // by name
	wildcards map[string]*paths // by what follows the first label
	any       *paths
}

// paths are the routes of one host.
type paths struct {
	exact map[string]*config.Route
	// prefixes are without the slash at their end: "" is every path.
	prefixes map[string]*config.Route
	deepest  int // elements of the deepest prefix
}

// Compile prepares routes for Find. It refuses hosts and paths that no request could match.
func Compile(routes []config.Route) (*Table, error) {
	t := &Table{hosts: map[string]*paths{}, wildcards: map[string]*paths{}, any: newPaths()}
	for i := range routes {
		r := &routes[i]
		at, err := t.host(r.Host)
		if err != nil {
			return nil, fmt.Errorf("routes[%d].host: %w", i, err)
		}
		if err := at.add(r); err != nil {
			return nil, fmt.Errorf("routes[%d].%w", i, err)
		}
	}
	return t, nil
}

func newPaths() *paths {
	return &paths{exact: map[string]*config.Route{}, prefixes: map[string]*config.Route{}}
}

func (t *Table) host(host string) (*paths, error) {
	if host == "" {
		return t.any, nil
	}
	in, name := t.hosts, strings.ToLower(host)
	if suffix, wild := strings.CutPrefix(name, "*."); wild {
		in, name = t.wildcards, suffix
	}
	if name == "" || strings.ContainsAny(name, "*/ ") || name != Host(name) {
		return nil, fmt.Errorf("%q is no name, nor *. and a name", host)
	}
	p := in[name]
	if p == nil {
		p = newPaths()
		in[name] = p
	}
	return p, nil
}

// Key is the same for routes of which a Table takes only the first: those that the same requests match.
func Key(r *config.Route) string {
	match := config.Prefix
	if r.Match == config.Exact {
		match = config.Exact
	}
	return strings.ToLower(r.Host) + " " + string(match) + " " + pathOf(r)
}

// pathOf is a route's path as it is compared: that of a prefix is without the slash at its end.
func pathOf(r *config.Route) string {
	path := canonical(r.Path)
	if r.Match == config.Exact {
		return path
	}
	return strings.TrimSuffix(path, "/")
}

func (p *paths) add(r *config.Route) error {
	if r.Path != "" {
		if r.Path[0] != '/' {
			return fmt.Errorf("path: %q must begin with a slash", r.Path)
		}
		if err := CheckPath(r.Path); err != nil {
			return fmt.Errorf("path: %q: %w", r.Path, err)
		}
	}
	path := pathOf(r)
	switch r.Match {
	case config.Exact:
		if path == "" {
			return fmt.Errorf("path: an exact match needs a path")
		}
		if p.exact[path] == nil {
			p.exact[path] = r
		}
	case config.Prefix, "":
		if p.prefixes[path] == nil {
			p.prefixes[path] = r
		}
		p.deepest = max(p.deepest, strings.Count(path, "/"))
	default:
		return fmt.Errorf("match: %q; want %s or %s", r.Match, config.Exact, config.Prefix)
	}
	return nil
}

// Find returns the route of a request, or nil. host may have a port, a trailing dot and capitals, as the Host field has them; path is
// the target's, up to the question mark, or the * of OPTIONS.
func (t *Table) Find(host, path string) *config.Route {
	host, path = Host(host), canonical(path)
	if p := t.hosts[host]; p != nil {
		if r := p.find(path); r != nil {
			return r
		}
	}
	if len(t.wildcards) > 0 {
		if label, suffix, found := strings.Cut(host, "."); found && label != "" {
			if p := t.wildcards[suffix]; p != nil {
				if r := p.find(path); r != nil {
					return r
				}
			}
		}
	}
	return t.any.find(path)
}

func (p *paths) find(path string) *config.Route {
	if p == nil {
		return nil // the zero Table has no routes
	}
	if len(p.exact) > 0 {
		if r := p.exact[path]; r != nil {
			return r
		}
	}
	if len(p.prefixes) == 0 {
		return nil
	}
	if path == "*" {
		return p.prefixes[""]
	}
	// Only as many elements as the deepest prefix has are looked at: a client can't make the search long.
	end, elements := 0, 0
	for end < len(path) && elements < p.deepest {
		next := strings.IndexByte(path[end+1:], '/')
		elements++
		if next < 0 {
			end = len(path)
		} else {
			end += 1 + next
		}
	}
	for ; end > 0; end = strings.LastIndexByte(path[:end], '/') {
		if r := p.prefixes[path[:end]]; r != nil {
			return r
		}
	}
	return p.prefixes[""]
}

// Host is the name in a Host field: without port and trailing dot, in lower case. An IPv6 address keeps its brackets.
func Host(host string) string {
	if strings.HasPrefix(host, "[") {
		if end := strings.IndexByte(host, ']'); end > 0 {
			host = host[:end+1]
		}
	} else if colon := strings.IndexByte(host, ':'); colon >= 0 {
		host = host[:colon]
	}
	return strings.ToLower(strings.TrimSuffix(host, "."))
}

// canonical spells a path in the one way in which paths are compared.
func canonical(path string) string {
	if strings.IndexByte(path, '%') < 0 {
		return path
	}
	out := make([]byte, 0, len(path))
	for i := 0; i < len(path); i++ {
		if path[i] != '%' || i+2 >= len(path) {
			out = append(out, path[i])
			continue
		}
		b, ok := unhex(path[i+1], path[i+2])
		switch {
		case !ok:
			out = append(out, '%')
			continue
		case b == '/':
			out = append(out, "%2F"...)
		case b == '%':
			// %252F must not become %2F.
			out = append(out, "%25"...)
		default:
			out = append(out, b)
		}
		i += 2
	}
	return string(out)
}

// CheckPath refuses paths that endpoints may read in different ways.
func CheckPath(path string) error {
	if !strings.Contains(path, "/.") && !strings.ContainsAny(path, `%\`) {
		return nil
	}
	for i := 0; i < len(path); i++ {
		if path[i] != '%' {
			continue
		}
		if i+2 >= len(path) {
			return fmt.Errorf("broken %% sequence")
		}
		b, ok := unhex(path[i+1], path[i+2])
		if !ok {
			return fmt.Errorf("broken %% sequence")
		}
		if b == 0 {
			return fmt.Errorf("NUL in the path")
		}
	}
	// Some programs take a backslash or an encoded slash for a separator: there too, nobody may climb.
	decoded := canonical(path)
	for element := range strings.FieldsFuncSeq(strings.ReplaceAll(decoded, "%2F", "/"), func(r rune) bool { return r == '/' || r == '\\' }) {
		// Parameters of an element (/..;x/) are dropped by others.
		name, _, _ := strings.Cut(element, ";")
		if name == "." || name == ".." {
			return fmt.Errorf("element %s in the path", name)
		}
	}
	return nil
}

func unhex(high, low byte) (byte, bool) {
	h, ok := nibble(high)
	l, ok2 := nibble(low)
	return h<<4 | l, ok && ok2
}

func nibble(c byte) (byte, bool) {
	switch {
	case '0' <= c && c <= '9':
		return c - '0', true
	case 'a' <= c && c <= 'f':
		return c - 'a' + 10, true
	case 'A' <= c && c <= 'F':
		return c - 'A' + 10, true
	}
	return 0, false
}
