package store

import (
	"errors"
	"fmt"
	"net/url"
	"strings"
	"testing"

	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
)

// outside starts an etcd that is reached over a socket, with the limits that etcd has by default.
func outside(t *testing.T) Options {
	t.Helper()
	cfg := embed.NewConfig()
	cfg.Name, cfg.Dir, cfg.InitialCluster = memberName, t.TempDir(), initialCluster
	cfg.ListenClientUrls, cfg.ListenPeerUrls = []url.URL{{Scheme: "http", Host: "127.0.0.1:0"}}, nil
	cfg.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zap.NewNop())
	etcd, err := embed.StartEtcd(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(etcd.Close)
	<-etcd.Server.ReadyNotify()
	opts := DefaultOptions()
	opts.Servers = []string{"http://" + etcd.Clients[0].Addr().String()}
	return opts
}

// numbers are n claims from one number on.
func numbers(from, n int) []string {
	out := make([]string, n)
	for i := range out {
		out[i] = fmt.Sprint(from + i)
	}
	return out
}

func (f fixture) wantClaims(t *testing.T, want int) {
	t.Helper()
	if got := len(f.claims(t)); got != want {
		t.Errorf("%d claims, want %d", got, want)
	}
}

// The embedded etcd takes all ports of the default range at once, as Kubernetes does, and frees them again.
func TestManyClaims(t *testing.T) {
	f := open(t)
	const all = 2768
	if err := f.create(t, "a", numbers(30000, all)...); err != nil {
		t.Fatal(err)
	}
	f.wantClaims(t, all)
	// All others: as many are taken as are freed.
	if err := f.update(t.Context(), "a", func(cm *corev1.ConfigMap) { cm.Data = object("a", numbers(10000, all)...).Data }); err != nil {
		t.Fatal(err)
	}
	f.wantClaims(t, all)
	if err := f.remove(t, "a"); err != nil {
		t.Fatal(err)
	}
	f.wantClaims(t, 0)
}

// An etcd outside may allow no more than 128 operations in a transaction. An object that has grown beyond that can shrink
// and be deleted; the error for too many claims at once names the flag to set.
func TestManyClaimsOutside(t *testing.T) {
	f := openWith(t, outside(t))
	err := f.create(t, "a", numbers(0, 200)...)
	var many *TooManyClaimsError
	if !errors.As(err, &many) || many.Ops != 201 || !strings.Contains(err.Error(), "--max-txn-ops=1024") {
		t.Errorf("200 claims at once: %v, want an error that names the flag", err)
	}
	f.wantClaims(t, 0)
	for name, offset := range map[string]int{"a": 10000, "b": 20000} {
		if err := f.create(t, name, numbers(offset, 100)...); err != nil {
			t.Fatal(err)
		}
		for n := 200; n <= 2700; n += 100 {
			if err := f.update(t.Context(), name, func(cm *corev1.ConfigMap) { cm.Data = object(name, numbers(offset, n)...).Data }); err != nil {
				t.Fatalf("growing to %d claims: %v", n, err)
			}
		}
	}
	f.wantClaims(t, 5400)
	if err := f.update(t.Context(), "a", func(cm *corev1.ConfigMap) { cm.Data = object("a", "1").Data }); err != nil {
		t.Fatalf("shrinking: %v", err)
	}
	f.wantClaims(t, 2701)
	if err := f.remove(t, "b"); err != nil {
		t.Fatalf("deleting: %v", err)
	}
	f.want(t, "1:a")
	// As many as etcd can store in one object by default. It has not claimed them, which makes no difference to freeing them.
	most := object("c", numbers(10000, 40000)...)
	if err := f.claiming.(*claiming).Interface.Create(t.Context(), "/configmaps/c", most, &corev1.ConfigMap{}, 0); err != nil {
		t.Fatal(err)
	}
	if err := f.remove(t, "c"); err != nil {
		t.Fatalf("deleting: %v", err)
	}
}
