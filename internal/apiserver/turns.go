package apiserver

import (
	"context"
	"net/http"
	"slices"
	"sync"
	"time"

	flowcontrolv1 "k8s.io/api/flowcontrol/v1"
	"k8s.io/apiserver/pkg/apis/flowcontrol/bootstrap"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/endpoints/responsewriter"
	utilflowcontrol "k8s.io/apiserver/pkg/util/flowcontrol"
	"k8s.io/apiserver/pkg/util/flowcontrol/fairqueuing"
	flowcontrolrequest "k8s.io/apiserver/pkg/util/flowcontrol/request"

	"portal/internal/identity"
)

const (
	// lightTurns are how many requests of one user are executed at a time for each CPU. They are short: whoever comes next waits
	// for them for milliseconds.
	lightTurns = 8
	// heavyAnswer is the size of answers that take long to make. Of requests for them a user has at most half of the CPUs at work,
	// so that everybody else finds one that is free: the scheduler lets a long computation run for 10 ms before the next has a turn.
	heavyAnswer = 128 << 10
	// turnLength is after what time a request no longer counts. It waits rather than computes: for a client that reads slowly, or a
	// webhook.
	turnLength = 5 * time.Second
	// mostWaiting are how many requests of one user may wait.
	mostWaiting = 500
	// mostAnswers bounds what is remembered of answers' sizes.
	mostAnswers = 10_000
)

// insideUsers are the parts of this process that have a user of their own. What they do is what the others wait for, so they wait for nobody.
var insideUsers = []string{
	user.APIServerUser, identity.Controllers, identity.Membership, identity.Audit, identity.Up,
}

// turns let each user have a limited number of requests executed at a time; further ones of the same user wait, in order. They
// stand before priorities and fairness, which share seats among users but let one have all of them while no other asks: whoever
// asks then waits until a request that may take long has ended.
type turns struct {
	light, heavy int

	mu      sync.Mutex
	users   map[turnKey]*line
	answers map[answerKey]int
}

type turnKey struct {
	user  string
	heavy bool
}

// line are the requests of a user: how many are executed, and those that wait.
type line struct {
	executing int
	waiting   []chan struct{}
}

func newTurns(cpus int) *turns {
	return &turns{
		light: lightTurns * cpus, heavy: max(1, cpus/2),
		users: map[turnKey]*line{}, answers: map[answerKey]int{},
	}
}

// take waits for a turn. It returns a function that ends the turn; nil if there was none before ctx ended.
func (t *turns) take(ctx context.Context, key turnKey) (done func()) {
	most := t.light
	if key.heavy {
		most = t.heavy
	}
	t.mu.Lock()
	l := t.users[key]
	if l == nil {
		l = &line{}
		t.users[key] = l
	}
	if l.executing < most {
		l.executing++
		t.mu.Unlock()
		return t.turn(key, l)
	}
	if len(l.waiting) >= mostWaiting {
		t.mu.Unlock()
		return nil
	}
	mine := make(chan struct{})
	l.waiting = append(l.waiting, mine)
	t.mu.Unlock()
	select {
	case <-mine:
		return t.turn(key, l)
	case <-ctx.Done():
	}
	t.mu.Lock()
	for i, other := range l.waiting {
		if other == mine {
			l.waiting = append(l.waiting[:i], l.waiting[i+1:]...)
			t.mu.Unlock()
			return nil
		}
	}
	t.mu.Unlock()
	return t.turn(key, l) // the turn came at the same moment
}

// turn ends by itself if it takes too long.
func (t *turns) turn(key turnKey, l *line) (done func()) {
	end := sync.OnceFunc(func() { t.end(key, l) })
	timer := time.AfterFunc(turnLength, end)
	return func() {
		timer.Stop()
		end()
	}
}

func (t *turns) end(key turnKey, l *line) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(l.waiting) > 0 {
		close(l.waiting[0])
		l.waiting = l.waiting[1:]
		return
	}
	if l.executing--; l.executing == 0 {
		delete(t.users, key)
	}
}

// answerKey tells requests apart by what their answers' sizes depend on.
type answerKey struct {
	path, group, resource, verb string
	everywhere                  bool
}

func answerOf(info *request.RequestInfo) answerKey {
	if !info.IsResourceRequest {
		return answerKey{path: info.Path}
	}
	return answerKey{group: info.APIGroup, resource: info.Resource, verb: info.Verb, everywhere: info.Namespace == ""}
}

// isHeavy says whether requests like this one had large answers.
func (t *turns) isHeavy(info *request.RequestInfo) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.answers[answerOf(info)] >= heavyAnswer
}

// learn remembers the size of an answer, the last ones counting most.
func (t *turns) learn(info *request.RequestInfo, size int) {
	key := answerOf(info)
	t.mu.Lock()
	defer t.mu.Unlock()
	before, known := t.answers[key]
	if !known && (size < heavyAnswer || len(t.answers) >= mostAnswers) {
		return // what was never large need not be remembered
	}
	t.answers[key] = max(size, before-before/4)
}

// withAnswerSizes learns how large answers are.
func (t *turns) withAnswerSizes(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		info, ok := request.RequestInfoFrom(r.Context())
		if !ok || info.IsResourceRequest && info.Verb != "list" || !info.IsResourceRequest && r.Method != http.MethodGet {
			next.ServeHTTP(w, r)
			return
		}
		counted := &countedAnswer{ResponseWriter: w}
		next.ServeHTTP(responsewriter.WrapForHTTP1Or2(counted), r)
		if counted.code == 0 || counted.code == http.StatusOK {
			t.learn(info, sizeOf(w.Header(), counted.size, info.IsResourceRequest))
		}
	})
}

// sizeOf is about how large an answer was before it was compressed, which takes longer than making it. Objects are compressed only
// from heavyAnswer on.
func sizeOf(header http.Header, size int, objects bool) int {
	const ratio = 10
	switch {
	case header.Get("Content-Encoding") != "gzip":
		return size
	case objects:
		return max(heavyAnswer, ratio*size)
	}
	return ratio * size
}

type countedAnswer struct {
	http.ResponseWriter
	code, size int
}

func (c *countedAnswer) Unwrap() http.ResponseWriter { return c.ResponseWriter }

func (c *countedAnswer) WriteHeader(code int) {
	c.code = code
	c.ResponseWriter.WriteHeader(code)
}

func (c *countedAnswer) Write(data []byte) (int, error) {
	n, err := c.ResponseWriter.Write(data)
	c.size += n
	return n, err
}

// inTurns is flow control before which requests of one user take turns.
type inTurns struct {
	utilflowcontrol.Interface
	turns *turns
}

// Handle waits for a turn, and then for a seat. Parts of the server wait for neither.
func (f inTurns) Handle(ctx context.Context, digest utilflowcontrol.RequestDigest,
	note func(*flowcontrolv1.FlowSchema, *flowcontrolv1.PriorityLevelConfiguration, string),
	estimate func() flowcontrolrequest.WorkEstimate, queued fairqueuing.QueueNoteFn, execute func(),
) {
	if !isInside(digest.User) && !slices.Contains(insideUsers, digest.User.GetName()) && digest.RequestInfo.Verb != "watch" {
		done := f.turns.take(ctx, turnKey{digest.User.GetName(), f.turns.isHeavy(digest.RequestInfo)})
		if done == nil {
			// It is answered with 429, for which the level must be known.
			note(bootstrap.MandatoryFlowSchemaCatchAll, bootstrap.MandatoryPriorityLevelConfigurationCatchAll, digest.User.GetName())
			return
		}
		defer done()
	}
	f.Interface.Handle(ctx, digest, note, estimate, queued, execute)
}
