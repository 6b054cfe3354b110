package queue

import "sync"

// lanes is the order in which dirty keys are worked on. What has changed since everything was listed goes before what was
// only listed: after a change of leaders nearly all of the latter is right already, and whoever waits for a change should
// not wait for it to be looked at. Within a lane, first come is first served.
type lanes struct {
	mu      sync.Mutex
	listed  bool             // everything was
	urgent  fifo             // what has changed since
	rest    fifo             // what was there then, and some that have become urgent
	resting map[Key]struct{} // those of rest that have not
	popped  int
}

// share is how often a key that only was listed goes before those that have changed: one of so many, so that a storm of
// changes keeps nobody waiting for ever.
const share = 8

func newLanes() *lanes { return &lanes{resting: map[Key]struct{}{}} }

// Push adds a key that is not there.
func (l *lanes) Push(key Key) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.listed {
		l.urgent.push(key)
		return
	}
	l.rest.push(key)
	l.resting[key] = struct{}{}
}

// Touch is told of a key that is there and was called dirty once more.
func (l *lanes) Touch(key Key) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, resting := l.resting[key]; resting && l.listed {
		delete(l.resting, key)
		l.urgent.push(key)
	}
}

// Len is how many keys there are.
func (l *lanes) Len() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.urgent) + len(l.resting)
}

// Pop takes the next key; there must be one.
func (l *lanes) Pop() Key {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.popped++
	if len(l.urgent) > 0 && (len(l.resting) == 0 || l.popped%share != 0) {
		return l.urgent.pop()
	}
	for {
		key := l.rest.pop()
		if _, resting := l.resting[key]; resting {
			delete(l.resting, key)
			return key
		}
	}
}

func (l *lanes) setListed() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.listed = true
}

type fifo []Key

func (f *fifo) push(key Key) { *f = append(*f, key) }

func (f *fifo) pop() Key {
	key := (*f)[0]
	(*f)[0] = Key{}
	if *f = (*f)[1:]; len(*f) == 0 {
		*f = nil
	}
	return key
}
