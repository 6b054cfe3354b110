package lb

import (
	"context"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"
)

// names keeps what the names of ExternalName Services resolve to.
type names struct {
	changed func()

	mu     sync.Mutex
	wanted []string
	found  map[string][]netip.Addr
	wake   chan struct{}
}

const (
	// resolveInterval is how often names are resolved again: Go's resolver does not say how long an answer holds.
	resolveInterval = 15 * time.Second
	resolveTimeout  = 5 * time.Second
)

// want says which names matter.
func (n *names) want(list []string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if slices.Equal(n.wanted, list) {
		return
	}
	n.wanted = list
	for name := range n.found {
		if !slices.Contains(list, name) {
			delete(n.found, name)
		}
	}
	if n.wake != nil {
		select {
		case n.wake <- struct{}{}:
		default:
		}
	}
}

// get is what a name was last resolved to.
func (n *names) get(name string) (addrs []netip.Addr, known bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	addrs, known = n.found[name]
	return addrs, known
}

func (n *names) run(ctx context.Context) {
	wake := make(chan struct{}, 1)
	n.mu.Lock()
	n.wake = wake
	n.mu.Unlock()
	again := time.NewTicker(resolveInterval)
	defer again.Stop()
	for {
		n.mu.Lock()
		list := n.wanted
		n.mu.Unlock()
		var resolving sync.WaitGroup
		for _, name := range list {
			resolving.Go(func() { n.resolve(ctx, name) })
		}
		resolving.Wait()
		select {
		case <-ctx.Done():
			return
		case <-wake:
		case <-again.C:
		}
	}
}

// resolve asks for one name. While no server answers, what was known holds.
func (n *names) resolve(ctx context.Context, name string) {
	ctx, cancel := context.WithTimeout(ctx, resolveTimeout)
	defer cancel()
	addrs, err := net.DefaultResolver.LookupNetIP(ctx, "ip", name+".")
	missing, ok := err.(*net.DNSError)
	if err != nil && !(ok && missing.IsNotFound) {
		return
	}
	for i := range addrs {
		addrs[i] = addrs[i].Unmap()
	}
	slices.SortFunc(addrs, netip.Addr.Compare)
	n.mu.Lock()
	before, known := n.found[name]
	if n.found[name] = addrs; !slices.Contains(n.wanted, name) {
		delete(n.found, name)
	}
	n.mu.Unlock()
	if !known || !slices.Equal(before, addrs) {
		n.changed()
	}
}
