package web

import (
	"io"
	"net/http"
	"sync"
)

// bodyReader is a request's body for the library, which reads it from a goroutine of its own, and what ends the request.
type bodyReader struct {
	x        *exchange
	owner    *endpointConns
	cancel   func()
	declared http.Header

	mu     sync.Mutex
	piece  []byte
	begun  bool
	closed bool
	failed error // of the client's side
	reads  sync.Mutex
}

func (b *bodyReader) Read(p []byte) (int, error) {
	b.reads.Lock()
	defer b.reads.Unlock()
	b.mu.Lock()
	closed, first := b.closed, !b.begun
	if !closed {
		b.begun = true
	}
	b.mu.Unlock()
	if closed {
		return 0, io.ErrClosedPipe
	}
	x := b.x
	if first {
		// Messages of gRPC come when there is something to say, and a call that streams them may be answered only at its end.
		x.watch.beginBody(x.grpc)
	}
	if len(b.piece) == 0 {
		piece, err := x.nextPiece()
		if err == io.EOF {
			x.watch.bodySince.Store(0)
			x.watch.refresh(phaseWaiting)
			for _, f := range x.body.trailer() {
				if name := canonical(f.Name); b.declared != nil {
					b.declared[name] = append(b.declared[name], string(f.Value))
				}
			}
			return 0, io.EOF
		}
		if err != nil {
			x.watch.bodySince.Store(0)
			b.mu.Lock()
			if !b.closed {
				b.failed = err
			}
			b.mu.Unlock()
			return 0, err
		}
		x.watch.bodyBytes.Add(int64(len(piece)))
		x.watch.progress()
		b.piece = piece
	}
	n := copy(p, b.piece)
	b.piece = b.piece[n:]
	return n, nil
}

// clientFailed says whether the rest can't be had from the client.
func (b *bodyReader) clientFailed() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.failed != nil
}

// abort ends the request. The library does not look at the context while it waits for the body.
func (b *bodyReader) abort() {
	b.stop()
	b.cancel()
}

// stop has one who reads return, without waiting for that.
func (b *bodyReader) stop() {
	b.mu.Lock()
	was := b.closed
	b.closed = true
	begun := b.begun
	b.mu.Unlock()
	if begun && !was && !b.x.bodyDone(b) {
		b.x.body.interrupt()
	}
}

// Close stops reading: nobody reads any more when it returns.
func (b *bodyReader) Close() error {
	b.stop()
	b.reads.Lock()
	b.x.watch.bodySince.Store(0)
	b.reads.Unlock()
	return nil
}

// bodyDone says whether all of the body was read, without waiting for one who reads.
func (x *exchange) bodyDone(b *bodyReader) bool {
	if !b.reads.TryLock() {
		return false
	}
	defer b.reads.Unlock()
	return x.body.Done()
}
