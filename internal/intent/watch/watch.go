// Package watch is the door through which the API comes to the node side: it lists and watches what intent is made of,
// strips each object on arrival and keeps nothing else. It survives the loss of the API server, and tells about it.
package watch

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	apiwatch "k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"

	"portal/internal/intent"
)

// Options say what to watch. Selectors are the API's label selectors; empty selects all.
type Options struct {
	Config            *rest.Config
	Sources           []intent.Source
	ServiceSelector   string // of Services, and of their slices unless they have a selector of their own
	SliceSelector     string
	NamespaceSelector string
	// Node limits the watch on nodes to one; empty: all.
	Node string
	// OnChange is called, from any goroutine, when a source is lost, comes back or has been listed.
	OnChange func(Status)
}

// Status is how a source stands with the API.
type Status struct {
	Source    intent.Source
	Listed    bool // at least once
	Connected bool
	Since     time.Time // of the last change of Connected
	Err       error     // why it is not connected
}

// Watcher feeds a Cluster.
type Watcher struct {
	cluster *intent.Cluster
	sources []*source
}

// New returns a watcher that will feed the cluster. It starts nothing.
func New(cluster *intent.Cluster, o Options) (*Watcher, error) {
	clients, err := newClients(o.Config)
	if err != nil {
		return nil, err
	}
	w := &Watcher{cluster: cluster}
	for _, s := range o.Sources {
		w.sources = append(w.sources, &source{
			resource: clients.resource(cluster, s, o), cluster: cluster, clients: clients, onChange: o.OnChange,
			status: Status{Source: s, Since: time.Now()},
		})
	}
	return w, nil
}

// Run lists and watches until the context ends.
func (w *Watcher) Run(ctx context.Context) {
	var wg sync.WaitGroup
	for _, s := range w.sources {
		wg.Go(func() { s.run(ctx) })
	}
	wg.Wait()
}

// Status returns how each source stands.
func (w *Watcher) Status() []Status {
	var out []Status
	for _, s := range w.sources {
		s.mu.Lock()
		out = append(out, s.status)
		s.mu.Unlock()
	}
	return out
}

// source lists and watches one kind of object.
type source struct {
	resource
	cluster  *intent.Cluster
	clients  *clients
	onChange func(Status)

	mu     sync.Mutex
	status Status

	version  string // resource version up to which the cluster is fed
	identity string // of the cluster that version belongs to; empty: unknown
}

const (
	// The first page is small, so that there is something to do soon. The others grow with what there is already, so that they
	// are few. Slices come in smaller ones: what they belong to is there by then, and readers can follow while they come.
	firstPage, firstSlices   = 500, 250
	pageGrowth, slicesGrowth = 1, 4
	// maxPage bounds the memory that a page takes before its objects are stripped. (Only what is listed anew, because its version
	// was compacted away meanwhile, comes all at once.)
	maxPage = 1000

	minBackoff = 50 * time.Millisecond
	// maxBackoff bounds how stale records can be once the API is back.
	maxBackoff = time.Second
	// absentFor is how long an API counts as one without a kind that not all have.
	absentFor = 5 * time.Minute
)

// errRelist: what has been seen cannot be continued; only a full list helps.
var errRelist = errors.New("the watch cannot be resumed")

func (s *source) run(ctx context.Context) {
	backoff := minBackoff
	for ctx.Err() == nil {
		began := time.Now()
		err := s.step(ctx)
		if ctx.Err() != nil {
			return
		}
		if s.optional && s.absent(err) {
			if !wait(ctx, absentFor) {
				return
			}
			continue
		}
		if err == nil || errors.Is(err, errRelist) {
			if time.Since(began) > maxBackoff {
				backoff = minBackoff
			}
		} else {
			s.set(func(st *Status) { st.Connected, st.Err = false, err })
		}
		if !wait(ctx, backoff/2+rand.N(backoff)/2) {
			return
		}
		backoff = min(2*backoff, maxBackoff)
		if err == nil {
			backoff = minBackoff
		}
	}
}

func wait(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// absent says whether an error means that the API has nothing of the kind for us. Whatever it answers, nobody waits for it.
func (s *source) absent(err error) bool {
	var answer apierrors.APIStatus
	if errors.As(err, &answer) {
		s.cluster.MarkListed(s.status.Source)
	}
	return apierrors.IsNotFound(err) || apierrors.IsForbidden(err)
}

// step makes sure that there is a version to watch from, and watches until something ends it.
func (s *source) step(ctx context.Context) error {
	if s.version != "" && !s.connected() && !s.resumable(ctx) {
		s.version = ""
	}
	if s.version == "" {
		if err := s.listAll(ctx); err != nil {
			return err
		}
	}
	err := s.watchOn(ctx)
	if errors.Is(err, errRelist) {
		s.version = ""
	}
	return err
}

func (s *source) connected() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.status.Connected
}

// resumable says whether the API that answers after a loss is the one that was lost. A server on another or a restored
// store could go on from the same version without the objects in between.
func (s *source) resumable(ctx context.Context) bool {
	identity, err := s.clients.identity(ctx)
	if err != nil || identity == "" || identity != s.identity {
		return false
	}
	list, err := s.list(ctx, metav1.ListOptions{Limit: 1})
	if err != nil {
		return false
	}
	now, err1 := strconv.ParseUint(list.GetResourceVersion(), 10, 64)
	was, err2 := strconv.ParseUint(s.version, 10, 64)
	return err1 == nil && err2 == nil && now >= was
}

// listAll lists page by page, applying each as it comes, and removes in the end what was not listed: readers never see
// an empty cluster in between.
func (s *source) listAll(ctx context.Context) error {
	identity := s.clients.beginIdentity(ctx)
	seen := map[intent.Key]struct{}{}
	first, growth := int64(firstPage), pageGrowth
	if s.status.Source == intent.EndpointSlices {
		first, growth = firstSlices, slicesGrowth
	}
	o := metav1.ListOptions{Limit: first}
	for {
		list, err := s.list(ctx, o)
		if apierrors.IsResourceExpired(err) && o.Continue != "" {
			o = metav1.ListOptions{} // the pages' version was compacted away: all at once
			clear(seen)
			continue
		}
		if err != nil {
			return fmt.Errorf("list %s: %w", s.status.Source, err)
		}
		s.each(list, func(obj runtime.Object) { seen[s.apply(obj)] = struct{}{} })
		o.Continue, o.Limit = list.GetContinue(), min(max(first, int64(len(seen)/growth)), maxPage)
		if o.Continue == "" {
			s.version, s.identity = list.GetResourceVersion(), ""
			select {
			case s.identity = <-identity:
			default: // an answer that comes later might be another cluster's
			}
			break
		}
	}
	for _, k := range s.cluster.Keys(s.status.Source) {
		if _, ok := seen[k]; !ok {
			s.remove(k)
		}
	}
	s.cluster.MarkListed(s.status.Source)
	s.set(func(st *Status) { st.Listed, st.Connected, st.Err = true, true, nil })
	return nil
}

// watchOn applies events until the watch ends. Its error is nil when the server ended it in the usual way.
func (s *source) watchOn(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	timeout := int64(300 + rand.IntN(300))
	events, err := s.watch(ctx, metav1.ListOptions{
		ResourceVersion: s.version, AllowWatchBookmarks: true, TimeoutSeconds: &timeout,
	})
	if err != nil {
		return watchError(err)
	}
	defer events.Stop()
	s.set(func(st *Status) { st.Connected, st.Err = true, nil })
	began, some := time.Now(), false
	for event := range events.ResultChan() {
		some = true
		switch event.Type {
		case apiwatch.Error:
			return watchError(apierrors.FromObject(event.Object))
		case apiwatch.Added, apiwatch.Modified:
			s.apply(event.Object)
		case apiwatch.Deleted:
			s.remove(s.key(event.Object))
		}
		if m, ok := event.Object.(metav1.Object); ok && m.GetResourceVersion() != "" {
			s.version = m.GetResourceVersion()
		}
	}
	if !some && time.Since(began) < time.Second {
		return errors.New("the watch ended at once")
	}
	return s.ended(ctx)
}

// ended tells a server that ended a watch in the usual way from one that went away: only the former still answers.
func (s *source) ended(ctx context.Context) error {
	if _, err := s.clients.identity(ctx); err != nil {
		return fmt.Errorf("watch %s: %w", s.status.Source, err)
	}
	return nil
}

// watchError tells errors after which only a new list helps from those after which the watch may be tried again.
func watchError(err error) error {
	if apierrors.IsResourceExpired(err) || apierrors.IsGone(err) || apierrors.IsInternalError(err) ||
		apierrors.HasStatusCause(err, metav1.CauseTypeResourceVersionTooLarge) {
		return fmt.Errorf("%w: %v", errRelist, err)
	}
	return err
}

// set changes the status and tells of it where it matters.
func (s *source) set(change func(*Status)) {
	s.mu.Lock()
	before := s.status
	change(&s.status)
	if before.Connected != s.status.Connected {
		s.status.Since = time.Now()
	}
	now := s.status
	s.mu.Unlock()
	if s.onChange != nil && (before.Connected != now.Connected || before.Listed != now.Listed || before.Err == nil && now.Err != nil) {
		s.onChange(now)
	}
}
