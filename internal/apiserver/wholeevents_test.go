package apiserver

import (
	"bytes"
	"errors"
	"net/http"
	"net/http/httptest"
	"testing"

	"k8s.io/apiserver/pkg/endpoints/request"
)

// pieces remembers what is written at a time.
type pieces struct {
	*httptest.ResponseRecorder
	sizes []int
	fails bool
	kept  []byte // what could not be written
}

func (p *pieces) CloseNotify() <-chan bool { return nil }

func (p *pieces) Write(b []byte) (int, error) {
	if p.fails {
		p.kept = b
		return 0, errors.New("closed")
	}
	p.sizes = append(p.sizes, len(b))
	return p.ResponseRecorder.Write(b)
}

// serveEvents has a handler write an answer to a request of a verb.
func serveEvents(to *pieces, verb string, write func(http.ResponseWriter)) {
	r := httptest.NewRequest(http.MethodGet, "/api/v1/services", nil)
	r = r.WithContext(request.WithRequestInfo(r.Context(), &request.RequestInfo{Verb: verb}))
	withWholeEvents(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { write(w) })).ServeHTTP(to, r)
}

// TestWholeEvents: the parts of events that are flushed together are one piece, large ones are not copied, and nothing is lost
// or reordered.
func TestWholeEvents(t *testing.T) {
	t.Parallel()
	var want bytes.Buffer
	write := func(w http.ResponseWriter, size int, fill byte) {
		part := bytes.Repeat([]byte{fill}, size)
		want.Write(part)
		if n, err := w.Write(part); n != size || err != nil {
			t.Errorf("a part of %d bytes: %d, %v", size, n, err)
		}
	}
	to := &pieces{ResponseRecorder: httptest.NewRecorder()}
	serveEvents(to, "watch", func(w http.ResponseWriter) {
		flush := w.(http.Flusher).Flush
		flush() // the header
		write(w, 4, 'a')
		write(w, 9000, 'b')
		flush()
		flush()
		write(w, 4, 'c')
		write(w, 100, 'd')
		write(w, 4, 'e')
		write(w, 2*wholeEvents, 'f')
		flush()
		write(w, 7, 'g') // not flushed
	})
	if got := to.sizes; len(got) != 4 || got[0] != 9004 || got[1] != 108 || got[2] != 2*wholeEvents || got[3] != 7 {
		t.Errorf("pieces of %d bytes, want 9004, 108, %d and 7", got, 2*wholeEvents)
	}
	if !bytes.Equal(to.Body.Bytes(), want.Bytes()) {
		t.Error("what arrived differs from what was written")
	}
	if !to.Flushed {
		t.Error("was not flushed")
	}
}

// TestOtherAnswersAreNotHeld: only watches flush.
func TestOtherAnswersAreNotHeld(t *testing.T) {
	t.Parallel()
	to := &pieces{ResponseRecorder: httptest.NewRecorder()}
	serveEvents(to, "list", func(w http.ResponseWriter) {
		_, _ = w.Write([]byte("one"))
		if len(to.sizes) != 1 {
			t.Error("a list was held back")
		}
	})
}

// TestWatchOfClientThatLeft: the handler gets the error with the next event, and what the connection may still be sending stays as it is.
func TestWatchOfClientThatLeft(t *testing.T) {
	t.Parallel()
	to := &pieces{ResponseRecorder: httptest.NewRecorder(), fails: true}
	serveEvents(to, "watch", func(w http.ResponseWriter) {
		_, _ = w.Write([]byte("one"))
		w.(http.Flusher).Flush()
		if _, err := w.Write([]byte("two")); err == nil {
			t.Error("an event could be written after one had failed")
		}
	})
	serveEvents(&pieces{ResponseRecorder: httptest.NewRecorder()}, "watch", func(w http.ResponseWriter) { _, _ = w.Write([]byte("two")) })
	if got := string(to.kept); got != "one" {
		t.Errorf("the connection sends %q, want what it was given", got)
	}
}
