package bgp

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/yaml"

	"portal/internal/configfile"
)

// ParseFlag reads a peer like
//
//	192.0.2.1
//	192.0.2.1;as=64500;local-as=64512;port=179;password-file=/etc/portal/bgp;hold-time=9s;multihop=2;source=192.0.2.10
//	2001:db8::1;as=64500;graceful-restart=120s;bfd=300ms;node-selector=rack in (a,b)
func ParseFlag(text string) (Peer, error) {
	parts := strings.Split(text, ";")
	p := newPeer()
	var err error
	if p.Address, err = parseAddress(parts[0]); err != nil {
		return p, err
	}
	for _, option := range parts[1:] {
		key, value, given := strings.Cut(strings.TrimSpace(option), "=")
		var err error
		switch {
		case key == "bfd" && !given:
			p.BFD = DefaultBFD
		case !given:
			err = errors.New("it must be as=…, local-as=…, port=…, password-file=…, multihop=…, node-selector=…, hold-time=…, source=…, graceful-restart=… or bfd[=…]")
		default:
			err = p.set(key, value)
		}
		if err != nil {
			return p, fmt.Errorf("option %q: %w", option, err)
		}
	}
	return p, p.complete(func(field string) string { return "option " + field })
}

// set takes in one option of a flag.
func (p *Peer) set(key, value string) (err error) {
	number := func(bits int, unit string) uint64 {
		n, wrong := strconv.ParseUint(value, 10, bits)
		if wrong != nil || n == 0 {
			err = fmt.Errorf("%q is not %s", value, unit)
		}
		return n
	}
	length := func() (d time.Duration) {
		if d, err = time.ParseDuration(value); err != nil {
			err = fmt.Errorf("%q is not a duration like 9s", value)
		}
		return d
	}
	switch key {
	case "as":
		p.AS, err = parseAS(value)
	case "local-as":
		p.LocalAS, err = parseAS(value)
	case "port":
		p.Port = uint16(number(16, "a port"))
	case "multihop":
		p.Multihop = uint8(number(8, "a number of hops from 1 to 255"))
	case "hold-time":
		p.HoldTime = length()
	case "graceful-restart":
		p.Restart = length()
	case "bfd":
		p.BFD = length()
	case "source":
		p.Source, err = parseAddress(value)
	case "node-selector":
		p.Nodes, err = labels.Parse(value)
	case "password-file":
		p.Password, err = readPassword(value)
	default:
		err = errors.New("there is no such option: as, local-as, port, password-file, multihop, node-selector, hold-time, source, graceful-restart, bfd")
	}
	return err
}

func readPassword(path string) (Password, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return "", err
	}
	text := strings.TrimRight(string(data), "\r\n")
	if text == "" {
		return "", errors.New("the file is empty")
	}
	return Password(text), nil
}

// written is the configuration as it is written in a ConfigMap.
type written struct {
	LocalAS uint32        `json:"localAS,omitempty"`
	Peers   []writtenPeer `json:"peers,omitempty"`
	Pools   []writtenPool `json:"pools,omitempty"`
}

type writtenPeer struct {
	Address         string                `json:"address"`
	Port            *uint16               `json:"port,omitempty"`
	AS              *uint32               `json:"as,omitempty"`
	LocalAS         *uint32               `json:"localAS,omitempty"`
	SourceAddress   string                `json:"sourceAddress,omitempty"`
	PasswordKey     string                `json:"passwordKey,omitempty"`
	HoldTime        *metav1.Duration      `json:"holdTime,omitempty"`
	Multihop        *uint8                `json:"multihop,omitempty"`
	GracefulRestart *metav1.Duration      `json:"gracefulRestart,omitempty"`
	BFD             *writtenBFD           `json:"bfd,omitempty"`
	NodeSelector    *metav1.LabelSelector `json:"nodeSelector,omitempty"`
}

type writtenBFD struct {
	Interval *metav1.Duration `json:"interval,omitempty"`
}

type writtenPool struct {
	Name            string   `json:"name"`
	Communities     []string `json:"communities,omitempty"`
	LocalPreference *uint32  `json:"localPreference,omitempty"`
	HashByClient    bool     `json:"hashByClient,omitempty"`
}

// ParseYAML reads the key bgp of a ConfigMap, which source names.
func ParseYAML(source string, data []byte) (Config, error) {
	var w written
	out := Config{Pools: map[string]Attributes{}}
	if err := yaml.UnmarshalStrict(data, &w); err != nil {
		return out, configfile.Mistakes(source+": bgp", data, err)
	}
	if w.LocalAS != 0 {
		if _, err := parseAS(strconv.FormatUint(uint64(w.LocalAS), 10)); err != nil {
			return out, fmt.Errorf("%s: bgp.localAS: %w", source, err)
		}
	}
	for i, peer := range w.Peers {
		p, err := peer.read(w.LocalAS)
		if err != nil {
			return out, fmt.Errorf("%s: bgp.peers[%d].%w", source, i, err)
		}
		out.Peers = append(out.Peers, p)
	}
	for i, pool := range w.Pools {
		at := func(field string, err error) error {
			return fmt.Errorf("%s: bgp.pools[%d].%s: %w", source, i, field, err)
		}
		if problems := validation.IsDNS1123Subdomain(pool.Name); len(problems) > 0 {
			return out, at("name", fmt.Errorf("%q can't be a pool's: %s", pool.Name, problems[0]))
		}
		if _, twice := out.Pools[pool.Name]; twice {
			return out, at("name", fmt.Errorf("%s is there twice", pool.Name))
		}
		a := Attributes{LocalPreference: pool.LocalPreference, HashByClient: pool.HashByClient}
		for j, text := range pool.Communities {
			if err := a.addCommunity(text); err != nil {
				return out, at(fmt.Sprintf("communities[%d]", j), err)
			}
		}
		out.Pools[pool.Name] = a
	}
	if err := Validate(out.Peers); err != nil {
		return out, fmt.Errorf("%s: bgp.peers: %w", source, err)
	}
	return out, nil
}

// fields are the names of options in a ConfigMap.
var fields = map[string]string{"source": "sourceAddress", "hold-time": "holdTime", "graceful-restart": "gracefulRestart", "bfd": "bfd.interval", "multihop": "multihop"}

// read makes a peer of what is written. An error begins with the field.
func (w *writtenPeer) read(localAS uint32) (Peer, error) {
	p := newPeer()
	p.LocalAS, p.PasswordKey = localAS, w.PasswordKey
	var err error
	if p.Address, err = parseAddress(w.Address); err != nil {
		return p, fmt.Errorf("address: %w", err)
	}
	if w.Port != nil {
		if p.Port = *w.Port; p.Port == 0 {
			return p, errors.New("port: 0 is not a port")
		}
	}
	for field, as := range map[string]struct {
		from *uint32
		to   *uint32
	}{"as": {w.AS, &p.AS}, "localAS": {w.LocalAS, &p.LocalAS}} {
		if as.from == nil {
			continue
		}
		if *as.to, err = parseAS(strconv.FormatUint(uint64(*as.from), 10)); err != nil {
			return p, fmt.Errorf("%s: %w", field, err)
		}
	}
	if w.SourceAddress != "" {
		if p.Source, err = parseAddress(w.SourceAddress); err != nil {
			return p, fmt.Errorf("sourceAddress: %w", err)
		}
	}
	if w.PasswordKey != "" {
		if problems := validation.IsConfigMapKey(w.PasswordKey); len(problems) > 0 {
			return p, fmt.Errorf("passwordKey: %q can't be a key of a Secret: %s", w.PasswordKey, problems[0])
		}
	}
	if w.HoldTime != nil {
		p.HoldTime = w.HoldTime.Duration
	}
	if w.GracefulRestart != nil {
		p.Restart = w.GracefulRestart.Duration
	}
	if w.Multihop != nil {
		p.Multihop = *w.Multihop
	}
	if w.BFD != nil {
		p.BFD = DefaultBFD
		if w.BFD.Interval != nil {
			p.BFD = w.BFD.Interval.Duration
		}
	}
	if w.NodeSelector != nil {
		if p.Nodes, err = metav1.LabelSelectorAsSelector(w.NodeSelector); err != nil {
			return p, fmt.Errorf("nodeSelector: %w", err)
		}
	}
	return p, p.complete(func(field string) string { return fields[field] })
}
