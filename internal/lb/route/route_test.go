package route

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"portal/internal/lb/config"
)

func compile(t testing.TB, routes ...config.Route) *Table {
	t.Helper()
	table, err := Compile(routes)
	if err != nil {
		t.Fatal(err)
	}
	return table
}

func exact(host, path, pool string) config.Route {
	return config.Route{Host: host, Path: path, Match: config.Exact, Pool: pool}
}

func prefix(host, path, pool string) config.Route {
	return config.Route{Host: host, Path: path, Match: config.Prefix, Pool: pool}
}

// The examples of the Ingress documentation, and what it leaves open.
func TestFind(t *testing.T) {
	for _, tc := range []struct {
		route      config.Route
		host, path string
		match      bool
	}{
		{prefix("", "/", "x"), "a", "/any/thing", true},
		{exact("", "/foo", "x"), "a", "/foo", true},
		{exact("", "/foo", "x"), "a", "/bar", false},
		{exact("", "/foo", "x"), "a", "/foo/", false},
		{exact("", "/foo/", "x"), "a", "/foo", false},
		{exact("", "/foo", "x"), "a", "/Foo", false},
		{prefix("", "/foo", "x"), "a", "/foo", true},
		{prefix("", "/foo", "x"), "a", "/foo/", true},
		{prefix("", "/foo/", "x"), "a", "/foo", true},
		{prefix("", "/foo/", "x"), "a", "/foo/", true},
		{prefix("", "/foo/", "x"), "a", "/foo/bar", true},
		{prefix("", "/aaa/bb", "x"), "a", "/aaa/bbb", false},
		{prefix("", "/aaa/bbb", "x"), "a", "/aaa/bbb", true},
		{prefix("", "/aaa/bbb/", "x"), "a", "/aaa/bbb", true},
		{prefix("", "/aaa/bbb", "x"), "a", "/aaa/bbb/", true},
		{prefix("", "/aaa/bbb", "x"), "a", "/aaa/bbb/ccc", true},
		{prefix("", "/aaa/bbb", "x"), "a", "/aaa/bbbxyz", false},
		{prefix("", "/aaa/bbb", "x"), "a", "/aaa", false},
		{prefix("", "", "x"), "a", "/", true},
		{prefix("", "", "x"), "a", "*", true},
		{prefix("", "/", "x"), "a", "*", true},
		{prefix("", "/foo", "x"), "a", "*", false},
		{prefix("", "/foo", "x"), "a", "//foo", false},
		{prefix("", "/foo/bar", "x"), "a", "/foo//bar", false},
		{prefix("", "/foo", "x"), "a", "/foo//bar", true},
		{prefix("", "/a%62c", "x"), "a", "/abc", true},
		{prefix("", "/abc", "x"), "a", "/a%62c/d", true},
		{exact("", "/a%2Fb", "x"), "a", "/a%2fb", true},
		{exact("", "/a/b", "x"), "a", "/a%2Fb", false},
		{exact("", "/a%252Fb", "x"), "a", "/a%2Fb", false},
		{prefix("foo.bar.com", "/", "x"), "foo.bar.com", "/", true},
		{prefix("foo.bar.com", "/", "x"), "FOO.bar.com", "/", true},
		{prefix("Foo.bar.com", "/", "x"), "foo.bar.com.", "/", true},
		{prefix("foo.bar.com", "/", "x"), "foo.bar.com:8080", "/", true},
		{prefix("foo.bar.com", "/", "x"), "foo.bar.com.:8080", "/", true},
		{prefix("foo.bar.com", "/", "x"), "bar.com", "/", false},
		{prefix("*.foo.com", "/", "x"), "bar.foo.com", "/", true},
		{prefix("*.foo.com", "/", "x"), "BAR.foo.com:80", "/", true},
		{prefix("*.foo.com", "/", "x"), "baz.bar.foo.com", "/", false},
		{prefix("*.foo.com", "/", "x"), "foo.com", "/", false},
		{prefix("*.foo.com", "/", "x"), ".foo.com", "/", false},
		{prefix("[::1]", "/", "x"), "[::1]:80", "/", true},
		{prefix("[::1]", "/", "x"), "[::2]:80", "/", false},
		{prefix("", "/", "x"), "[::1]:80", "/", true},
		{prefix("", "/", "x"), "", "/", true},
	} {
		if got := compile(t, tc.route).Find(tc.host, tc.path); (got != nil) != tc.match {
			t.Errorf("%s %q %q: %q %q matches: %v", tc.route.Match, tc.route.Host, tc.route.Path, tc.host, tc.path, got != nil)
		}
	}
}

func TestNoRoutes(t *testing.T) {
	if r := new(Table).Find("a.example", "/"); r != nil {
		t.Error(r)
	}
	if r := compile(t).Find("a.example", "/"); r != nil {
		t.Error(r)
	}
}

func TestPrecedence(t *testing.T) {
	table := compile(t,
		prefix("", "/", "default"),
		prefix("", "/only-default", "only-default"),
		prefix("*.example.com", "/", "wild"),
		prefix("a.example.com", "/app", "app"),
		prefix("a.example.com", "/app/sub", "sub"),
		exact("a.example.com", "/app", "exact"),
		prefix("a.example.com", "/app/", "late"),
	)
	for _, tc := range [][3]string{
		{"a.example.com", "/app", "exact"},
		{"a.example.com", "/app/", "app"},
		{"a.example.com", "/app/x", "app"},
		{"a.example.com", "/app/sub/x", "sub"},
		{"a.example.com", "/other", "wild"}, // no path of the exact host matches
		{"b.example.com", "/app", "wild"},
		{"example.com", "/app", "default"},
		{"c.b.example.com", "/only-default/x", "only-default"},
	} {
		got := table.Find(tc[0], tc[1])
		if got == nil || got.Pool != tc[2] {
			t.Errorf("%s%s: got %v, want %s", tc[0], tc[1], got, tc[2])
		}
	}
}

func TestCompileRefuses(t *testing.T) {
	for _, tc := range []struct {
		route config.Route
		want  string
	}{
		{prefix("*", "/", "x"), "host"},
		{prefix("a.*.com", "/", "x"), "host"},
		{prefix("a:80", "/", "x"), "host"},
		{prefix("a.", "/", "x"), "host"},
		{prefix("", "foo", "x"), "slash"},
		{prefix("", "/a/../b", "x"), ".."},
		{exact("", "", "x"), "needs a path"},
		{config.Route{Path: "/", Match: "Regex"}, "match"},
	} {
		if _, err := Compile([]config.Route{tc.route}); err == nil || !strings.Contains(err.Error(), tc.want) || !strings.HasPrefix(err.Error(), "routes[0].") {
			t.Errorf("%+v: %v; want an error about %s", tc.route, err, tc.want)
		}
	}
}

func TestCheckPath(t *testing.T) {
	for _, bad := range []string{"/.", "/..", "/a/./b", "/a/../b", "/%2e", "/%2E%2e/", "/.%2e/x", "/a/..;x=1/b", "/a%2F..%2Fb", "/a%5c..", `/a\..\b`, "/%", "/%4", "/%zz", "/%00"} {
		if CheckPath(bad) == nil {
			t.Errorf("%q is accepted", bad)
		}
	}
	for _, good := range []string{"/", "*", "/a", "//a//", "/.well-known/acme", "/a..b", "/...", "/a.", "/%61", "/a%2Fb", "/a;b", "/%25"} {
		if err := CheckPath(good); err != nil {
			t.Errorf("%q: %v", good, err)
		}
	}
}

// naive is the documented rule, written down without any thought of speed.
func naive(routes []config.Route, host, path string) *config.Route {
	elements := func(s string) []string { return strings.Split(strings.TrimSuffix(canonical(s), "/"), "/") }
	host = Host(host)
	var best *config.Route
	var bestScore [3]int
	for i := range routes {
		r := &routes[i]
		var score [3]int
		name := strings.ToLower(r.Host)
		if suffix, wild := strings.CutPrefix(name, "*."); wild {
			label, rest, _ := strings.Cut(host, ".")
			if label == "" || rest != suffix {
				continue
			}
			score[0] = 1
		} else if name != "" {
			if name != host {
				continue
			}
			score[0] = 2
		}
		if r.Match == config.Exact {
			if canonical(r.Path) != canonical(path) {
				continue
			}
			score[1] = 1
		} else {
			want, got := elements(r.Path), elements(path)
			if path == "*" {
				got = []string{""}
			}
			if len(got) < len(want) {
				continue
			}
			if strings.Join(got[:len(want)], "/") != strings.Join(want, "/") {
				continue
			}
			score[2] = len(want)
		}
		if best == nil || score[0] > bestScore[0] || score[0] == bestScore[0] && (score[1] > bestScore[1] || score[1] == bestScore[1] && score[2] > bestScore[2]) {
			best, bestScore = r, score
		}
	}
	return best
}

func FuzzFind(f *testing.F) {
	f.Add(uint64(1), "a.b", "/a/b")
	f.Add(uint64(2), "c.a.b:80", "/a//")
	f.Add(uint64(3), "B", "/%61/")
	f.Add(uint64(4), "", "*")
	f.Fuzz(func(t *testing.T, seed uint64, host, path string) {
		random := rand.New(rand.NewPCG(seed, 0))
		pick := func(from ...string) string { return from[random.IntN(len(from))] }
		var routes []config.Route
		for range random.IntN(12) {
			r := config.Route{Host: pick("", "a", "b", "a.b", "*.b", "*.a.b", "c.a.b"), Match: config.PathMatch(pick("Exact", "Prefix"))}
			for range random.IntN(4) {
				r.Path += "/" + pick("a", "b", "", "%61", "a%2Fb")
			}
			if r.Path == "" && r.Match == config.Exact {
				r.Path = "/"
			}
			routes = append(routes, r)
		}
		if random.IntN(2) == 0 {
			host, path = pick("a", "b", "x.b", "c.a.b", "B:8", "a.b."), pick("/", "*", "/a", "/b/a", "/a//b/", "/a%2fb", "//", "/a/a/a/a/a")
		}
		if path != "*" && (!strings.HasPrefix(path, "/") || CheckPath(path) != nil) {
			return
		}
		table := compile(t, routes...)
		if got, want := table.Find(host, path), naive(routes, host, path); got != want {
			t.Errorf("%q %q among %+v: got %+v, want %+v", host, path, routes, got, want)
		}
	})
}

func many(hosts int) []config.Route {
	var routes []config.Route
	for h := range hosts {
		for p := range 10 {
			routes = append(routes, prefix(fmt.Sprintf("host-%d.example.com", h), fmt.Sprintf("/app/%d", p), "x"))
		}
	}
	return routes
}

func BenchmarkFind(b *testing.B) {
	for _, hosts := range []int{1, 1000} {
		b.Run(fmt.Sprint(hosts), func(b *testing.B) {
			table := compile(b, many(hosts)...)
			names := make([]string, 256)
			for i := range names {
				names[i] = fmt.Sprintf("host-%d.example.com", i%hosts)
			}
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				if table.Find(names[i&255], "/app/7/some/thing") == nil {
					b.Fatal("no route")
				}
			}
		})
	}
}
