// Package watch connects the node side with the API: it lists and watches what intent is made of,
// strips each object on arrival and keeps nothing else. It survives the loss of the API server, and tells about it.
package watch

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync"
	"sync/atomic"
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

// Revision is the newest resource version up to which a source has fed the cluster; 0 before the first list, and with an API whose versions
// are no numbers.
func (w *Watcher) Revision() uint64 {
	var out uint64
	for _, s := range w.sources {
		out = max(out, s.fed.Load())
	}
	return out
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

	fed      atomic.Uint64 // version as a number, for others to read
	version  string        // resource version up to which the cluster is fed; empty: it has to be listed
	identity string        // of the cluster that version belongs to; empty: unknown
	// fresh is the version that a list must not be older than: "0" takes whatever the watch cache has, "" reads from the store.
	fresh string
}

const (
	// pageLimit bounds a page where the API has no watch cache. From the cache everything comes at once.
	pageLimit = 1000

	minBackoff = 50 * time.Millisecond
	// maxBackoff keeps a fleet of nodes from overrunning an API that comes back.
	maxBackoff = 30 * time.Second
	// healthyAfter is how long a watch must last for the next failure to begin with the shortest backoff.
	healthyAfter = 10 * time.Second
	// absentFor is how long an API counts as one without a kind that not all have.
	absentFor = 5 * time.Minute
	// identityPatience is how long after a list the answer to who the cluster is may come, which was asked for before.
	identityPatience = 2 * time.Second
	// verifyTimeout bounds how long a source waits for the API to say whether it knows the version.
	verifyTimeout = 10 * time.Second
)

var (
	// errRelist: what has been seen cannot be continued, because history has been compacted; only a full list helps.
	errRelist = errors.New("the watch cannot be resumed")
	// errStartOver: what has been seen does not belong to this API's history: it is another cluster, or was restored from a backup.
	errStartOver = errors.New("the API's history is another one")
)

func (s *source) run(ctx context.Context) {
	s.fresh = "0"
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
		if err != nil && !errors.Is(err, errRelist) && !errors.Is(err, errStartOver) {
			s.set(func(st *Status) { st.Connected, st.Err = false, err })
		}
		if err == nil || time.Since(began) > healthyAfter {
			backoff = minBackoff
		}
		if !wait(ctx, jittered(backoff)) {
			return
		}
		backoff = min(2*backoff, maxBackoff)
	}
}

// jittered is a pause of between half of a backoff and the whole, so that the nodes of a fleet don't come at the same moment.
func jittered(backoff time.Duration) time.Duration { return backoff/2 + rand.N(backoff/2) }

func wait(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// absent says whether an error means that the API has nothing of the kind for us. Any answer marks the source as listed, so that
// the start never waits for it.
func (s *source) absent(err error) bool {
	var answer apierrors.APIStatus
	if errors.As(err, &answer) {
		s.cluster.MarkListed(s.status.Source)
	}
	return apierrors.IsNotFound(err) || apierrors.IsForbidden(err)
}

// step makes sure that there is a version to watch from, and watches until something ends it.
func (s *source) step(ctx context.Context) error {
	err := error(nil)
	if s.version != "" && !s.connected() {
		err = s.verify(ctx)
	}
	if err == nil && s.version == "" {
		err = s.listAll(ctx)
	}
	if err == nil {
		err = s.watchOn(ctx)
	}
	switch {
	case errors.Is(err, errRelist):
		s.fresh, s.version = s.version, ""
	case errors.Is(err, errStartOver):
		s.fresh, s.version = "", ""
	}
	return err
}

func (s *source) connected() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.status.Connected
}

// verify asks whether the API that answers after a watch has ended is the one that was watched. One with another store, or with its
// own restored from a backup, would silently accept the version and never send the differences. An account that may not read the
// cluster's identity does without that part.
func (s *source) verify(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, verifyTimeout)
	defer cancel()
	identity, err := s.clients.identity(ctx)
	if err != nil {
		return fmt.Errorf("reach the API: %w", err)
	}
	if identity != "" && s.identity != "" && identity != s.identity {
		return fmt.Errorf("%w: another cluster is at this address", errStartOver)
	}
	return watchError(s.knows(ctx))
}

// knows checks that the API has reached the version, with a watch-list whose selector matches nothing; an API that can't do that
// gets a list.
func (s *source) knows(ctx context.Context) error {
	all, timeout := true, int64(verifyTimeout/time.Second)
	o := metav1.ListOptions{
		LabelSelector: noObject, ResourceVersion: s.version, ResourceVersionMatch: metav1.ResourceVersionMatchNotOlderThan,
		SendInitialEvents: &all, AllowWatchBookmarks: true, TimeoutSeconds: &timeout,
	}
	events, err := s.watch(ctx, o)
	if apierrors.IsInvalid(err) || apierrors.IsBadRequest(err) {
		_, err = s.list(ctx, metav1.ListOptions{LabelSelector: noObject, ResourceVersion: s.version, ResourceVersionMatch: metav1.ResourceVersionMatchNotOlderThan}, func(runtime.Object) {})
		return err
	}
	if err != nil {
		return err
	}
	defer events.Stop()
	for event := range events.ResultChan() {
		switch event.Type {
		case apiwatch.Error:
			return apierrors.FromObject(event.Object)
		case apiwatch.Bookmark:
			return nil
		}
	}
	return fmt.Errorf("watch %s: the API ended it", s.status.Source)
}

// noObject is a selector that nothing matches.
const noObject = "portal.invalid/no-object=true"

// listAll lists, applying each object as it comes, and removes in the end what was not listed: readers never see an empty
// cluster in between.
func (s *source) listAll(ctx context.Context) error {
	identity := s.clients.beginIdentity(ctx)
	seen := map[intent.Key]struct{}{}
	o := metav1.ListOptions{ResourceVersion: s.fresh, Limit: pageLimit}
	if s.fresh != "" && s.fresh != "0" {
		o.Limit = 0 // with a limit the API would read from its store
	}
	for {
		list, err := s.list(ctx, o, func(obj runtime.Object) { seen[s.apply(obj)] = struct{}{} })
		switch {
		case err == nil:
		case apierrors.IsResourceExpired(err) && o.Continue != "":
			o = metav1.ListOptions{} // the pages' version was compacted away: all at once
			clear(seen)
			continue
		case tooLarge(err) && o.ResourceVersion != "":
			return fmt.Errorf("%w: %v", errStartOver, err)
		default:
			return fmt.Errorf("list %s: %w", s.status.Source, err)
		}
		if o = (metav1.ListOptions{Continue: list.Continue, Limit: pageLimit}); o.Continue == "" {
			s.version, s.identity = list.ResourceVersion, ""
			s.feed()
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
	select {
	case s.identity = <-identity:
	case <-time.After(identityPatience): // an answer that comes later might be another cluster's
	case <-ctx.Done():
	}
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
		return watchError(fmt.Errorf("watch %s: %w", s.status.Source, err))
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
			if older(m.GetResourceVersion(), s.version) {
				return fmt.Errorf("%w: version %s came after %s", errStartOver, m.GetResourceVersion(), s.version)
			}
			s.version = m.GetResourceVersion()
			s.feed()
		}
	}
	if !some && time.Since(began) < time.Second {
		return fmt.Errorf("watch %s: it ended at once", s.status.Source)
	}
	// A server that ended the watch in the usual way still answers; one that went away may come back as another.
	return s.verify(ctx)
}

// feed says up to where the cluster is fed.
func (s *source) feed() {
	if n, err := strconv.ParseUint(s.version, 10, 64); err == nil {
		s.fed.Store(n)
	}
}

// watchError tells errors after which only a new list helps from those after which the watch may be tried again.
func watchError(err error) error {
	if apierrors.IsResourceExpired(err) || apierrors.IsGone(err) {
		return fmt.Errorf("%w: %v", errRelist, err)
	}
	return startOver(err)
}

// startOver wraps the error of an API that does not know the version: it was restored to an older one.
func startOver(err error) error {
	if tooLarge(err) {
		return fmt.Errorf("%w: %v", errStartOver, err)
	}
	return err
}

func tooLarge(err error) bool {
	return apierrors.HasStatusCause(err, metav1.CauseTypeResourceVersionTooLarge)
}

// older compares versions of one API.
func older(a, b string) bool {
	x, err1 := strconv.ParseUint(a, 10, 64)
	y, err2 := strconv.ParseUint(b, 10, 64)
	return err1 == nil && err2 == nil && x < y
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
