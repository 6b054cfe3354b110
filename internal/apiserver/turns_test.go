package apiserver

import (
	"context"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"
	utilflowcontrol "k8s.io/apiserver/pkg/util/flowcontrol"
)

// One user's requests wait for each other and for nobody else's.
func TestTurns(t *testing.T) {
	turns := newTurns(2)
	mine, yours := turnKey{"me", true}, turnKey{"you", true}
	first := turns.take(t.Context(), mine)
	if first == nil {
		t.Fatal("the first request got no turn")
	}
	if done := turns.take(t.Context(), yours); done == nil {
		t.Error("another user waits")
	} else {
		done()
	}
	if done := turns.take(t.Context(), turnKey{"me", false}); done == nil {
		t.Error("a light request waits for a heavy one")
	} else {
		done()
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if done := turns.take(ended, mine); done != nil {
		t.Error("two heavy requests of one user at once")
	}
	got := make(chan func())
	go func() { got <- turns.take(t.Context(), mine) }()
	first()
	first() // ending twice must not free two turns
	second := <-got
	if done := turns.take(ended, mine); done != nil {
		t.Error("ending a turn twice made room for two")
	}
	second()
	if len(turns.users) != 0 {
		t.Errorf("%d users are remembered without a request", len(turns.users))
	}
}

// Probes, watches and parts of the server take no turns: a probe must be answered while anonymous clients flood.
func TestWhoTakesTurns(t *testing.T) {
	for _, c := range []struct {
		user string
		info request.RequestInfo
		want bool
	}{
		{"ann", request.RequestInfo{IsResourceRequest: true, Verb: "list", Resource: "pods"}, true},
		{"ann", request.RequestInfo{IsResourceRequest: true, Verb: "watch", Resource: "pods"}, false},
		{user.Anonymous, request.RequestInfo{Verb: "get", Path: "/readyz"}, false},
		{user.Anonymous, request.RequestInfo{Verb: "get", Path: "/openapi/v2"}, true},
		{user.APIServerUser, request.RequestInfo{IsResourceRequest: true, Verb: "list", Resource: "pods"}, false},
	} {
		digest := utilflowcontrol.RequestDigest{User: &user.DefaultInfo{Name: c.user}, RequestInfo: &c.info}
		if got := takesTurns(&digest); got != c.want {
			t.Errorf("%s: %s %s%s takes turns: %v, want %v", c.user, c.info.Verb, c.info.Resource, c.info.Path, got, c.want)
		}
	}
}

// A user's line has an end.
func TestTurnsAreRefused(t *testing.T) {
	turns := newTurns(1)
	key := turnKey{"me", true}
	done := turns.take(t.Context(), key)
	ctx, cancel := context.WithCancel(t.Context())
	left := make(chan func())
	for range mostWaiting {
		go func() { left <- turns.take(ctx, key) }()
	}
	waiting := func() int {
		turns.mu.Lock()
		defer turns.mu.Unlock()
		return len(turns.users[key].waiting)
	}
	for waiting() < mostWaiting {
	}
	if turns.take(t.Context(), key) != nil {
		t.Error("one more may wait")
	}
	cancel()
	for range mostWaiting {
		if end := <-left; end != nil {
			end()
		}
	}
	done()
	if len(turns.users) != 0 {
		t.Error("those who left are remembered")
	}
}

// What had large answers is heavy, and light again after small ones.
func TestHeavyAnswers(t *testing.T) {
	turns := newTurns(2)
	list := &request.RequestInfo{IsResourceRequest: true, Verb: "list", Resource: "configmaps"}
	here := &request.RequestInfo{IsResourceRequest: true, Verb: "list", Resource: "configmaps", Namespace: "default"}
	if !turns.isHeavy(list) {
		t.Error("what nobody has asked for is taken for small")
	}
	turns.learn(list, heavyAnswer)
	turns.learn(here, 100)
	if !turns.isHeavy(list) || turns.isHeavy(here) {
		t.Errorf("everywhere %v, in a namespace %v", turns.isHeavy(list), turns.isHeavy(here))
	}
	for range 20 {
		turns.learn(list, 100)
	}
	if turns.isHeavy(list) {
		t.Error("it is heavy for ever")
	}
	turns.learn(list, sizeOf(http.Header{"Content-Encoding": {"gzip"}}, 100, true))
	if !turns.isHeavy(list) {
		t.Error("a large list that compresses well is taken for a small one")
	}
}

// A user who has more to ask than they may leaves room while others ask: fewer of their requests at a time, and a pause between them.
// Components of the cluster do not.
func TestTurnsYield(t *testing.T) {
	var passed atomic.Int64
	begun := time.Now()
	turns := newTurns(2)
	turns.now = func() time.Time { return begun.Add(time.Duration(passed.Load())) }
	most := func(who string) int {
		turns.mu.Lock()
		defer turns.mu.Unlock()
		return turns.most(turnKey{user: who}, turns.now())
	}
	ask := func(who string) {
		if done := turns.take(t.Context(), turnKey{user: who}); done != nil {
			done()
		}
	}
	ask("ann")
	ask("system:node:n")
	ask("system:anonymous")
	if got := most("ann"); got != turns.light {
		t.Errorf("alone, ann has %d turns, want %d", got, turns.light)
	}
	ask("bob")
	for who, want := range map[string]int{"ann": turns.lightShared, "bob": turns.lightShared, "system:kube-scheduler": turns.light, "system:serviceaccount:kube-system:a": turns.light, "system:serviceaccount:default:a": turns.lightShared} {
		if got := most(who); got != want {
			t.Errorf("beside others, %s has %d turns, want %d", who, got, want)
		}
	}
	passed.Add(int64(moment + time.Millisecond))
	ask("ann")
	if got := most("ann"); got != turns.light {
		t.Errorf("a moment after bob, ann has %d turns, want %d", got, turns.light)
	}

	// A turn of 30 ms is followed by a pause for those of the same user that wait.
	ask("bob")
	key := turnKey{"ann", true}
	first := turns.take(t.Context(), key)
	got := make(chan time.Time)
	go func() {
		done := turns.take(t.Context(), key)
		got <- time.Now()
		done()
	}()
	for waiting := 0; waiting == 0; {
		turns.mu.Lock()
		waiting = len(turns.users[key].waiting)
		turns.mu.Unlock()
	}
	passed.Add(int64(30 * time.Millisecond))
	ended := time.Now()
	first()
	if pause := (<-got).Sub(ended); pause < 30*time.Millisecond {
		t.Errorf("the next turn came after %s, want a pause of 30 ms at least", pause)
	}
}
