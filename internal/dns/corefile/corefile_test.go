package corefile

import (
	"reflect"
	"strings"
	"testing"
	"time"
)

const kubeadm = `
.:53 {
    errors
    health {
       lameduck 5s
    }
    ready
    kubernetes cluster.local in-addr.arpa ip6.arpa { # the cluster
       pods insecure
       fallthrough in-addr.arpa ip6.arpa
       ttl 30
    }
    prometheus :9153
    forward . /etc/resolv.conf {
       max_concurrent 1000
    }
    cache 30
    loop
    reload
    loadbalance
}
`

func TestKubeadm(t *testing.T) {
	got, err := Parse(kubeadm)
	if err != nil {
		t.Fatal(err)
	}
	want := &Config{
		Zones: []string{"cluster.local"}, Port: 53, TTL: 30, Pods: "insecure", Fallthrough: []string{"in-addr.arpa", "ip6.arpa"}, HasFallthrough: true,
		Upstreams: []string{"/etc/resolv.conf"}, Cache: true, CacheTTL: 30 * time.Second, Health: ":8080", Ready: ":8181", Prometheus: ":9153", kubernetesPresent: true,
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}

func TestRefuses(t *testing.T) {
	for text, want := range map[string]string{
		".:53 {\n errors\n}":                            "no kubernetes block",
		".:53 {\n kubernetes in-addr.arpa\n}":           "a zone that is not of addresses",
		".:53 {\n kubernetes a.b {\n pods maybe\n }\n}": "line 3: pods",
		".:53 {\n kubernetes a.b {\n ttl 9999\n }\n}":   "line 3: ttl",
		".:53 {\n kubernetes a.b {\n zonal\n }\n}":      "line 3: the option \"zonal\"",
		".:53 {\n kubernetes a.b\n rewrite name x y\n}": "line 3: the plugin \"rewrite\"",
		".:53 {\n kubernetes a.b\n":                     "not closed",
		"kubernetes a.b":                                "server block",
	} {
		if _, err := Parse(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add(kubeadm)
	f.Fuzz(func(t *testing.T, text string) {
		if c, err := Parse(text); err == nil && len(c.Zones) == 0 {
			t.Fatal("taken without a zone")
		}
	})
}
