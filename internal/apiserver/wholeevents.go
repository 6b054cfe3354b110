package apiserver

import (
	"net/http"
	"sync"

	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/endpoints/responsewriter"
)

// wholeEvents is how much of a watch's events is sent as one piece.
const wholeEvents = 32 << 10

// withWholeEvents sends the events of a watch in as few pieces as possible. The library writes an event's length and the event,
// and net/http makes frames of 4 kB of that: each is a record of TLS, a system call and a change of goroutines, thousands of
// times where thousands watch, and each wakes the client.
func withWholeEvents(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if info, ok := request.RequestInfoFrom(r.Context()); !ok || info.Verb != "watch" {
			next.ServeHTTP(w, r)
			return
		}
		whole := &eventWriter{ResponseWriter: w}
		defer whole.send()
		next.ServeHTTP(responsewriter.WrapForHTTP1Or2(whole), r)
	})
}

// eventWriter keeps what is written until it is flushed, or more than wholeEvents.
type eventWriter struct {
	http.ResponseWriter
	held *[]byte // nil: nothing
	err  error   // of sending
}

// eventBuffers are those of watches that are being written to: most have nothing to send most of the time.
var eventBuffers = sync.Pool{New: func() any { return new([]byte) }}

func (w *eventWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w *eventWriter) Write(p []byte) (int, error) {
	if w.held != nil && len(*w.held)+len(p) > wholeEvents {
		w.send()
	}
	if w.err != nil {
		return 0, w.err
	}
	if w.held == nil && len(p) > wholeEvents {
		return w.ResponseWriter.Write(p)
	}
	if w.held == nil {
		w.held = eventBuffers.Get().(*[]byte)
	}
	*w.held = append(*w.held, p...)
	return len(p), nil
}

// Flush sends what is held, and has the connection send it at once.
func (w *eventWriter) Flush() {
	w.send()
	if f, ok := w.ResponseWriter.(http.Flusher); ok {
		f.Flush()
	}
}

// send writes what is held. After an error nothing promises that the connection no longer reads the buffer, so it is not used again.
func (w *eventWriter) send() {
	if w.held == nil {
		return
	}
	held := w.held
	w.held = nil
	if _, err := w.ResponseWriter.Write(*held); err != nil {
		w.err = err
		return
	}
	*held = (*held)[:0]
	eventBuffers.Put(held)
}
