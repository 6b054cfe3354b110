package virtual

import (
	"encoding/binary"
	"maps"
	"net/netip"
	"strings"

	"golang.org/x/sys/unix"

	"portal/internal/proxy/nf"
)

// The kernel's numbers, from linux/ip_vs.h: commands, and the attributes of each level.
const (
	newService, setService, delService, getService = 1, 2, 3, 4
	newDest, setDest, delDest, getDest             = 5, 6, 7, 8
	setConfig, flush                               = 12, 17

	attrService, attrDest                             = 1, 2
	attrTimeoutTCP, attrTimeoutTCPFin, attrTimeoutUDP = 4, 5, 6

	svcFamily, svcProtocol, svcAddr, svcPort, svcMark = 1, 2, 3, 4, 5
	svcScheduler, svcFlags, svcTimeout, svcNetmask    = 6, 7, 8, 9

	destAddr, destPort, destForward, destWeight = 1, 2, 3, 4
	destUpper, destLower                        = 5, 6
	destActive, destInactive, destFamily        = 7, 8, 11
)

// request begins with the header of generic netlink: command, version, reserved.
func request(command byte, attrs []byte) []byte {
	return append([]byte{command, 1, 0, 0}, attrs...)
}

// appendServer writes all about a virtual server, as changes need it; to name one, the kernel reads what is the key.
func appendServer(b []byte, s Server) []byte {
	a := appendUint16(nil, svcFamily, s.Family)
	if s.Mark != 0 {
		a = appendUint32(a, svcMark, s.Mark)
	} else {
		a = appendUint16(a, svcProtocol, s.Protocol)
		a = nf.AppendAttr(a, svcAddr, s.Addr.AsSlice())
		a = appendPort(a, svcPort, s.Port)
	}
	a = nf.AppendAttr(a, svcScheduler, append([]byte(s.Scheduler), 0))
	// The flags, and which of them are meant: all.
	a = nf.AppendAttr(a, svcFlags, binary.NativeEndian.AppendUint32(binary.NativeEndian.AppendUint32(nil, s.Flags), ^uint32(0)))
	a = appendUint32(a, svcTimeout, 0)
	// One client is one address: a mask for IPv4, the length of a prefix for IPv6.
	netmask := ^uint32(0)
	if s.Family == unix.AF_INET6 {
		netmask = 128
	}
	return nf.AppendAttr(b, attrService, appendUint32(a, svcNetmask, netmask))
}

// appendDest writes all about an endpoint. Packets are rewritten on their way to it (masquerading, 0).
func appendDest(b []byte, d Dest) []byte {
	a := nf.AppendAttr(nil, destAddr, d.Addr.Addr().AsSlice())
	a = appendPort(a, destPort, d.Addr.Port())
	a = appendUint32(a, destForward, 0)
	a = appendUint32(a, destWeight, uint32(d.Weight))
	a = appendUint32(a, destUpper, 0)
	return nf.AppendAttr(b, attrDest, appendUint32(a, destLower, 0))
}

func appendUint16(b []byte, typ, v uint16) []byte {
	return nf.AppendAttr(b, typ, binary.NativeEndian.AppendUint16(nil, v))
}

func appendUint32(b []byte, typ uint16, v uint32) []byte {
	return nf.AppendAttr(b, typ, binary.NativeEndian.AppendUint32(nil, v))
}

func appendPort(b []byte, typ, port uint16) []byte {
	return nf.AppendAttr(b, typ, binary.BigEndian.AppendUint16(nil, port))
}

// attrs are attributes by type. One that is missing, or too short, reads as zero.
type attrs map[uint16][]byte

func attributes(b []byte) attrs { return maps.Collect(nf.Attributes(b)) }

func (a attrs) uint16(typ uint16) uint16 {
	if v := a[typ]; len(v) >= 2 {
		return binary.NativeEndian.Uint16(v)
	}
	return 0
}

func (a attrs) uint32(typ uint16) uint32 {
	if v := a[typ]; len(v) >= 4 {
		return binary.NativeEndian.Uint32(v)
	}
	return 0
}

func (a attrs) port(typ uint16) uint16 {
	if v := a[typ]; len(v) >= 2 {
		return binary.BigEndian.Uint16(v)
	}
	return 0
}

func (a attrs) text(typ uint16) string { return strings.TrimRight(string(a[typ]), "\x00") }

// addr reads an address, which has room for the longer ones.
func (a attrs) addr(typ, family uint16) netip.Addr {
	v := a[typ]
	switch {
	case family == unix.AF_INET && len(v) >= 4:
		return netip.AddrFrom4([4]byte(v))
	case family == unix.AF_INET6 && len(v) >= 16:
		return netip.AddrFrom16([16]byte(v))
	}
	return netip.Addr{}
}
