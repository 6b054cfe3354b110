package queue

import (
	"slices"
	"sync"
)

// lanes is the order in which queued keys are synced. What has changed since everything was listed goes before what was
// only listed: after a change of leaders nearly all of the latter is right already, and a change should not wait until
// that has been verified. Each lane is first in, first out.
type lanes struct {
	mu      sync.Mutex
	listed  bool // everything was
	lane    [2]lane
	places  map[Key]place
	tickets uint64
	popped  int
}

const (
	urgent = iota // what has changed since everything was listed
	rest          // what was only listed, and what others have synced meanwhile
)

// lane are places in order. Keys may have left theirs for another one; count is how many have not.
type lane struct {
	places []place
	count  int
}

// place is where a key waits: the ticket of its place in the lane.
type place struct {
	key    Key
	lane   int
	ticket uint64
}

// share is how often a key that was only listed goes before those that have changed: one of so many, so that a storm of
// changes starves no key.
const share = 8

func newLanes() *lanes { return &lanes{places: map[Key]place{}} }

// Push adds a key that is not there.
func (l *lanes) Push(key Key) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.listed {
		l.put(key, urgent)
	} else {
		l.put(key, rest)
	}
}

// Touch is called for a key that is queued and was added once more.
func (l *lanes) Touch(key Key) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if at, in := l.places[key]; in && at.lane == rest && l.listed {
		l.leave(at)
		l.put(key, urgent)
	}
}

// deprioritize moves a key whose change somebody else has dealt with behind those that changed.
func (l *lanes) deprioritize(key Key) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if at, in := l.places[key]; in && at.lane == urgent {
		l.leave(at)
		l.put(key, rest)
	}
}

// Len is how many keys there are.
func (l *lanes) Len() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.places)
}

// Pop takes the next key; there must be one.
func (l *lanes) Pop() Key {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.popped++
	from := &l.lane[rest]
	if l.lane[urgent].count > 0 && (from.count == 0 || l.popped%share != 0) {
		from = &l.lane[urgent]
	}
	for {
		at := from.places[0]
		from.places[0] = place{}
		from.places = from.places[1:]
		if l.places[at.key] == at {
			l.leave(at)
			delete(l.places, at.key)
			return at.key
		}
	}
}

func (l *lanes) setListed() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.listed = true
}

func (l *lanes) put(key Key, to int) {
	l.tickets++
	at := place{key, to, l.tickets}
	l.places[key] = at
	lane := &l.lane[to]
	lane.count++
	lane.places = append(lane.places, at)
	if len(lane.places) > 2*lane.count+64 {
		lane.places = slices.DeleteFunc(lane.places, func(p place) bool { return l.places[p.key] != p })
	}
}

// leave empties a place. It is removed when its turn comes, or when too many are empty.
func (l *lanes) leave(at place) {
	lane := &l.lane[at.lane]
	if lane.count--; lane.count == 0 {
		lane.places = nil
	}
}
