package lb

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"

	"portal/internal/lb/bgp"
)

// peering is what this process knows of routers: those of the ConfigMap, and passwords.
type peering struct {
	dirty chan struct{}

	mu        sync.Mutex
	config    bgp.Config
	err       error // why the ConfigMap can't be used
	passwords map[string]bgp.Password
	reported  string // what was last logged about peers that can't be used
}

func (b *Balancer) peersChanged() {
	if b.speaker == nil {
		return
	}
	select {
	case b.peers.dirty <- struct{}{}:
	default:
	}
}

// readPeers takes in BGP's part of the ConfigMap. One that can't be used changes nothing.
func (b *Balancer) readPeers(source, text string, err error) {
	var config bgp.Config
	if err == nil {
		config, err = bgp.ParseYAML(source, []byte(text))
	}
	if err == nil {
		if err = bgp.Validate(slices.Concat(b.Peers, config.Peers)); err != nil {
			err = fmt.Errorf("%s: bgp.peers, with those of flags: %w", source, err)
		}
	}
	b.peers.mu.Lock()
	b.peers.err = err
	if err == nil {
		b.peers.config = config
	}
	b.peers.mu.Unlock()
	if err != nil {
		b.Log.Error("BGP peers not changed: the ConfigMap can't be used", "err", err)
		return
	}
	pools, _ := b.allPools()
	for name := range config.Pools {
		if pools.Named(name) == nil {
			b.Log.Warn("BGP: attributes are for a pool that this process does not know", "pool", name)
		}
	}
	b.Log.Info("BGP configuration read", "peers", len(config.Peers)+len(b.Peers), "pools", len(config.Pools))
}

// readPasswords takes in the Secret. A password that is gone is still used: a session that is up is not ended for it.
func (b *Balancer) readPasswords(object *corev1.Secret) {
	if object == nil {
		return
	}
	b.peers.mu.Lock()
	for key, value := range object.Data {
		b.peers.passwords[key] = bgp.Password(strings.TrimRight(string(value), "\r\n"))
	}
	b.peers.mu.Unlock()
	b.peersChanged()
}

const passwordWait = 3 * time.Second

// speaking announces by BGP until the context ends: each node all that it may serve.
func (b *Balancer) speaking(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	// Usually the passwords are there at once. Without them, peers that need none are not kept waiting.
	for end := time.Now().Add(passwordWait); !b.passwords.hasSynced() && time.Now().Before(end) && ctx.Err() == nil; {
		time.Sleep(passwordWait / 100)
	}
	b.speaker.Set(b.myPeers(), b.routes())
	wg.Go(func() { b.speaker.Run(ctx) })
	for {
		select {
		case <-ctx.Done():
			return
		case <-b.peers.dirty:
			b.speaker.Set(b.myPeers(), b.routes())
		}
	}
}

// myPeers are those of this node, with their passwords. One whose password is not known waits for it.
func (b *Balancer) myPeers() []bgp.Peer {
	node := labels.Set{}
	if object, found, err := b.nodes.GetByKey(b.Node); err == nil && found {
		if n, ok := object.(*corev1.Node); ok {
			node = n.Labels
		}
	}
	b.peers.mu.Lock()
	defer b.peers.mu.Unlock()
	peers, err := bgp.Selected(slices.Concat(b.Peers, b.peers.config.Peers), node)
	var problems []string
	if err != nil {
		problems = append(problems, err.Error())
	}
	out := slices.DeleteFunc(peers, func(p bgp.Peer) bool {
		_, known := b.peers.passwords[p.PasswordKey]
		if p.PasswordKey != "" && !known {
			problems = append(problems, fmt.Sprintf("peer %s: passwordKey: the Secret %s/%s has no key %s, or can't be read", p.Address, Namespace, PasswordsName, p.PasswordKey))
		}
		return p.PasswordKey != "" && !known
	})
	for i := range out {
		if key := out[i].PasswordKey; key != "" {
			out[i].Password = b.peers.passwords[key]
		}
	}
	if text := strings.Join(problems, "; "); text != b.peers.reported {
		b.peers.reported = text
		if text != "" {
			b.Log.Error("BGP peers not used", "err", text)
		}
	}
	return out
}

// routes are the addresses that this node may serve, with what their pools say.
func (b *Balancer) routes() (out []bgp.Route) {
	b.mu.Lock()
	pools := b.pools
	b.mu.Unlock()
	b.peers.mu.Lock()
	attributes := b.peers.config.Pools
	b.peers.mu.Unlock()
	for _, a := range b.addresses() {
		if !a.Eligible(b.Node) {
			continue
		}
		r := bgp.Route{Addr: a.Addr}
		if p := pools.Of(a.Addr); p != nil {
			r.Attributes = attributes[p.Name]
		}
		if !r.HashByClient && b.sticky(a.Addr) {
			r.Metric = bgp.Metric(a.Addr, b.Node)
		}
		out = append(out, r)
	}
	return out
}

// sticky says whether a Service at an address wants all connections of a client at one endpoint. Nodes know nothing of each other's clients, so
// these have to come in by one node.
func (b *Balancer) sticky(a netip.Addr) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.ContainsFunc(b.published[a], func(key string) bool {
		object, found, err := b.services.GetByKey(key)
		svc, ok := object.(*corev1.Service)
		return err == nil && found && ok && svc.Spec.SessionAffinity == corev1.ServiceAffinityClientIP && shows(svc, a)
	})
}
