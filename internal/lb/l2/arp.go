// Package l2 announces addresses on the links of this machine: it answers ARP requests and neighbour solicitations for them, and
// sends unsolicited announcements when it gains one. Which addresses are this machine's to announce, it does not know.
package l2

import (
	"encoding/binary"
	"errors"
	"net/netip"
)

// MAC is an Ethernet address.
type MAC [6]byte

// Broadcast is everybody on the link.
var Broadcast = MAC{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}

// ARPOp says what an ARP packet is.
type ARPOp uint16

// The operations of RFC 826.
const (
	ARPRequest ARPOp = 1
	ARPReply   ARPOp = 2
)

// ARP is an ARP packet for IPv4 over Ethernet.
type ARP struct {
	Op                   ARPOp
	SenderMAC, TargetMAC MAC
	Sender, Target       netip.Addr
}

const arpSize = 28

var errARP = errors.New("not an ARP packet for IPv4 over Ethernet")

// ParseARP reads a packet, which Ethernet may have padded.
func ParseARP(b []byte) (a ARP, err error) {
	if len(b) < arpSize || binary.BigEndian.Uint16(b) != 1 || binary.BigEndian.Uint16(b[2:]) != 0x0800 || b[4] != 6 || b[5] != 4 {
		return a, errARP
	}
	a.Op = ARPOp(binary.BigEndian.Uint16(b[6:]))
	copy(a.SenderMAC[:], b[8:])
	a.Sender = netip.AddrFrom4([4]byte(b[14:18]))
	copy(a.TargetMAC[:], b[18:])
	a.Target = netip.AddrFrom4([4]byte(b[24:28]))
	return a, nil
}

// Append appends the packet; both addresses must be IPv4.
func (a ARP) Append(b []byte) []byte {
	b = append(b, 0, 1, 8, 0, 6, 4)
	b = binary.BigEndian.AppendUint16(b, uint16(a.Op))
	b = append(b, a.SenderMAC[:]...)
	sender, target := a.Sender.As4(), a.Target.As4()
	b = append(b, sender[:]...)
	b = append(b, a.TargetMAC[:]...)
	return append(b, target[:]...)
}

// AnswerARP is the answer to a request for an address that this machine announces.
func AnswerARP(request ARP, own MAC) ARP {
	return ARP{Op: ARPReply, SenderMAC: own, Sender: request.Target, TargetMAC: request.SenderMAC, Target: request.Sender}
}

// AnnounceARP are the unsolicited packets by which all who know an address update its entry to this machine: some do so for requests only,
// others for answers only.
func AnnounceARP(a netip.Addr, own MAC) []ARP {
	return []ARP{
		{Op: ARPRequest, SenderMAC: own, Sender: a, Target: a},
		{Op: ARPReply, SenderMAC: own, Sender: a, TargetMAC: Broadcast, Target: a},
	}
}
