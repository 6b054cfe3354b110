package web

import (
	"io"
	"time"

	"portal/internal/lb/web/wire"
)

// pump sends a request's body while the response may already be coming.
type pump struct {
	done chan struct{}
	// What follows is for others after done.
	complete bool  // all of it was sent
	client   bool  // the client's side failed, with err
	err      error // of either side
}

func (p *pump) clientFailed() bool {
	select {
	case <-p.done:
		return p.client
	default:
		return false
	}
}

// startPump sends the body from another goroutine. What is in the client's buffer is no longer good from here on.
func (x *exchange) startPump(e *endpointConn) {
	p := &pump{done: make(chan struct{})}
	x.pump = p
	x.watch.beginBody(false)
	chunked := x.req.Length < 0
	go func() {
		p.run(x, e, chunked)
		x.watch.bodySince.Store(0)
		// Closed first, so that whoever reads from the endpoint knows why the read ended.
		close(p.done)
		if p.client {
			// The endpoint will never get the whole request.
			e.nc.SetDeadline(past)
		}
	}()
}

func (p *pump) run(x *exchange, e *endpointConn, chunked bool) {
	var out []byte
	if chunked {
		buf := takeBuffer()
		defer giveBuffer(buf)
		out = buf[:0]
	}
	for {
		piece, err := x.nextPiece()
		switch {
		case err == io.EOF:
			if chunked {
				_, p.err = e.nc.Write(wire.AppendLastChunk(out[:0], x.body.trailer()))
			}
			p.complete = p.err == nil
			// From here on it is the endpoint that is waited for.
			x.watch.refresh(phaseWaiting)
			return
		case err != nil:
			p.client, p.err = true, err
			return
		}
		x.watch.bodyBytes.Add(int64(len(piece)))
		x.watch.progress()
		if chunked {
			out = wire.AppendChunk(out[:0], piece)
			piece = out
		}
		if _, p.err = e.nc.Write(piece); p.err != nil {
			return
		}
		if !chunked && x.body.Done() {
			p.complete = true
			x.watch.refresh(phaseWaiting)
			return
		}
	}
}

// stopPump ends the pump, if the response ended before the request did.
func (x *exchange) stopPump(e *endpointConn) {
	p := x.pump
	if p == nil {
		return
	}
	select {
	case <-p.done:
	case <-time.After(pumpGrace):
		x.body.interrupt()
		e.nc.SetDeadline(past)
		<-p.done
	}
	x.closing = x.closing || !p.complete
}

// pumpGrace is how long a body may go on after its response: the endpoint has perhaps read it all, and the pump's goroutine not yet run.
const pumpGrace = 50 * time.Millisecond
