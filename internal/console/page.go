package console

import (
	"context"
	"encoding/json"
	"net/http"
	"sync"

	"k8s.io/client-go/kubernetes"
)

// version says which changes what was built from a feed and a page has in it. It is compared before anything is built, because a Service
// can have many endpoints, and not all that wakes its page shows there.
type version struct{ feed, page uint64 }

// changes are closed at the next change of a feed that shows on a Service's page, and of the page. Changes of other Services, which
// are most, wake nobody.
type changes struct{ feed, page <-chan struct{} }

func (p *page) version(f *feed, k key) (at version, next changes) {
	at.feed, next.feed = f.versionOf(k)
	p.mu.Lock()
	defer p.mu.Unlock()
	at.page, next.page = p.revision, p.changed
	return at, next
}

// versionOf is the revision of the last change that shows on a Service's page.
func (f *feed) versionOf(k key) (uint64, <-chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.versions++
	next := f.shown[k]
	if next == nil {
		next = make(chan struct{})
		f.shown[k] = next
	}
	at := max(f.statusRev, f.nodesRev)
	if e := f.services[k]; e != nil && e.svc != nil {
		return max(at, e.revision), next
	}
	return max(at, f.goneServices[k], f.forgotten), next
}

// build makes what a page shows.
func (p *page) build(f *feed, k key) Detail {
	out := f.detail(k)
	p.add(&out)
	return out
}

// streamService sends all about one Service, whenever something of it changes.
func (c *Console) streamService(w http.ResponseWriter, r *http.Request, s *session) {
	k := key{r.PathValue("namespace"), r.PathValue("name")}
	c.stream(w, r, s, func(ctx context.Context, f *feed, to *events) error {
		client, err := kubernetes.NewForConfig(f.config)
		if err != nil {
			return err
		}
		ctx, stop := context.WithCancel(ctx)
		var group sync.WaitGroup
		defer group.Wait()
		defer stop()
		p := newPage()
		group.Go(func() { p.look(ctx, f, client, k, &group) })
		if c.opts.Findings != nil {
			group.Go(func() { p.find(ctx, c, s, f, k) })
		}
		f.awaitLists(ctx)
		return together(ctx, func(ctx context.Context) error { return p.show(ctx, to, f, k) },
			func(ctx context.Context) error { return s.account.traffic.stream(ctx, to, f, &k) })
	})
}

// show sends a page's details until ctx ends.
func (p *page) show(ctx context.Context, to *events, f *feed, k key) error {
	var (
		shown version
		data  []byte
	)
	return pump(ctx, to, "detail", func() (_ []byte, _ <-chan struct{}, err error) {
		now, next := p.version(f, k)
		if data == nil || now != shown {
			shown = now
			data, err = json.Marshal(p.build(f, k))
		}
		return data, either(ctx, next.feed, next.page), err
	})
}

// either is closed when one of two channels is, or when ctx ends.
func either(ctx context.Context, a, b <-chan struct{}) <-chan struct{} {
	out := make(chan struct{})
	go func() {
		defer close(out)
		select {
		case <-a:
		case <-b:
		case <-ctx.Done():
		}
	}()
	return out
}

// followSelector calls use with a Service's selector, and again when it is another, until ctx ends.
func (f *feed) followSelector(ctx context.Context, k key, use func(selector string)) {
	var last string
	for {
		_, changed := f.versionOf(k)
		f.mu.Lock()
		selector := ""
		if e := f.services[k]; e != nil && e.svc != nil {
			selector = selectorText(e.svc.Spec.Selector)
		}
		f.mu.Unlock()
		if selector != last {
			last = selector
			use(selector)
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
		if !sleep(ctx, coalesce) {
			return
		}
	}
}
