package web

import (
	"encoding/binary"
	"fmt"
	"net"
	"time"

	"golang.org/x/net/http2"

	"portal/internal/lb/web/wire"
)

// floodWindow is what the limits of frames are for.
const floodWindow = 10 * time.Second

// floodLimits are how many frames of a type one client may send in a window. They cost a client nothing and the server something: a
// stream that is opened and reset at once has perhaps reached an endpoint. A client that works normally sends a fraction of these.
var floodLimits = map[http2.FrameType]int{
	http2.FrameRSTStream: 2_000,
	http2.FrameSettings:  200,
	http2.FramePing:      10_000,
	http2.FramePriority:  10_000,
	http2.FrameData:      5_000, // without any data
}

// guarded is a connection on which the client's frames are counted as they are read.
type guarded struct {
	net.Conn
	server *Server
	// preface is what is still to come of it, skip what is left of a frame's payload, header the begin of a frame.
	preface, skip int
	header        []byte
	began         int64
	counts        map[http2.FrameType]int
	flood         error
}

func newGuarded(s *Server, nc net.Conn) *guarded {
	return &guarded{Conn: nc, server: s, preface: len(wire.Preface), counts: map[http2.FrameType]int{}, header: make([]byte, 0, frameHeader)}
}

const frameHeader = 9

func (g *guarded) Read(b []byte) (int, error) {
	if g.flood != nil {
		return 0, g.flood
	}
	n, err := g.Conn.Read(b)
	if g.watch(b[:n]); g.flood != nil {
		return 0, g.flood
	}
	return n, err
}

// watch follows the frames in what was read.
func (g *guarded) watch(b []byte) {
	if g.preface > 0 {
		n := min(g.preface, len(b))
		b = b[n:]
		if g.preface -= n; g.preface == 0 {
			g.Conn.SetReadDeadline(time.Time{}) // it has come in time
		}
	}
	for len(b) > 0 && g.flood == nil {
		if g.skip > 0 {
			n := min(g.skip, len(b))
			g.skip -= n
			b = b[n:]
			continue
		}
		n := min(frameHeader-len(g.header), len(b))
		g.header = append(g.header, b[:n]...)
		b = b[n:]
		if len(g.header) == frameHeader {
			length := int(binary.BigEndian.Uint32(g.header) >> 8)
			g.count(http2.FrameType(g.header[3]), length, http2.Flags(g.header[4]))
			g.skip, g.header = length, g.header[:0]
		}
	}
}

func (g *guarded) count(kind http2.FrameType, length int, flags http2.Flags) {
	limit := floodLimits[kind]
	if limit == 0 || kind == http2.FrameData && (length > 0 || flags.Has(http2.FlagDataEndStream)) {
		return
	}
	if now := g.server.now(); now-g.began > floodWindow.Milliseconds() {
		g.began = now
		clear(g.counts)
	}
	if g.counts[kind]++; g.counts[kind] > limit {
		g.flood = fmt.Errorf("more than %d frames of type %v in %v", limit, kind, floodWindow)
	}
}
