package watch

import (
	"context"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"time"

	"k8s.io/client-go/rest"
)

// Dialed remembers where the API was reached: addresses that a name was resolved to, or a proxy's in between.
type Dialed struct {
	dial    func(ctx context.Context, network, address string) (net.Conn, error)
	changed chan struct{}

	mu   sync.Mutex
	list []netip.AddrPort // the last one last
}

// maxDialed bounds how many addresses are remembered, of an API whose addresses change.
const maxDialed = 16

// RememberDialed returns a configuration whose connections are remembered, and who remembers them.
func RememberDialed(config *rest.Config) (*rest.Config, *Dialed) {
	d := &Dialed{dial: config.Dial, changed: make(chan struct{}, 1)}
	if d.dial == nil {
		d.dial = (&net.Dialer{Timeout: 30 * time.Second, KeepAlive: 30 * time.Second}).DialContext
	}
	config = rest.CopyConfig(config)
	config.Dial = d.dialAndRemember
	// A transport of its own dials by itself, unless its dial function can be set.
	if t, ok := config.Transport.(interface {
		WithDial(func(ctx context.Context, network, address string) (net.Conn, error)) http.RoundTripper
	}); ok {
		config.Transport, config.Dial = t.WithDial(d.dialAndRemember), nil
	}
	return config, d
}

func (d *Dialed) dialAndRemember(ctx context.Context, network, address string) (net.Conn, error) {
	c, err := d.dial(ctx, network, address)
	if err != nil {
		return nil, err
	}
	if a, err := netip.ParseAddrPort(c.RemoteAddr().String()); err == nil {
		d.remember(netip.AddrPortFrom(a.Addr().Unmap().WithZone(""), a.Port()))
	}
	return c, nil
}

func (d *Dialed) remember(a netip.AddrPort) {
	d.mu.Lock()
	known := slices.Index(d.list, a)
	if known >= 0 {
		d.list = slices.Delete(d.list, known, known+1)
	}
	d.list = append(d.list, a)
	d.list = d.list[max(0, len(d.list)-maxDialed):]
	d.mu.Unlock()
	if known < 0 {
		select {
		case d.changed <- struct{}{}:
		default:
		}
	}
}

// List returns the addresses in order.
func (d *Dialed) List() []netip.AddrPort {
	d.mu.Lock()
	defer d.mu.Unlock()
	out := slices.Clone(d.list)
	slices.SortFunc(out, netip.AddrPort.Compare)
	return out
}

// Changed receives when there is a new one.
func (d *Dialed) Changed() <-chan struct{} { return d.changed }
