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

type packed map[Key]string

func (p packed) get(k Key) *Entry {
	if s, ok := p[k]; ok {
		return unpackEntry(s)
	}
	return nil
}

func (p packed) set(k Key, e *Entry) { p[k] = packEntry(e) }
func (p packed) remove(k Key)        { delete(p, k) }

func (p packed) keys(do func(Key, bool)) {
	for k, s := range p {
		do(k, hasService(s))
	}
}

func (p packed) clone() map[Key]*Entry {
	out := make(map[Key]*Entry, len(p))
	for k, s := range p {
		out[k] = unpackEntry(s)
	}
	return out
}
