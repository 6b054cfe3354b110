package nftables

import (
	"context"
	"errors"
	"time"

	"portal/internal/proxy/nf"
)

// CheckInterval is often, since a service that loads its own rules mostly flushes everybody's first.
func (t *tables) CheckInterval() time.Duration { return 4 * time.Second }

// Check costs one question while nobody else changes nftables, and otherwise reads our tables and compares all of them.
func (t *tables) Check(context.Context) error {
	if t.byFamily == nil {
		return errors.New("nothing has been written yet")
	}
	t.deleteReplaced()
	var list []*nf.Table
	for _, one := range t.byFamily {
		list = append(list, one.at)
	}
	return t.socket.Check(list...)
}

// deleteReplaced deletes sets that were replaced. It doesn't matter when: the next full sync would delete them too.
func (t *tables) deleteReplaced() {
	b := nf.NewBatch()
	for _, one := range t.byFamily {
		for _, name := range one.late {
			b.DeleteSet(one.at, name)
		}
	}
	if b.Empty() || t.socket.Commit(b) != nil {
		return
	}
	for _, one := range t.byFamily {
		one.late = nil
	}
}
