package bgp

import (
	"context"
	"log/slog"
	"net/netip"
	"slices"
	"sync/atomic"

	packet "github.com/osrg/gobgp/v4/pkg/packet/bgp"
)

// listener is the library's log. Its errors are passed on while it is meant to run; of the rest only that is of use which says why a session is not
// up: for an attempt that fails the library has no event.
type listener struct {
	out      slog.Handler
	stopping *atomic.Bool
	heard    func(peer netip.Addr, what string)
	attrs    []slog.Attr
}

// Enabled is for what the library may log.
func (l *listener) Enabled(context.Context, slog.Level) bool { return !l.stopping.Load() }

// Handle takes in a record.
func (l *listener) Handle(ctx context.Context, r slog.Record) error {
	if r.Level >= slog.LevelError && l.out.Enabled(ctx, r.Level) {
		return l.out.WithAttrs(l.attrs).Handle(ctx, r)
	}
	var code, subcode int64
	var failure string
	r.Attrs(func(a slog.Attr) bool {
		switch a.Key {
		case "Code":
			code = a.Value.Int64()
		case "Subcode":
			subcode = a.Value.Int64()
		case "Error":
			failure = a.Value.String()
		}
		return true
	})
	var what string
	switch r.Message {
	case "failed to connect":
		what = failure
	case "sent notification", "received notification":
		what = r.Message + ": " + packet.NewNotificationErrorCode(uint8(code), uint8(subcode)).String()
	default:
		return nil
	}
	for _, a := range l.attrs {
		if peer, err := netip.ParseAddr(a.Value.String()); a.Key == "Key" && err == nil {
			l.heard(peer, what)
		}
	}
	return nil
}

// WithAttrs keeps whose records these are.
func (l *listener) WithAttrs(attrs []slog.Attr) slog.Handler {
	next := *l
	next.attrs = slices.Concat(l.attrs, attrs)
	return &next
}

// WithGroup is not used by the library.
func (l *listener) WithGroup(string) slog.Handler { return l }
