package live

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/intent"
	"portal/internal/proxy/nf"
)

// watcher has the kernel trace one flow. Both sockets are of one network namespace.
type watcher struct {
	owner *nf.Socket
	fd    int
	name  string
}

const (
	// first is before all chains of others: conntrack and raw begin at -300.
	first = -500
	// settle is how long the kernel's messages about a packet may come after its answer.
	settle = 200 * time.Millisecond
)

// watch begins to trace a flow in the calling thread's network namespace.
func watch(from, to netip.AddrPort, p intent.Protocol) (_ *watcher, err error) {
	w := &watcher{fd: -1, name: fmt.Sprintf("portal-trace-%d", os.Getpid())}
	defer func() {
		if err != nil {
			w.close()
		}
	}()
	if w.fd, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_NETFILTER); err != nil {
		return nil, fmt.Errorf("listen to the kernel's trace: %w", err)
	}
	if err := unix.Bind(w.fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: 1 << (nf.TraceGroup - 1)}); err != nil {
		return nil, fmt.Errorf("listen to the kernel's trace: %w", err)
	}
	if w.owner, err = nf.Dial(); err != nil {
		return nil, fmt.Errorf("open nf_tables: %w", err)
	}
	family := nf.IPv4
	if to.Addr().Is6() {
		family = nf.IPv6
	}
	table := &nf.Table{Family: family.Family, Name: w.name, Comment: "portal trace: goes with its process", Owned: true}
	rule := nf.Concat(nf.IsProto(byte(p)), nf.Rule{
		family.Source(nf.Reg0), nf.Cmp{Reg: nf.Reg0, Data: family.AppendAddr(nil, from.Addr())},
		family.Destination(nf.Reg0), nf.Cmp{Reg: nf.Reg0, Data: family.AppendAddr(nil, to.Addr())},
		nf.Payload{Dst: nf.Reg0, Base: unix.NFT_PAYLOAD_TRANSPORT_HEADER, Offset: 0, Len: 2}, nf.Cmp{Reg: nf.Reg0, Data: binary.BigEndian.AppendUint16(nil, from.Port())},
		nf.DestinationPort(nf.Reg0), nf.Cmp{Reg: nf.Reg0, Data: binary.BigEndian.AppendUint16(nil, to.Port())},
		nf.Immediate{Dst: nf.Reg0, Data: []byte{1}}, nf.Meta{Key: unix.NFT_META_NFTRACE, Src: nf.Reg0},
	})
	err = w.owner.Sync(func(b *nf.Batch) error {
		b.Replace(table, nil)
		for name, hook := range map[string]uint32{"prerouting": unix.NF_INET_PRE_ROUTING, "output": unix.NF_INET_LOCAL_OUT} {
			b.AddChain(table, nf.Chain{Name: name, Hook: nf.Hook{Type: "filter", Point: hook, Priority: first}, Rules: []nf.Rule{rule}})
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("have the kernel trace the packet: %w", err)
	}
	return w, nil
}

// close ends it: the table goes with its socket.
func (w *watcher) close() {
	if w.owner != nil {
		_ = w.owner.Close()
	}
	if w.fd >= 0 {
		_ = unix.Close(w.fd)
	}
}

// read returns the rules that were met so far. It ends also if messages never do: others may have packets of their own traced.
func (w *watcher) read() (out []nf.Traced, err error) {
	buf := make([]byte, 64<<10)
	for until := time.Now().Add(settle); time.Now().Before(until); {
		n, _, err := unix.Recvfrom(w.fd, buf, 0)
		switch {
		case errors.Is(err, unix.EAGAIN):
			if err := poll(w.fd, unix.POLLIN, until); errors.Is(err, os.ErrDeadlineExceeded) {
				return out, nil
			}
			continue
		case errors.Is(err, unix.EINTR), errors.Is(err, unix.ENOBUFS):
			continue
		case err != nil:
			return out, fmt.Errorf("read the kernel's trace: %w", err)
		}
		for m := range nf.Messages(buf[:n]) {
			// The end of a chain comes twice, the second time with what its policy says.
			if r, ok := nf.ReadTraced(m); ok && r.Table != w.name && (r.Handle != 0 || r.Verdict != "continue") {
				out = append(out, r)
			}
		}
	}
	return out, nil
}
