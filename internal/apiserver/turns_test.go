package apiserver

import (
	"context"
	"net/http"
	"testing"

	"k8s.io/apiserver/pkg/endpoints/request"
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
	turns.learn(list, heavyAnswer)
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
