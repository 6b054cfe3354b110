package console

import (
	"cmp"
	"context"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"portal/internal/explain"
)

const (
	// findingsEvery is the shortest time between two looks for findings. Looks that take long are rarer: at most a tenth of the time
	// is spent on them.
	findingsEvery   = time.Second
	findingsTimeout = 20 * time.Second
	// longestRest is after what time there is another look all the same.
	longestRest = 30 * time.Second
	// settle is how long a look waits after a change: what is watched for findings may come a little later than what is shown.
	settle = 300 * time.Millisecond
	// aroundEvery is how soon a change elsewhere in the namespace is a reason to look again, and findingsAnyway when that is done without a
	// change: what nodes report is not watched.
	aroundEvery    = 10 * time.Second
	findingsAnyway = time.Minute
	// openDelay is how long a new page's first look waits for others that are opened at the same time.
	openDelay = 50 * time.Millisecond
	// restShare bounds what all accounts together compute: after each look, nobody does for so many times as long.
	restShare = 4
)

// survey looks for the findings of all pages that see the same objects: one look is for all of them, however many there are. It runs while
// there are pages.
type survey struct {
	console *Console
	objects *objects
	// namespace is the only one whose objects these pages see; empty: those of all.
	namespace string

	mu      sync.Mutex
	wake    chan struct{} // has one if the time of the next look may be another
	pages   map[*surveyed]bool
	running bool
	// looked is when the last look began, seen the revision of what it looked at, ended when it ended, and next the earliest time of another.
	looked, ended, next time.Time
	seen                uint64
	// due is when a change was noticed that no look has seen yet, awaited since when there are pages that have had no look at all.
	due, awaited time.Time
}

// surveyed is a page of a survey.
type surveyed struct {
	*page
	key
	// knew is which of its Events the last look had.
	knew uint64
}

// scope is which objects a question about a namespace is answered from: those of all namespaces if all may be watched everywhere, which is
// what an empty one means.
func (o *objects) scope(namespace string, events bool) string {
	for _, r := range evidenceResources {
		if s, everywhere := o.find(r, namespace); s == nil || !everywhere {
			return namespace
		}
	}
	if !events {
		return namespace
	}
	return ""
}

// survey is the one of a scope.
func (o *objects) survey(c *Console, scope string) *survey {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.surveys[scope] == nil {
		o.surveys[scope] = &survey{console: c, objects: o, namespace: scope, wake: make(chan struct{}, 1), pages: map[*surveyed]bool{}}
	}
	return o.surveys[scope]
}

// join has findings of a page looked for, at once.
func (s *survey) join(p *page, k key) *surveyed {
	one := &surveyed{page: p, key: k}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pages[one] = true
	if s.awaited.IsZero() {
		s.awaited = time.Now()
	}
	if !s.running {
		s.running = s.objects.start(s.run)
	}
	s.hurry()
	return one
}

func (s *survey) leave(one *surveyed) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.pages, one)
	s.hurry()
}

// request has the survey look again soon: something of a page's Service changed.
func (s *survey) request() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.due.IsZero() {
		s.due = time.Now()
		s.hurry()
	}
}

// hurry has run find out anew when to look.
func (s *survey) hurry() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// run looks until there are no pages any more, or the objects end.
func (s *survey) run() {
	for {
		switch wait, goes := s.schedule(time.Now()); {
		case !goes:
			return
		case wait <= 0:
			s.look()
		default:
			select {
			case <-time.After(wait):
			case <-s.wake:
			case <-s.objects.ended.Done():
			}
		}
	}
}

// schedule says how long to wait before the next look, or before asking again; and whether there is anybody to look for.
func (s *survey) schedule(now time.Time) (wait time.Duration, goes bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.pages) == 0 || s.objects.ended.Err() != nil {
		s.running = false
		return 0, false
	}
	return s.nextLook(now).Sub(now), true
}

// nextLook is when to look.
func (s *survey) nextLook(now time.Time) time.Time {
	if !s.awaited.IsZero() { // somebody waits
		return latest(s.awaited.Add(openDelay), s.ended.Add(settle))
	}
	if !s.due.IsZero() {
		return latest(s.due.Add(settle), s.next)
	}
	at := s.looked.Add(findingsAnyway)
	if around := s.looked.Add(aroundEvery); now.Before(around) {
		at = around
	} else if s.touched() {
		at = now
	} else if again := now.Add(aroundEvery); again.Before(at) {
		at = again
	}
	return latest(at, s.next)
}

func latest(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// touched says whether something around the pages' Services is not as the last look saw it.
func (s *survey) touched() bool {
	namespaces := map[string]bool{}
	for one := range s.pages {
		namespaces[one.namespace] = true
		if one.eventsAt() != one.knew {
			return true
		}
	}
	return s.objects.touchedAt(slices.Collect(maps.Keys(namespaces))...) != s.seen
}

// look looks once, for all pages.
func (s *survey) look() {
	ctx, cancel := context.WithTimeout(s.objects.ended, findingsTimeout)
	defer cancel()
	started := time.Now()
	about, pages := s.begin(started)
	err := s.gather(ctx, pages, &about)
	var found [][]Finding
	if err == nil {
		found, err = s.console.opts.Findings(ctx, about)
	}
	s.mu.Lock()
	s.ended = time.Now()
	s.next = s.ended.Add(min(max(findingsEvery, 10*time.Since(started)), longestRest))
	if err != nil && s.due.IsZero() { // what was found before stays, and is looked for again whether something changes or not
		s.due = started
	}
	s.mu.Unlock()
	if err != nil {
		return
	}
	for _, one := range pages {
		now := found[slices.Index(about.Services, explain.Key{Namespace: one.namespace, Name: one.name})]
		one.changeIf(func() bool {
			before := one.findings
			one.findings = now
			return !reflect.DeepEqual(before, now)
		})
	}
}

// begin notes what a look will have seen, before it reads anything, and says which Services it is about, and for which pages it is.
func (s *survey) begin(now time.Time) (about Subject, pages []*surveyed) {
	s.mu.Lock()
	defer s.mu.Unlock()
	waits := !s.awaited.IsZero()
	s.looked, s.due, s.awaited = now, time.Time{}, time.Time{}
	pages = slices.SortedFunc(maps.Keys(s.pages), func(a, b *surveyed) int {
		return cmp.Or(strings.Compare(a.namespace, b.namespace), strings.Compare(a.name, b.name))
	})
	var namespaces []string
	for i, one := range pages {
		if i == 0 || one.key != pages[i-1].key {
			about.Services = append(about.Services, explain.Key{Namespace: one.namespace, Name: one.name})
			namespaces = append(namespaces, one.namespace)
		}
		one.knew = one.eventsAt()
	}
	s.seen = s.objects.touchedAt(namespaces...)
	about.Namespace, about.Config = s.namespace, s.objects.config
	about.Turn = func(ctx context.Context) (func(), error) {
		return s.console.turn.take(ctx, func(took time.Duration) time.Duration {
			if waits {
				return 0
			}
			return restShare * took
		})
	}
	return about, pages
}

// gather has a look know the objects that are watched, and the Events that pages have.
func (s *survey) gather(ctx context.Context, pages []*surveyed, about *Subject) error {
	for i, one := range pages {
		if i == 0 || one.namespace != pages[i-1].namespace {
			if err := s.objects.prepare(ctx, one.namespace); err != nil {
				return err
			}
		}
	}
	about.Known, about.Covered = s.objects.evidence(s.namespace)
	about.Covered["events"] = true
	known := map[string]bool{} // two pages can have the same one
	for _, one := range pages {
		for _, e := range one.evidence() {
			if name := objectName(&e); !known[name] {
				known[name] = true
				about.Known.Events = append(about.Known.Events, e)
			}
		}
		if one.hides("Events") {
			about.Covered["events"] = false
		}
	}
	return nil
}
