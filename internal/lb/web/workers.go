package web

import "sync"

// workers are goroutines that answer requests of HTTP/2 connections, one after the other: their stacks have grown to what that needs.
// The one that was used last is used first, so that those which are not needed are found.
type workers struct {
	mu      sync.Mutex
	idle    []chan *http2Stream
	least   int // how many were idle all the time since trim
	stopped bool
}

// start has a stream's request answered.
func (w *workers) start(st *http2Stream) {
	w.mu.Lock()
	n := len(w.idle)
	if n == 0 {
		w.mu.Unlock()
		go w.run(st)
		return
	}
	one := w.idle[n-1]
	w.idle[n-1] = nil
	w.idle = w.idle[:n-1]
	w.least = min(w.least, n-1)
	w.mu.Unlock()
	one <- st
}

func (w *workers) run(st *http2Stream) {
	next := make(chan *http2Stream, 1)
	for st != nil {
		st.run()
		w.mu.Lock()
		if w.stopped {
			w.mu.Unlock()
			return
		}
		w.idle = append(w.idle, next)
		w.mu.Unlock()
		st = <-next
	}
}

// trim ends those that were not needed since the last time.
func (w *workers) trim() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, one := range w.idle[:w.least] {
		close(one)
	}
	n := copy(w.idle, w.idle[w.least:])
	clear(w.idle[n:])
	w.idle = w.idle[:n]
	w.least = n
}

// stop ends all that are idle, and those that are not when they have answered.
func (w *workers) stop() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.stopped = true
	for _, one := range w.idle {
		close(one)
	}
	w.idle, w.least = nil, 0
}
