package node

// Summary is how an agent is.
type Summary struct {
	// Ready: it can run Pods.
	Ready bool
	// Network is why Pods can't be connected, Disk why no more Pods are taken; empty if all is well.
	Network, Disk string
}

// Summary returns how the agent is.
func (a *Agent) Summary() Summary {
	out := Summary{Ready: a.ready(), Network: a.connections.problem()}
	if why, on := a.diskPressure(); on {
		out.Disk = why
	}
	return out
}
