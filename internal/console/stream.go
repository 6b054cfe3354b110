package console

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"
)

const (
	// coalesce is how long changes are gathered before a page gets them.
	coalesce = 150 * time.Millisecond
	// pingEvery lets a page notice that nobody is there any more.
	pingEvery    = 10 * time.Second
	writeTimeout = 20 * time.Second
	// listPatience is how long a page waits for the whole before it gets what is there.
	listPatience = 3 * time.Second
)

// events writes server-sent events.
type events struct {
	mu      sync.Mutex
	to      io.Writer
	flush   func() error
	control *http.ResponseController
}

func newEvents(w http.ResponseWriter, r *http.Request) *events {
	e := &events{to: w, control: http.NewResponseController(w)}
	e.flush = e.control.Flush
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("X-Accel-Buffering", "no")
	if acceptsGzip(r) {
		w.Header().Set("Content-Encoding", "gzip")
		packed, _ := gzip.NewWriterLevel(w, gzip.BestSpeed)
		e.to = packed
		e.flush = func() error {
			if err := packed.Flush(); err != nil {
				return err
			}
			return e.control.Flush()
		}
	}
	return e
}

// send writes one event. JSON has no line breaks, so that one data line is enough.
func (e *events) send(name string, data []byte) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	// A server that can't limit a write is one of a test.
	if err := e.control.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return err
	}
	if _, err := fmt.Fprintf(e.to, "event: %s\ndata: %s\n\n", name, data); err != nil {
		return err
	}
	return e.flush()
}

// Change is what a page gets: what is new since the revision that it had.
type Change struct {
	Feed     string `json:"feed"`
	Revision uint64 `json:"rev"`
	// Reset says that the page must forget what it has.
	Reset        bool     `json:"reset,omitempty"`
	Services     []Row    `json:"services,omitempty"`
	GoneServices []string `json:"goneServices,omitempty"`
	Nodes        []Node   `json:"nodes,omitempty"`
	GoneNodes    []string `json:"goneNodes,omitempty"`
	Status       *Status  `json:"status,omitempty"`
}

// since returns what came after a revision, and what is closed at the next change.
func (f *feed) since(revision uint64) (Change, <-chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	out := Change{Feed: f.id, Revision: f.revision}
	if revision < f.forgotten || revision > f.revision {
		revision = 0
	}
	out.Reset = revision == 0
	for at := f.order.Back(); at != nil; at = at.Prev() {
		e := at.Value.(*entry)
		if e.revision <= revision {
			break
		}
		out.Services = append(out.Services, e.row)
	}
	slices.SortFunc(out.Services, func(a, b Row) int {
		return strings.Compare(a.Namespace+"/"+a.Name, b.Namespace+"/"+b.Name)
	})
	for name, node := range f.nodes {
		if f.nodeRevs[name] > revision {
			out.Nodes = append(out.Nodes, *node)
		}
	}
	slices.SortFunc(out.Nodes, func(a, b Node) int { return strings.Compare(a.Name, b.Name) })
	if !out.Reset {
		for k, at := range f.goneServices {
			if at > revision {
				out.GoneServices = append(out.GoneServices, k.namespace+"/"+k.name)
			}
		}
		for name, at := range f.goneNodes {
			if at > revision {
				out.GoneNodes = append(out.GoneNodes, name)
			}
		}
	}
	if out.Reset || f.statusRev > revision {
		status := f.status
		out.Status = &status
	}
	return out, f.changed
}

// awaitLists waits until everything was listed, a while at most.
func (f *feed) awaitLists(ctx context.Context) {
	limit := time.After(listPatience)
	for {
		f.mu.Lock()
		done, changed := f.status.Synced || f.status.AwaySince != nil, f.changed
		f.mu.Unlock()
		if done {
			return
		}
		select {
		case <-changed:
		case <-limit:
			return
		case <-ctx.Done():
			return
		}
	}
}

// stream attaches one to its session's feed. ctx ends with the stream, the console or the feed, whichever is first.
func (c *Console) stream(w http.ResponseWriter, r *http.Request, s *session, serve func(context.Context, *feed, *events) error) {
	running, err := c.context()
	if err != nil {
		refuse(w, http.StatusServiceUnavailable, "", err.Error())
		return
	}
	f, release, err := s.attach(running, c)
	if err != nil {
		refuse(w, http.StatusServiceUnavailable, "", err.Error())
		return
	}
	defer release()
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	defer context.AfterFunc(f.ended, cancel)()
	_ = serve(ctx, f, newEvents(w, r)) // it fails when the page is gone
}

// streamOverview sends all Services and nodes, and then what changes.
func (c *Console) streamOverview(w http.ResponseWriter, r *http.Request, s *session) {
	c.stream(w, r, s, func(ctx context.Context, f *feed, to *events) error {
		var revision uint64
		if feed, at, ok := strings.Cut(r.URL.Query().Get("since"), "."); ok && feed == f.id {
			_, _ = fmt.Sscan(at, &revision)
		}
		f.awaitLists(ctx)
		var parts []func(context.Context) error
		if r.URL.Query().Get("traffic") == "true" && s.account != nil {
			parts = append(parts, func(ctx context.Context) error { return s.account.traffic.stream(ctx, to, f, nil) })
		}
		return together(ctx, append(parts, func(ctx context.Context) error {
			return pump(ctx, to, "change", func() ([]byte, <-chan struct{}, error) {
				change, changed := f.since(revision)
				revision = change.Revision
				data, err := json.Marshal(change)
				return data, changed, err
			})
		})...)
	})
}

// together runs several until one of them ends, and returns when all have.
func together(ctx context.Context, all ...func(context.Context) error) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	errs := make(chan error, len(all))
	for _, one := range all {
		go func() {
			defer stop()
			errs <- one(ctx)
		}()
	}
	var first error
	for range all {
		if err := <-errs; first == nil {
			first = err
		}
	}
	return first
}

// pump sends what next returns, if it is new, and asks again when something changed.
func pump(ctx context.Context, to *events, name string, next func() ([]byte, <-chan struct{}, error)) error {
	ping := time.NewTicker(pingEvery)
	defer ping.Stop()
	var last []byte
	for {
		data, changed, err := next()
		if err != nil {
			return err
		}
		if !bytes.Equal(data, last) {
			last = data
			if err := to.send(name, data); err != nil {
				return err
			}
		}
		for waiting := true; waiting; {
			select {
			case <-changed:
				waiting = false
			case <-ping.C:
				if err := to.send("ping", []byte("{}")); err != nil {
					return err
				}
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		select {
		case <-time.After(coalesce):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
