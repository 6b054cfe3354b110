package apiserver

import (
	"context"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	flowcontrolv1 "k8s.io/api/flowcontrol/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
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
	// lightTurnsShared are how many while other users ask too.
	lightTurnsShared = 1
	// pauses is how many times as long as a turn the pause is that follows it then, so that one user has a quarter of the CPUs at most.
	pauses = 3
	// longestPause is that between two turns.
	longestPause = time.Second
	// moment is for how long a user who asked counts as there.
	moment = time.Second
	// heavyAnswer is the size of answers that take long to make. Of requests for them a user has at most half of the CPUs at work,
	// so that everybody else finds one that is free: the scheduler lets a long computation run for 10 ms before the next has a turn.
	heavyAnswer = 128 << 10
	// heavyTurnLength is after what time a request no longer counts: it waits rather than computes, for a client that reads slowly.
	heavyTurnLength = 5 * time.Second
	// lightTurnLength is the same for the others: a request that takes longer waits, maybe for a webhook that itself asks as this user.
	lightTurnLength = 500 * time.Millisecond
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
	light, lightShared, heavy int

	mu      sync.Mutex
	users   map[turnKey]*line
	answers map[answerKey]int
	// latest are the last two people or programs who asked, and when; neither anonymous clients nor the cluster's own parts, of which
	// some always ask.
	latest [2]arrival
	now    func() time.Time
	// waited is called when a request with a large answer has to wait.
	waited func()
}

type arrival struct {
	user string
	at   time.Time
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
		light: lightTurns * cpus, lightShared: lightTurnsShared * cpus, heavy: max(1, cpus/2),
		users: map[turnKey]*line{}, answers: map[answerKey]int{}, now: time.Now, waited: func() {},
	}
}

// arrived notes that a user asks.
func (t *turns) arrived(who string, now time.Time) {
	if who == user.Anonymous || isComponent(who) {
		return
	}
	if t.latest[0].user != who {
		t.latest[1] = t.latest[0]
	}
	t.latest[0] = arrival{who, now}
}

// yields says whether a user must leave room for others: another has asked a moment ago. Components of the cluster do not yield,
// for what they do is what the others wait for.
func (t *turns) yields(who string, now time.Time) bool {
	if isComponent(who) {
		return false
	}
	for _, other := range t.latest {
		if other.user != who && other.user != "" && now.Sub(other.at) < moment {
			return true
		}
	}
	return false
}

// isComponent says whether a name is one of the cluster's own parts: names that begin with system: are reserved for them, but
// anonymous and most ServiceAccounts are users.
func isComponent(name string) bool {
	if account, ok := strings.CutPrefix(name, "system:serviceaccount:"); ok {
		return strings.HasPrefix(account, metav1.NamespaceSystem+":")
	}
	return strings.HasPrefix(name, "system:") && name != user.Anonymous
}

// most is how many requests of a line are executed at a time.
func (t *turns) most(key turnKey, now time.Time) int {
	switch {
	case key.heavy:
		return t.heavy
	case t.yields(key.user, now):
		return t.lightShared
	}
	return t.light
}

// take waits for a turn. It returns a function that ends the turn; nil if there was none before ctx ended.
func (t *turns) take(ctx context.Context, key turnKey) (done func()) {
	t.mu.Lock()
	now := t.now()
	t.arrived(key.user, now)
	l := t.users[key]
	if l == nil {
		l = &line{}
		t.users[key] = l
	}
	if len(l.waiting) == 0 && l.executing < t.most(key, now) {
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
	t.wake(key, l) // the others may have stopped asking meanwhile, so that there are more turns
	t.mu.Unlock()
	if key.heavy {
		t.waited()
	}
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
	begun, length := t.now(), lightTurnLength
	if key.heavy {
		length = heavyTurnLength
	}
	var once sync.Once
	timer := time.AfterFunc(length, func() { once.Do(func() { t.end(key, l, 0) }) })
	return func() {
		timer.Stop()
		once.Do(func() { t.end(key, l, t.now().Sub(begun)) })
	}
}

// end gives the turn to the next request. While others ask too, it comes after a pause: on a machine that is never idle everybody
// waits.
func (t *turns) end(key turnKey, l *line, took time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if took > 0 && len(l.waiting) > 0 && t.yields(key.user, t.now()) {
		time.AfterFunc(min(pauses*took, longestPause), func() {
			t.mu.Lock()
			defer t.mu.Unlock()
			t.next(key, l)
		})
		return
	}
	t.next(key, l)
}

// next frees a turn.
func (t *turns) next(key turnKey, l *line) {
	l.executing--
	t.wake(key, l)
	if l.executing == 0 {
		delete(t.users, key)
	}
}

// wake gives turns to those that wait, as far as there are any.
func (t *turns) wake(key turnKey, l *line) {
	for most := t.most(key, t.now()); len(l.waiting) > 0 && l.executing < most; l.executing++ {
		close(l.waiting[0])
		l.waiting = l.waiting[1:]
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

// isHeavy says whether requests like this one had large answers. What nobody has asked for yet may be large.
func (t *turns) isHeavy(info *request.RequestInfo) bool {
	if !isSized(info) {
		return false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	size, known := t.answers[answerOf(info)]
	return !known || size >= heavyAnswer
}

// isSized says whether the size of a request's answer is learned: that of lists, and of documents such as OpenAPI's.
func isSized(info *request.RequestInfo) bool {
	return info.IsResourceRequest && info.Verb == "list" || !info.IsResourceRequest && info.Verb == "get"
}

// learn remembers the size of an answer, the last ones counting most.
func (t *turns) learn(info *request.RequestInfo, size int) {
	key := answerOf(info)
	t.mu.Lock()
	defer t.mu.Unlock()
	before, known := t.answers[key]
	if !known && len(t.answers) >= mostAnswers {
		clear(t.answers) // paths that don't exist could fill it
	}
	t.answers[key] = max(size, before-before/4)
}

// withAnswerSizes learns how large answers are.
func (t *turns) withAnswerSizes(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		info, ok := request.RequestInfoFrom(r.Context())
		if !ok || !isSized(info) {
			next.ServeHTTP(w, r)
			return
		}
		counted := &countedAnswer{ResponseWriter: w}
		next.ServeHTTP(responsewriter.WrapForHTTP1Or2(counted), r)
		if counted.code == 0 || counted.code == http.StatusOK || counted.code == http.StatusNotFound {
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

// takesTurns says whether a request takes turns with the others of its user. Parts of the server and probes never wait, and a
// watch would hold its turn for minutes.
func takesTurns(digest *utilflowcontrol.RequestDigest) bool {
	return !isInside(digest.User) && !slices.Contains(insideUsers, digest.User.GetName()) &&
		digest.RequestInfo.Verb != "watch" &&
		(digest.RequestInfo.IsResourceRequest || !slices.Contains(openPaths, digest.RequestInfo.Path))
}

// Handle waits for a turn, and then for a seat. A request that gets no turn is not executed, which the library answers with 429.
func (f inTurns) Handle(ctx context.Context, digest utilflowcontrol.RequestDigest,
	note func(*flowcontrolv1.FlowSchema, *flowcontrolv1.PriorityLevelConfiguration, string),
	estimate func() flowcontrolrequest.WorkEstimate, queued fairqueuing.QueueNoteFn, execute func(),
) {
	if takesTurns(&digest) {
		done := f.turns.take(ctx, turnKey{digest.User.GetName(), f.turns.isHeavy(digest.RequestInfo)})
		if done == nil {
			// The answer names the level.
			note(bootstrap.MandatoryFlowSchemaCatchAll, bootstrap.MandatoryPriorityLevelConfigurationCatchAll, digest.User.GetName())
			return
		}
		defer done()
	}
	f.Interface.Handle(ctx, digest, note, estimate, queued, execute)
}
