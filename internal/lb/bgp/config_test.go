package bgp

import (
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/labels"
)

// TestParseFlag: what a flag can say, and what is said of what it can't.
func TestParseFlag(t *testing.T) {
	file := filepath.Join(t.TempDir(), "password")
	if err := os.WriteFile(file, []byte("secret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	rack, err := labels.Parse("rack in (a,b)")
	if err != nil {
		t.Fatal(err)
	}
	base := newPeer()
	base.Address, base.AS, base.LocalAS = netip.MustParseAddr("192.0.2.1"), DefaultAS, DefaultAS
	for text, change := range map[string]func(*Peer){
		"192.0.2.1":                             func(*Peer) {},
		"192.0.2.1;as=64500":                    func(p *Peer) { p.AS = 64500 },
		"192.0.2.1;local-as=4200000000":         func(p *Peer) { p.AS, p.LocalAS = 4200000000, 4200000000 },
		"192.0.2.1;port=1790;hold-time=3s":      func(p *Peer) { p.Port, p.HoldTime = 1790, 3*time.Second },
		"192.0.2.1;as=1;multihop=2":             func(p *Peer) { p.AS, p.Multihop = 1, 2 },
		"192.0.2.1;graceful-restart=0s;bfd":     func(p *Peer) { p.Restart, p.BFD = 0, DefaultBFD },
		"192.0.2.1;bfd=50ms":                    func(p *Peer) { p.BFD = 50 * time.Millisecond },
		"192.0.2.1;source=192.0.2.9":            func(p *Peer) { p.Source = netip.MustParseAddr("192.0.2.9") },
		"192.0.2.1;password-file=" + file:       func(p *Peer) { p.Password = "secret" },
		"192.0.2.1;node-selector=rack in (a,b)": func(p *Peer) { p.Nodes = rack },
	} {
		want := base
		change(&want)
		if got, err := ParseFlag(text); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, %v; want %+v", text, got, err, want)
		}
	}
	for text, want := range map[string]string{
		"":                                      `"" is not an address`,
		"router":                                `"router" is not an address`,
		"fe80::1":                               "link-local",
		"192.0.2.1;as=0":                        `option "as=0"`,
		"192.0.2.1;as=AS1":                      `"AS1" is not the number of an AS`,
		"192.0.2.1;port=0":                      `"0" is not a port`,
		"192.0.2.1;hold-time=9":                 "is not a duration like 9s",
		"192.0.2.1;hold-time=1s":                "option hold-time: 1s is not whole seconds from 3s",
		"192.0.2.1;graceful-restart=2h":         "option graceful-restart",
		"192.0.2.1;bfd=1ms":                     "option bfd: 1ms is not from 10ms",
		"192.0.2.1;multihop=2":                  "option multihop: it is for peers of another AS",
		"192.0.2.1;as=1;multihop=2;bfd":         "option bfd: it works with neighbours only",
		"192.0.2.1;source=2001:db8::1":          "option source: 2001:db8::1 is not of the family",
		"192.0.2.1;password=x":                  "there is no such option",
		"192.0.2.1;passive":                     "it must be as=…",
		"192.0.2.1;password-file=" + file + "x": "no such file",
		"192.0.2.1;node-selector=a in":          `option "node-selector=a in"`,
	} {
		if _, err := ParseFlag(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", text, err, want)
		}
	}
}

// TestParseYAML: the same for a ConfigMap; a mistake is named by its field.
func TestParseYAML(t *testing.T) {
	got, err := ParseYAML("cm", []byte(`
localAS: 64600
peers:
- {address: 192.0.2.1, as: 64500, passwordKey: tor, holdTime: 3s, gracefulRestart: 60s, bfd: {}}
- {address: "2001:db8::1", localAS: 64601, port: 1790, sourceAddress: "2001:db8::9", nodeSelector: {matchLabels: {rack: a}}}
pools:
- {name: office, communities: ["64600:7", no-export, "64600:1:2"], localPreference: 200, hashByClient: true}
`))
	if err != nil {
		t.Fatal(err)
	}
	one, two := newPeer(), newPeer()
	one.Address, one.AS, one.LocalAS, one.PasswordKey, one.HoldTime, one.Restart, one.BFD = netip.MustParseAddr("192.0.2.1"), 64500, 64600, "tor", 3*time.Second, time.Minute, DefaultBFD
	two.Address, two.AS, two.LocalAS, two.Port, two.Source, two.Nodes = netip.MustParseAddr("2001:db8::1"), 64601, 64601, 1790, netip.MustParseAddr("2001:db8::9"), labels.SelectorFromSet(labels.Set{"rack": "a"})
	if want := []Peer{one, two}; !reflect.DeepEqual(got.Peers, want) {
		t.Errorf("%+v\nwant %+v", got.Peers, want)
	}
	preference := uint32(200)
	if want := (Attributes{Communities: []uint32{64600<<16 | 7, 0xFFFFFF01}, LargeCommunities: [][3]uint32{{64600, 1, 2}}, LocalPreference: &preference, HashByClient: true}); !reflect.DeepEqual(got.Pools["office"], want) {
		t.Errorf("%+v\nwant %+v", got.Pools["office"], want)
	}
	for text, want := range map[string]string{
		"peers: [{adress: 192.0.2.1}]": "adress",
		"peers: [{as: 1}]":             "bgp.peers[0].address",
		"peers: [{address: 192.0.2.1}, {address: 192.0.2.2, as: 23456}]": "bgp.peers[1].as",
		"peers: [{address: 192.0.2.1, holdTime: 2s}]":                    "bgp.peers[0].holdTime",
		"peers: [{address: 192.0.2.1, holdTime: soon}]":                  "bgp",
		"peers: [{address: 192.0.2.1, gracefulRestart: 1ms}]":            "bgp.peers[0].gracefulRestart",
		"peers: [{address: 192.0.2.1, passwordKey: a/b}]":                "bgp.peers[0].passwordKey",
		"peers: [{address: 192.0.2.1}, {address: 192.0.2.1}]":            "bgp.peers: peer 192.0.2.1 is there twice",
		"localAS: 65535":                               "bgp.localAS",
		"pools: [{name: a, communities: [a]}]":         "bgp.pools[0].communities[0]",
		"pools: [{name: a, communities: ['70000:1']}]": "bgp.pools[0].communities[0]",
		"pools: [{name: a}, {name: a}]":                "bgp.pools[1].name",
	} {
		if _, err := ParseYAML("cm", []byte(text)); err == nil || !strings.Contains(err.Error(), want) || !strings.HasPrefix(err.Error(), "cm: bgp") {
			t.Errorf("%s: %v, want %s", text, err, want)
		}
	}
}

// TestSelected: a peer is for nodes with certain labels.
func TestSelected(t *testing.T) {
	parse := func(text string) Peer {
		p, err := ParseFlag(text)
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	peers := []Peer{parse("192.0.2.1"), parse("192.0.2.2;node-selector=rack=a"), parse("192.0.2.2;port=1790;node-selector=rack=b"), parse("192.0.2.2;node-selector=rack=b,old")}
	for rack, want := range map[string]int{"a": 2, "b": 2, "c": 1} {
		if got, err := Selected(peers, labels.Set{"rack": rack}); err != nil || len(got) != want {
			t.Errorf("rack %s: %v %v", rack, got, err)
		}
	}
	if got, err := Selected(peers, labels.Set{"rack": "b", "old": "yes"}); err == nil || len(got) != 2 || got[1].Port != 1790 {
		t.Errorf("two entries for one router: %v %v", got, err)
	}
}
