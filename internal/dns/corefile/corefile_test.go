package corefile

import (
	"os"
	"path/filepath"
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
    cache 30 {
       disable success cluster.local
       disable denial cluster.local
    }
    loop
    reload
    loadbalance
}
`

func TestKubeadm(t *testing.T) {
	got, err := Parse("Corefile", kubeadm)
	if err != nil {
		t.Fatal(err)
	}
	want := &Config{
		Port: 53, Kubernetes: Kubernetes{Zones: []string{"cluster.local"}, Reverse: []string{"in-addr.arpa", "ip6.arpa"}, TTL: 30, Pods: "insecure", Fallthrough: []string{"in-addr.arpa", "ip6.arpa"}},
		Forwards: []Forward{{Zones: []string{"."}, To: []string{"/etc/resolv.conf"}, MaxConcurrent: 1000, Cache: &Cache{MinTTL: 5 * time.Second, MaxTTL: 30 * time.Second, MinNegativeTTL: 5 * time.Second, MaxNegativeTTL: 30 * time.Second}}},
		Health:   ":8080", Ready: ":8181", Prometheus: ":9153",
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}

// k3s' Corefile has hosts, and imports what an administrator adds: options into its block, and further blocks.
func TestK3s(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"log.override": "log\n", "lan.server": "lan.example:53 {\n    errors\n    cache 30\n    forward . 10.0.0.1 10.0.0.2 {\n        policy sequential\n    }\n}\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	got, err := Parse("Corefile", `.:53 {
    errors
    health
    ready
    kubernetes cluster.local in-addr.arpa ip6.arpa {
      pods insecure
      fallthrough in-addr.arpa ip6.arpa
    }
    hosts /etc/coredns/NodeHosts {
      ttl 60
      reload 15s
      fallthrough
    }
    prometheus :9153
    cache 30
    loop
    reload
    loadbalance
    import `+dir+`/*.override
    forward . /etc/resolv.conf
}
import `+dir+`/*.server
`)
	if err != nil {
		t.Fatal(err)
	}
	if want := []Hosts{{File: "/etc/coredns/NodeHosts", Zones: []string{"."}, TTL: 60, Reload: 15 * time.Second, Fallthrough: true}}; !reflect.DeepEqual(got.Hosts, want) {
		t.Errorf("hosts: %+v", got.Hosts)
	}
	if !got.Log || len(got.Forwards) != 2 {
		t.Fatalf("%+v", got)
	}
	lan := got.Forwards[1]
	if !reflect.DeepEqual(lan.Zones, []string{"lan.example"}) || !reflect.DeepEqual(lan.To, []string{"10.0.0.1", "10.0.0.2"}) || !lan.Sequential || got.Forwards[0].Sequential {
		t.Errorf("%+v", got.Forwards)
	}
}

// Server blocks stay apart: what one forwards is for its own zones.
func TestBlocksStayApart(t *testing.T) {
	for name, c := range map[string]struct {
		text    string
		want    map[string]string // zone to servers
		refused string
	}{
		"stub zone": {
			".:53 {\n kubernetes cluster.local\n forward . 1.1.1.1\n}\nlan.example:53 other.example:53 {\n forward . 10.0.0.1\n}",
			map[string]string{".": "1.1.1.1", "lan.example": "10.0.0.1", "other.example": "10.0.0.1"}, "",
		},
		"stub zone without forwarding": {
			".:53 {\n kubernetes cluster.local\n forward . 1.1.1.1\n}\nshut.example:53 {\n errors\n}",
			map[string]string{".": "1.1.1.1"}, "shut.example",
		},
		"the cluster in a block of its own": {
			"cluster.local:53 {\n kubernetes\n}\n.:53 {\n forward . 1.1.1.1\n}",
			map[string]string{".": "1.1.1.1"}, "cluster.local",
		},
		"only the stub zone forwards": {
			".:53 {\n kubernetes cluster.local\n}\nlan.example:53 {\n forward . 10.0.0.1\n}",
			map[string]string{"lan.example": "10.0.0.1"}, ".",
		},
		"forwards within a block": {
			".:53 {\n kubernetes cluster.local\n forward lan.example 10.0.0.1\n forward . 1.1.1.1 8.8.8.8 {\n except a.example b.example\n }\n}",
			map[string]string{".": "1.1.1.1 8.8.8.8", "lan.example": "10.0.0.1"}, "a.example b.example",
		},
		"below the cluster's zone": {
			".:53 {\n kubernetes cluster.local\n forward . 1.1.1.1\n}\nlegacy.cluster.local {\n forward . 10.0.0.1\n}",
			nil, "",
		},
		"below the cluster's zone, with the port": {
			".:53 {\n kubernetes cluster.local\n forward . 1.1.1.1\n}\nlegacy.cluster.local:53 {\n forward . 10.0.0.1\n}",
			map[string]string{".": "1.1.1.1", "legacy.cluster.local": "10.0.0.1"}, "",
		},
		"reverse zone of a network": {
			".:53 {\n kubernetes cluster.local 10.96.0.0/16 fd00:96::/32\n forward . 1.1.1.1\n}\n192.168.0.0/16:53 {\n forward . 10.0.0.1\n}",
			map[string]string{".": "1.1.1.1", "168.192.in-addr.arpa": "10.0.0.1"}, "",
		},
	} {
		got, err := Parse("Corefile", c.text)
		if c.want == nil {
			if err == nil {
				t.Errorf("%s: no error for blocks with different ports", name)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		zones := map[string]string{}
		for _, f := range got.Forwards {
			for _, z := range f.Zones {
				zones[z] = strings.Join(f.To, " ")
			}
		}
		if !reflect.DeepEqual(zones, c.want) || strings.Join(got.Refused, " ") != c.refused {
			t.Errorf("%s: %v, refused %v", name, zones, got.Refused)
		}
	}
	got, err := Parse("Corefile", ".:53 {\n kubernetes cluster.local 10.96.0.0/16 fd00:96::/32\n}")
	if err != nil || !reflect.DeepEqual(got.Kubernetes.Reverse, []string{"96.10.in-addr.arpa", "6.9.0.0.0.0.d.f.ip6.arpa"}) {
		t.Errorf("%v %v", got, err)
	}
}

// As in CoreDNS, hosts reads /etc/hosts unless it names another file, with lines of its own or without.
func TestHostsFile(t *testing.T) {
	for args, want := range map[string]string{" {\n fallthrough\n }": "/etc/hosts", " {\n 10.0.0.1 a.b\n fallthrough\n }": "/etc/hosts", " /x {\n 10.0.0.1 a.b\n fallthrough\n }": "/x"} {
		got, err := Parse("Corefile", ".:53 {\n kubernetes a.b\n hosts"+args+"\n}")
		if err != nil || len(got.Hosts) != 1 || got.Hosts[0].File != want {
			t.Errorf("hosts%s: %+v %v, want the file %s", args, got, err, want)
		}
	}
}

func TestRefuses(t *testing.T) {
	for text, want := range map[string]string{
		"{":                                   "Corefile:1",
		"}":                                   "Corefile",
		"{\n}":                                "no server block has the kubernetes plugin",
		".:53 {\n errors {\n}":                "no server block has the kubernetes plugin",
		"":                                    "no server block has the kubernetes plugin",
		".:53 {\n errors\n}":                  "no server block has the kubernetes plugin",
		".:53 {\n kubernetes in-addr.arpa\n}": "Corefile:2: kubernetes: want a zone that is not of addresses",
		".:53 {\n kubernetes\n}":              "Corefile:2: kubernetes: the root",
		"x.y:53 {\n forward . 10.0.0.2\n}\n.:53 {\n kubernetes a.b\n forward x.y 10.0.0.1\n forward . 10.0.0.3\n}":     "Corefile:6: forward: queries for x.y go to the server block at line 1",
		"x.y:53 {\n forward . 10.0.0.2\n}\n.:53 {\n kubernetes a.b\n forward sub.x.y 10.0.0.1\n forward . 10.0.0.3\n}": "Corefile:6: forward: queries for sub.x.y go to the server block at line 1",
		".:53 {\n kubernetes a.b {\n pods maybe\n }\n}":                                                                "Corefile:3: pods",
		".:53 {\n kubernetes a.b {\n ttl 9999\n }\n}":                                                                  "Corefile:3: ttl",
		".:53 {\n kubernetes a.b {\n ttl x\n }\n}":                                                                     "Corefile:3: ttl",
		".:53 {\n kubernetes a.b {\n zonal\n }\n}":                                                                     "Corefile:3: kubernetes: the option \"zonal\"",
		".:53 {\n kubernetes a.b\n rewrite name x y\n}":                                                                "Corefile:3: the plugin \"rewrite\"",
		".:53 {\n kubernetes a.b\n template IN A {\n answer x\n }\n}":                                                  "Corefile:3: the plugin \"template\"",
		".:53 {\n kubernetes a.b\n kubernetes c.d\n}":                                                                  "Corefile:3: a second kubernetes plugin",
		".:53 {\n kubernetes a.b\n":                                                                                    "Corefile:2",
		"kubernetes a.b":                                                                                               "no server block has the kubernetes plugin",
		".:99999 {\n kubernetes a.b\n}":                                                                                "is not a port",
		"tls://.:853 {\n kubernetes a.b\n}":                                                                            "--listen-tls",
		".:53 {\n kubernetes a.b\n}\nx.y:5353 {\n errors\n}":                                                           "all server blocks share one",
		".:53 {\n kubernetes a.b\n}\nx.y:53 {\n bind 127.0.0.1\n}":                                                     "share their addresses",
		".:53 {\n kubernetes a.b\n bind eth0\n}":                                                                       "Corefile:3: bind: \"eth0\" is not an address",
		".:53 {\n kubernetes a.b\n}\n.:53 {\n errors\n}":                                                               "the zone . is in the server block at line 1, too",
		".:53 {\n kubernetes cluster.local\n}\nlocal:53 {\n forward . 1.1.1.1\n}":                                      "Corefile:4: this server block has the zone cluster.local",
		".:53 {\n kubernetes cluster.local in-addr.arpa\n}\nin-addr.arpa:53 {\n forward . 1.1.1.1\n}":                  "has the zone in-addr.arpa",
		"x.y:53 {\n kubernetes cluster.local\n}":                                                                       "Corefile:2: kubernetes: its zone cluster.local is not within",
		".:53 {\n kubernetes cluster.local\n forward x.cluster.local 1.1.1.1\n}":                                       "Corefile:3: forward: x.cluster.local is within",
		".:53 {\n kubernetes a.b\n forward . 1.1.1.1\n forward . 8.8.8.8\n}":                                           "Corefile:4: forward: another one is for .",
		".:53 {\n kubernetes a.b\n forward .\n}":                                                                       "Corefile:3: forward: want",
		".:53 {\n kubernetes a.b\n forward . https://1.1.1.1\n}":                                                       "Corefile:3: forward: https://1.1.1.1",
		".:53 {\n kubernetes a.b\n forward . 1.1.1.1 {\n next NXDOMAIN\n }\n}":                                         "Corefile:4: forward: the option \"next\"",
		".:53 {\n kubernetes a.b\n forward . 1.1.1.1 {\n policy fastest\n }\n}":                                        "Corefile:4: policy",
		".:53 {\n kubernetes a.b\n cache 30 {\n keepttl\n }\n}":                                                        "Corefile:4: cache: the option \"keepttl\"",
		".:53 {\n kubernetes a.b\n cache 30 {\n disable success c.d\n }\n}":                                            "Corefile:4: disable: c.d",
		".:53 {\n kubernetes a.b\n cache 30 c.d\n}":                                                                    "Corefile:3: cache: caching only c.d",
		".:53 {\n kubernetes a.b\n hosts /etc/hosts\n}":                                                                "Corefile:3: hosts: only with fallthrough",
		".:53 {\n kubernetes a.b\n loadbalance weighted /x\n}":                                                         "Corefile:3: loadbalance",
		".:53 {\n kubernetes a.b 10.96.0.0/12\n}":                                                                      "multiple of 8 bits",
		".:53 {\n kubernetes a.b {\n namespaces x\n namespace_labels y=z\n }\n}":                                       "exclude each other",
		".:53 {\n kubernetes a.b\n transfer {\n to 10.0.0.1\n notify\n }\n}":                                           "Corefile:5: transfer: the option \"notify\"",
		".:53 {\n import /no/such/file\n kubernetes a.b\n}":                                                            "Corefile:2",
	} {
		if _, err := Parse("Corefile", text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add(kubeadm)
	f.Add("{")
	f.Add(".:53 {\n kubernetes cluster.local 10.0.0.0/8\n hosts {\n 10.0.0.1 a.b\n fallthrough\n }\n}\nx.y {\n forward . 1.1.1.1\n}")
	f.Fuzz(func(t *testing.T, text string) {
		if strings.Contains(text, "import") {
			return // it reads files
		}
		if c, err := Parse("Corefile", text); err == nil && len(c.Kubernetes.Zones) == 0 {
			t.Fatal("accepted without a zone")
		}
	})
}

// TestCacheTimes: success and denial have bounds of their own, and a single number is the most for both.
func TestCacheTimes(t *testing.T) {
	for text, want := range map[string]Cache{
		"cache":      {MinTTL: 5 * time.Second, MaxTTL: time.Hour, MinNegativeTTL: 5 * time.Second, MaxNegativeTTL: 30 * time.Minute},
		"cache 3600": {MinTTL: 5 * time.Second, MaxTTL: time.Hour, MinNegativeTTL: 5 * time.Second, MaxNegativeTTL: time.Hour},
		"cache 300 {\n success 100 200 20\n denial 50 60 7\n }": {Entries: 150, MinTTL: 20 * time.Second, MaxTTL: 200 * time.Second, MinNegativeTTL: 7 * time.Second, MaxNegativeTTL: time.Minute},
	} {
		c, err := Parse("Corefile", ".:53 {\n kubernetes cluster.local\n forward . 192.0.2.1\n "+text+"\n}\n")
		if err != nil {
			t.Fatal(text, err)
		}
		if got := *c.Forwards[0].Cache; got != want {
			t.Errorf("%s\ngot  %+v\nwant %+v", text, got, want)
		}
	}
}
