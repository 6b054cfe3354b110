package lb

// Summary is how a balancer is.
type Summary struct {
	// Ready: the first lists are in.
	Ready bool
	// Services is how many have an address.
	Services int
	// Problem is what of its configuration can't be used, or what is not in sync; empty if all is well.
	Problem string
}

// Summary returns how the balancer is.
func (b *Balancer) Summary() Summary {
	out := Summary{Ready: b.Ready()}
	b.mu.Lock()
	services := map[string]bool{}
	for _, names := range b.published {
		for _, name := range names {
			services[name] = true
		}
	}
	out.Services = len(services)
	if b.poolsErr != nil {
		out.Problem = "the pools in the ConfigMap " + Namespace + "/" + PoolsName + " can't be used: " + b.poolsErr.Error()
	}
	b.mu.Unlock()
	if b.speaker != nil && out.Problem == "" {
		b.peers.mu.Lock()
		if b.peers.err != nil {
			out.Problem = "the BGP peers in the ConfigMap " + Namespace + "/" + PoolsName + " can't be used: " + b.peers.err.Error()
		}
		b.peers.mu.Unlock()
		sessions, _ := b.speaker.Status()
		for _, s := range sessions {
			if !s.Up && out.Problem == "" {
				out.Problem = "there is no BGP session with " + s.Peer.String()
			}
		}
	}
	if b.Balancing != nil && out.Problem == "" {
		b.balancing.mu.Lock()
		if b.balancing.stats.failing {
			out.Problem = "the balancing process, or what leads packets to it, is not in sync"
		}
		b.balancing.mu.Unlock()
	}
	return out
}
