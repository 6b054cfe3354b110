package intent

import "maps"

// entries holds what is known by Service name: as it is, or packed.
type entries interface {
	get(Key) *Entry // nil for nothing
	set(Key, *Entry)
	remove(Key)
	// keys calls do with each key and whether there is a Service, not only slices.
	keys(do func(k Key, service bool))
	clone() map[Key]*Entry
}

type whole map[Key]*Entry

func (w whole) get(k Key) *Entry    { return w[k] }
func (w whole) set(k Key, e *Entry) { w[k] = e }
func (w whole) remove(k Key)        { delete(w, k) }

func (w whole) keys(do func(Key, bool)) {
	for k, e := range w {
		do(k, e.Service != nil)
	}
}

func (w whole) clone() map[Key]*Entry { return maps.Clone(w) }

// packed holds entries packed, but for those with more endpoints than upTo, if that is given: they are few, and to unpack them
// for each change would cost more than they take.
type packed struct {
	small map[Key]string
	large whole
	upTo  int
}

func newPacked(upTo, room int) packed { return packed{make(map[Key]string, room), whole{}, upTo} }

func (p packed) get(k Key) *Entry {
	if s, ok := p.small[k]; ok {
		return unpackEntry(s)
	}
	return p.large[k]
}

func (p packed) set(k Key, e *Entry) {
	if p.upTo > 0 && e.endpoints() > p.upTo {
		delete(p.small, k)
		p.large[k] = e
		return
	}
	delete(p.large, k)
	p.small[k] = packEntry(e)
}

func (p packed) remove(k Key) {
	delete(p.small, k)
	delete(p.large, k)
}

func (p packed) keys(do func(Key, bool)) {
	for k, s := range p.small {
		do(k, hasService(s))
	}
	p.large.keys(do)
}

func (p packed) clone() map[Key]*Entry {
	out := make(map[Key]*Entry, len(p.small)+len(p.large))
	for k, s := range p.small {
		out[k] = unpackEntry(s)
	}
	maps.Copy(out, p.large)
	return out
}

func (e *Entry) endpoints() (n int) {
	for _, s := range e.Slices {
		n += len(s.Endpoints)
	}
	return n
}
