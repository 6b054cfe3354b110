package nf

import (
	"encoding/binary"
	"fmt"

	"golang.org/x/sys/unix"
)

// Traced is a rule that a packet met for which tracing is on (meta nftrace), or the end of a chain.
type Traced struct {
	Table string `json:"table"`
	Chain string `json:"chain"`
	// Handle is the rule's, as `nft -a list ruleset` shows it; 0: the end of the chain.
	Handle  uint64 `json:"handle,omitempty"`
	Verdict string `json:"verdict"`
}

func (t Traced) String() string {
	if t.Handle == 0 {
		return fmt.Sprintf("table %s chain %s ends: %s", t.Table, t.Chain, t.Verdict)
	}
	return fmt.Sprintf("table %s chain %s rule %d: %s", t.Table, t.Chain, t.Handle, t.Verdict)
}

// TraceGroup is the multicast group of netlink that trace messages are sent to.
const TraceGroup = 9 // NFNLGRP_NFTRACE

// Attributes of trace messages.
const (
	traceTable, traceChain, traceHandle, traceType, traceVerdict, tracePolicy = 1, 2, 3, 4, 5, 16
	tracePolicyType                                                           = 1 // NFT_TRACETYPE_POLICY
	verdictCode, verdictChain                                                 = 1, 2
)

// ReadTraced reads a trace message; false: it is another.
func ReadTraced(m Message) (t Traced, ok bool) {
	const header = 4 // struct nfgenmsg
	if m.Type != unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_TRACE || len(m.Body) < header {
		return t, false
	}
	attrs := m.Body[header:]
	t.Table, t.Chain = attrString(attrs, traceTable), attrString(attrs, traceChain)
	if h := attr(attrs, traceHandle); len(h) == 8 {
		t.Handle = binary.BigEndian.Uint64(h)
	}
	verdict := attr(attrs, traceVerdict)
	code := int32(attrUint32(verdict, verdictCode))
	if attrUint32(attrs, traceType) == tracePolicyType {
		code = int32(attrUint32(attrs, tracePolicy))
	}
	switch code {
	case unix.NFT_JUMP:
		t.Verdict = "jump " + attrString(verdict, verdictChain)
	case unix.NFT_GOTO:
		t.Verdict = "goto " + attrString(verdict, verdictChain)
	case unix.NFT_RETURN:
		t.Verdict = "return"
	case unix.NFT_CONTINUE:
		t.Verdict = "continue"
	case 0: // NF_DROP
		t.Verdict = "drop"
	default:
		t.Verdict = "accept"
	}
	return t, t.Table != ""
}
