package accesslog

import (
	"bytes"
	"slices"
)

// send is the oldest object, which stays until it was sent.
func (o *log) send() (first object, found bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.pending) == 0 {
		return object{}, false
	}
	o.sending = true
	return o.pending[0], true
}

// sent says how that went.
func (o *log) sent(ok bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.sending = false
	if ok {
		o.pending = slices.Delete(o.pending, 0, 1) // which lets go of the data
	}
}

// makeRoom drops lines until there is room again. Whoever has the most loses its oldest ones, so a destination that has not more than its share loses none:
// what one bucket does not take is not at the cost of others.
func (l *Logs) makeRoom() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for most := l.options.MaxBytes; l.held.Load() > most; most = l.options.MaxBytes - l.options.MaxBytes/roomShare {
		var largest *log
		size := 0
		for _, one := range l.byName {
			if n := one.droppable(); n > size {
				largest, size = one, n
			}
		}
		if largest == nil {
			return // all of it is on its way
		}
		freed, lines := largest.drop(int(l.options.MaxBytes / roomShare))
		l.held.Add(-int64(freed))
		largest.stats.Dropped.Add(uint64(lines))
	}
}

// waiting are the objects that are not on their way. The caller holds mu.
func (o *log) waiting() []object {
	if o.sending {
		return o.pending[1:]
	}
	return o.pending
}

// droppable is how many bytes could be dropped.
func (o *log) droppable() int {
	o.mu.Lock()
	defer o.mu.Unlock()
	n := len(o.lines)
	for _, w := range o.waiting() {
		n += len(w.data)
	}
	return n
}

// drop drops the oldest object, or if there is none the oldest lines, of at least so many bytes together if there are as many.
func (o *log) drop(least int) (size, lines int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if w := o.waiting(); len(w) > 0 {
		oldest, at := w[0].data, len(o.pending)-len(w)
		o.pending = slices.Delete(o.pending, at, at+1)
		return len(oldest), bytes.Count(oldest, newline)
	}
	size = len(o.lines)
	if from := max(least-1, 0); from < size {
		size = from + bytes.IndexByte(o.lines[from:], '\n') + 1 // every line has an end
	}
	lines = bytes.Count(o.lines[:size], newline)
	o.lines = append(o.lines[:0], o.lines[size:]...)
	return size, lines
}

var newline = []byte("\n")
