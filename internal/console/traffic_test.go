package console

import (
	"context"
	"net/netip"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"portal/internal/top"
)

// TestCollected: figures of several nodes and ports add up, and a session gets those of the Services that it may see.
func TestCollected(t *testing.T) {
	sample := func(port string, rate float64, open int) top.Service {
		counts := top.Counts{NewRate: rate, Open: open, ByteRate: 1000}
		return top.Service{Namespace: "shop", Name: "web", Port: port, Counts: counts, Endpoints: []top.Endpoint{
			{Address: netip.MustParseAddrPort("10.0.0.1:8080"), Counts: counts}, {Counts: top.Counts{ResetsRate: 1}},
		}}
	}
	c := &Collected{services: map[key]*Rates{}, endpoints: map[key]map[string]*Rates{}}
	c.take(&top.Sample{Accounting: true, Services: []top.Service{sample("web", 2, 3), sample("metrics", 1, 1)}})
	c.take(&top.Sample{Services: []top.Service{sample("web", 4, 0), {Namespace: "hidden", Name: "other", Counts: top.Counts{NewRate: 9}}}})
	f := testFeed()
	f.putService(service(corev1.ServiceSpec{}))
	all := c.ofAll(f)
	if got := all.Services["shop/web"]; len(all.Services) != 1 || got != [4]float64{7, 4, 3000, 0} || !all.Bytes || all.Latency {
		t.Errorf("all Services: %+v", all)
	}
	one := c.ofOne(f, key{"shop", "web"})
	if one.Rates.New != 7 || one.Endpoints["10.0.0.1"].New != 7 || one.Endpoints[""].Resets != 3 {
		t.Errorf("one Service: %+v", one)
	}
	if other := c.ofOne(f, key{"hidden", "other"}); other.Rates.New != 0 || len(other.Endpoints) != 0 {
		t.Errorf("a Service that may not be seen: %+v", other)
	}
}

// TestNobodyToAsk: the last page is closed between the look for nodes and the questions.
func TestNobodyToAsk(t *testing.T) {
	var out Collected
	if allowed := newTraffic(nil).round(t.Context(), nil, nil, &out); !allowed || out.Missing != "" {
		t.Errorf("allowed %v, missing %q", allowed, out.Missing)
	}
}

// TestTurn: one at a time, and after one that took long, a rest.
func TestTurn(t *testing.T) {
	all := make(turn, 1)
	release, err := all.take(t.Context(), func(took time.Duration) time.Duration { return 0 })
	if err != nil {
		t.Fatal(err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := all.take(ended, nil); err == nil {
		t.Error("two have it at a time")
	}
	release()
	release, err = all.take(t.Context(), func(time.Duration) time.Duration { return time.Hour })
	if err != nil {
		t.Fatal(err)
	}
	release()
	if _, err := all.take(ended, nil); err == nil {
		t.Error("there is no rest")
	}
}

// TestAccounts: sessions share an account only if their credentials are the very same, and it goes with the last of them.
func TestAccounts(t *testing.T) {
	c := testConsole(t, Options{})
	mine := c.accounts.get(c, credentials{Token: "a"}.key(), nil)
	if c.accounts.get(c, credentials{Token: "a"}.key(), nil) != mine {
		t.Error("two sessions with the same token do not share")
	}
	for _, other := range []credentials{{Token: "b"}, {Code: "a"}, {Certificate: "a"}, {Certificate: "a", Key: "b"}} {
		if c.accounts.get(c, other.key(), nil) == mine {
			t.Errorf("%+v shares with another's token", other)
		}
	}
	c.accounts.expire(time.Now(), map[*account]bool{mine: true})
	if len(c.accounts.all) != 1 || c.accounts.get(c, credentials{Token: "a"}.key(), nil) != mine {
		t.Errorf("%d accounts are left, of which one is in use", len(c.accounts.all))
	}
}

// TestShellWord: what is shown to be typed is one word to a shell.
func TestShellWord(t *testing.T) {
	for in, want := range map[string]string{"client": "client", "10.0.0.1:80": "10.0.0.1:80", "[fd00::1]:80": "'[fd00::1]:80'", "a b": "'a b'", "it's": `'it'\''s'`, "": "''", "$(x)": "'$(x)'"} {
		if got := shellWord(in); got != want {
			t.Errorf("%q becomes %s, want %s", in, got, want)
		}
	}
}
