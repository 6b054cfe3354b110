package main

import (
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/spf13/pflag"

	"portal/internal/lb"
	"portal/internal/lb/controller"
)

// TestBalancerFlags: which ways to announce can be combined, and what is said of flags that can't be used.
func TestBalancerFlags(t *testing.T) {
	for args, want := range map[string]string{
		"":                "",
		"--announce=none": "",
		"--announce=bgp":  "",
		"--announce=l2,bgp --bgp-peer=192.0.2.1;as=64500 --interface=eth0": "",
		"--announce=bgp --bgp-on-stop=keep":                                "",
		"--announce=arp":                                                   `--announce: "arp" is not one of l2, bgp, none`,
		"--announce=none,bgp":                                              `--announce: "none,bgp" is not one of`,
		"--announce=bgp --interface=eth0":                                  "--interface: needs --announce l2",
		"--bgp-peer=192.0.2.1":                                             "--bgp-peer: needs --announce bgp",
		"--announce=bgp --bgp-peer=router":                                 `--bgp-peer "router": "router" is not an address`,
		"--announce=bgp --bgp-peer=192.0.2.1 --bgp-peer=192.0.2.1;as=1":    "--bgp-peer: peer 192.0.2.1 is there twice",
		"--announce=bgp --bgp-on-stop=leave":                               `--bgp-on-stop: "leave" is not one of withdraw, keep`,
	} {
		var o balancerOptions
		flags := pflag.NewFlagSet("lb", pflag.ContinueOnError)
		o.addFlags(flags, "", "")
		if err := flags.Parse(strings.Fields(args)); err != nil {
			t.Fatal(err)
		}
		_, err := o.read()
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", args, err, want)
		}
		if err != nil {
			continue
		}
		var out lb.Options
		o.apply(&out)
		if out.BGP != strings.Contains(args, "bgp") || out.Layer2 != (!strings.Contains(args, "announce") || strings.Contains(args, "l2")) ||
			out.KeepOnStop != strings.Contains(args, "keep") || len(out.Peers) != strings.Count(args, "bgp-peer") {
			t.Errorf("%s: %+v", args, out)
		}
	}
}

// TestMetricsWithoutWorker: while the balancing process can't be asked, the rest of the metrics is there.
func TestMetricsWithoutWorker(t *testing.T) {
	registry := prometheus.NewRegistry()
	registry.MustRegister(prometheus.NewGauge(prometheus.GaugeOpts{Name: "own"}))
	away := prometheus.GathererFunc(func() ([]*dto.MetricFamily, error) { return nil, errors.New("the balancing process is away") })
	s, err := newStatusServer("127.0.0.1:0", prometheus.Gatherers{away, registry}, func() bool { return true })
	if err != nil {
		t.Fatal(err)
	}
	defer s.l.Close()
	w := httptest.NewRecorder()
	s.s.Handler.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	if w.Code != http.StatusOK || !strings.Contains(w.Body.String(), "own 0") {
		t.Errorf("%d: %s", w.Code, w.Body)
	}
}

// TestLeaseNamespace: Leases are where the flag says, which must be a namespace.
func TestLeaseNamespace(t *testing.T) {
	for namespace, want := range map[string]string{"portal-lb": "", "": "--lease-namespace", "a/b": `--lease-namespace: "a/b" can't be a namespace`} {
		o := lbOptions{hostname: "m1", class: controller.DefaultClass, leases: namespace, balancers: balancerOptions{announce: []string{announceNone}, onStop: onStopWithdraw, l2OnStop: onStopKeep}}
		out, err := o.options(slog.New(slog.DiscardHandler))
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %s", namespace, err, want)
		}
		if err == nil && out.Leases != namespace {
			t.Errorf("%q: %q", namespace, out.Leases)
		}
	}
}
