package console

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/internal/explain"
)

// surveying has pages over a feed, and counts the looks for their findings. The clock is a test's.
type surveying struct {
	*testing.T
	console *Console
	feed    *feed
	objects *objects
	group   sync.WaitGroup

	mu sync.Mutex
	// asked are the Services that looks were about, fails is what they return.
	asked [][]explain.Key
	all   int
	fails error
}

func newSurveying(ctx context.Context, t *testing.T) *surveying {
	t.Helper()
	s := &surveying{T: t, feed: testFeed()}
	s.feed.status.Synced = true
	c, err := New(Options{Findings: s.look})
	if err != nil {
		t.Fatal(err)
	}
	s.console = c
	ready := make(chan struct{})
	close(ready)
	s.objects = &objects{
		stores: map[storeKey]store{}, refused: map[string]bool{}, touched: map[string]uint64{}, surveys: map[string]*survey{},
		prepared: map[string]chan struct{}{"shop": ready, "other": ready},
	}
	s.objects.ended, s.objects.stop = context.WithCancel(ctx)
	return s
}

// withSurveying runs a test in a bubble of its own, and waits until all that it started has ended.
func withSurveying(t *testing.T, test func(ctx context.Context, t *testing.T, s *surveying)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithCancel(t.Context())
		s := newSurveying(ctx, t)
		defer s.group.Wait()
		defer s.objects.group.Wait()
		defer stop()
		test(ctx, t, s)
	})
}

// look finds one thing, another one each time.
func (s *surveying) look(ctx context.Context, about Subject) ([][]Finding, error) {
	release, err := about.Turn(ctx)
	if err != nil {
		return nil, err
	}
	defer release()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked = append(s.asked, about.Services)
	s.all++
	if s.fails != nil {
		return nil, s.fails
	}
	out := make([][]Finding, len(about.Services))
	for i, k := range about.Services {
		out[i] = []Finding{{Verdict: fmt.Sprintf("%s/%s, look %d", k.Namespace, k.Name, s.all)}}
	}
	return out, nil
}

func (s *surveying) open(ctx context.Context, k key) *page {
	p := newPage()
	close(p.eventsListed)
	p.unlisted = 0
	s.group.Go(func() { p.findIn(ctx, s.console, s.objects, s.feed, k) })
	return p
}

// looks counts those since it was last called, after some time has passed.
func (s *surveying) looks(after time.Duration) int {
	time.Sleep(after)
	synctest.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	defer func() { s.asked = nil }()
	return len(s.asked)
}

func (p *page) verdict() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.findings) == 0 {
		return ""
	}
	return p.findings[0].Verdict
}

func (s *surveying) change(name, state string) {
	slice := endpointSlice(name, "", state)
	slice.Labels[discoveryv1.LabelServiceName] = name
	s.feed.putSlice(slice)
	s.objects.touch("endpointslices", "shop")
}

// TestSurvey: 20 pages have their findings from one look, once a minute while nothing happens. A change of one's Service has one look follow
// within 2 s, one of another Service within some ten; how many pages there are makes no difference.
func TestSurvey(t *testing.T) {
	withSurveying(t, func(ctx context.Context, t *testing.T, s *surveying) {
		const pages = 20
		for i := range 2 * pages {
			svc := service(corev1.ServiceSpec{})
			svc.Name = fmt.Sprint("s", i)
			s.feed.putService(svc)
		}
		var opened []*page
		for i := range pages {
			opened = append(opened, s.open(ctx, key{"shop", fmt.Sprint("s", i)}))
		}
		if got := s.looks(findingsEvery); got != 1 {
			t.Errorf("%d looks for %d new pages; want one", got, pages)
		}
		for i, p := range opened {
			if p.verdict() == "" {
				t.Errorf("page %d has no findings", i)
			}
		}
		if got := s.looks(10 * findingsAnyway); got != 10 {
			t.Errorf("%d looks in 10 quiet minutes; want 10", got)
		}

		before := opened[3].verdict()
		s.change("s3", "ready")
		if got := s.looks(2 * time.Second); got != 1 || opened[3].verdict() == before {
			t.Errorf("%d looks in the 2 s after a page's Service changed; want one, and its findings", got)
		}
		s.looks(aroundEvery)
		for i := range 60 {
			s.change("s3", []string{"ready", "not"}[i%2])
			time.Sleep(time.Second)
		}
		if got := s.looks(0); got < 30 || got > 60 {
			t.Errorf("%d looks in a minute with a change of a page's Service every second; want 30 to 60", got)
		}
		s.looks(aroundEvery)
		for i := range 60 {
			s.change(fmt.Sprint("s", pages+i%pages), []string{"ready", "not"}[i%2])
			time.Sleep(time.Second)
		}
		if got := s.looks(0); got < 5 || got > 7 {
			t.Errorf("%d looks in a minute with changes of other Services; want about 6", got)
		}
		s.looks(2 * aroundEvery)
		s.objects.touch("endpointslices", "other")
		if got := s.looks(2 * aroundEvery); got != 0 {
			t.Errorf("%d looks after a change in another namespace", got)
		}
		opened[5].putEvent(&corev1.Event{ObjectMeta: metav1.ObjectMeta{Name: "its own"}, InvolvedObject: corev1.ObjectReference{Kind: "Service", Name: "s5"}})
		if got := s.looks(2 * aroundEvery); got != 1 {
			t.Errorf("%d looks after an Event about a page's Service; want one", got)
		}
	})
}

// TestSurveyScopes: pages that see other objects have looks of their own; two pages of one Service are asked about once.
func TestSurveyScopes(t *testing.T) {
	withSurveying(t, func(ctx context.Context, t *testing.T, s *surveying) {
		for _, k := range []key{{"shop", "a"}, {"shop", "a"}, {"other", "b"}} {
			s.open(ctx, k)
		}
		synctest.Wait()
		for _, keys := range s.asked {
			if len(keys) != 1 {
				t.Errorf("a look is about %v: pages with few rights see the objects of one namespace", keys)
			}
		}
		if len(s.objects.surveys) != 2 {
			t.Errorf("%d surveys of 2 namespaces", len(s.objects.surveys))
		}
	})
}

// TestSurveyFails: a look that fails is repeated, leaves the findings as they are, and ends with the last page.
func TestSurveyFails(t *testing.T) {
	withSurveying(t, func(ctx context.Context, t *testing.T, s *surveying) {
		within, closePage := context.WithCancel(ctx)
		p := s.open(within, key{"shop", "a"})
		s.looks(findingsEvery)
		before := p.verdict()
		s.mu.Lock()
		s.fails = errors.New("no answer")
		s.mu.Unlock()
		if got := s.looks(findingsAnyway + 10*findingsEvery); got < 5 || p.verdict() != before {
			t.Errorf("%d looks while they fail; the findings were %q and are %q", got, before, p.verdict())
		}
		s.mu.Lock()
		s.fails = nil
		s.mu.Unlock()
		if s.looks(2 * findingsEvery); p.verdict() == before {
			t.Error("findings don't come back")
		}
		closePage()
		if got := s.looks(2 * findingsAnyway); got != 0 || s.objects.surveys["shop"].running {
			t.Errorf("%d looks after the last page was closed", got)
		}
		p = s.open(ctx, key{"shop", "a"})
		if s.looks(findingsEvery); p.verdict() == "" {
			t.Error("a page that is opened again has no findings")
		}
	})
}
