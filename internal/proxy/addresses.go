package proxy

import (
	"context"

	"portal/internal/hostnet"
)

// LocalAddrs knows the addresses of this machine.
type LocalAddrs interface {
	List() (hostnet.Addresses, error)
	// Changes receives when they may have changed, until the context ends.
	Changes(context.Context) <-chan struct{}
}
