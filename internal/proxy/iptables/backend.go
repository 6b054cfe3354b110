package iptables

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"portal/internal/intent"
	"portal/internal/plan"
	"portal/internal/proxy/backend"
)

// tablesBackend is the mode at work.
type tablesBackend struct {
	mark     mark
	tools    map[intent.Family]tool
	rulesets map[intent.Family]*ruleset
	// direct is nil where commands write.
	direct *direct
	// closed: packets don't come to what was written yet. writing gets the outcome of what is still being prepared.
	closed  bool
	writing chan error
	// unsure: the last Apply failed or there was none, so that what the tables hold is not what rulesets say. relook: commands
	// have written it, and which chains there are is not known.
	unsure, relook bool
	// localnet: we have turned route_localnet on, and the table doesn't say so yet.
	localnet bool
}

// Close leaves all in the kernel.
func (b *tablesBackend) Close() error {
	if b.direct == nil {
		return nil
	}
	_ = b.prepared()
	return b.direct.socket.Close()
}

// Apply writes what changed, over netlink where the tables are nf_tables'. What that can't do (a kernel may know an
// extension in another revision) is for the commands, which from then on write everything.
func (b *tablesBackend) Apply(ctx context.Context, next *plan.Snapshot, delta *plan.Delta) error {
	full := delta.Full || delta.Facts || b.unsure || b.relook
	b.unsure = true
	_ = b.prepared() // if that failed, there is nothing to go on from
	if b.direct == nil {
		return b.command(ctx, next, delta, full)
	}
	err := b.write(ctx, next, delta, full && (!delta.Ahead || delta.Facts || !b.closed), false)
	if err == nil {
		b.unsure, b.relook, b.localnet, b.closed = false, false, false, false
		return nil
	}
	b.closed = false
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if failed := b.command(ctx, next, delta, true); failed != nil {
		return failed
	}
	if full && !passing(err) {
		// It was no surprise in the tables, then.
		_ = b.direct.socket.Close()
		b.direct = nil
	}
	b.relook = b.direct != nil
	return nil
}

// passing says whether an error may be another the next time.
func passing(err error) bool {
	for _, errno := range []unix.Errno{unix.ENOMEM, unix.ENOBUFS, unix.EAGAIN, unix.EINTR} {
		if errors.Is(err, errno) {
			return true
		}
	}
	return false
}

// enough is how many frontends are worth a transaction.
const enough = 64

// Prepare writes everything but the jumps by which packets come in.
func (b *tablesBackend) Prepare(ctx context.Context, next *plan.Snapshot) error {
	if b.direct == nil {
		return fmt.Errorf("%w: commands take longer than lists", errors.ErrUnsupported)
	}
	if b.closed && (next.Changed() < enough || len(b.writing) < cap(b.writing)) {
		return backend.ErrLater
	}
	if err := b.prepared(); err != nil {
		return err
	}
	delta := next.Delta()
	b.unsure = true
	if err := b.write(ctx, next, delta, !delta.Ahead || delta.Facts, true); err != nil {
		b.closed = false
		return err
	}
	b.closed = true
	return nil
}

// prepared waits until what is being prepared has been.
func (b *tablesBackend) prepared() error {
	if b.writing == nil {
		return nil
	}
	err := <-b.writing
	b.writing = nil
	if err != nil {
		b.closed = false
	}
	return err
}

// write writes what changed in one transaction. closed: packets are not to come in yet.
func (b *tablesBackend) write(ctx context.Context, next *plan.Snapshot, delta *plan.Delta, full, closed bool) error {
	t := begin()
	fresh := maps.Clone(b.rulesets)
	for _, f := range []intent.Family{intent.IPv4, intent.IPv6} {
		tool, ok := b.tools[f]
		switch wanted := slices.Contains(next.Facts.Families, f); {
		case !ok && wanted:
			return missing(f)
		case !wanted && !closed && (full || b.closed) && ok:
			delete(fresh, f)
			if err := tool.clear(ctx); err != nil {
				return err
			}
		case wanted && full:
			have, all, err := b.direct.look(f)
			if err != nil {
				return err
			}
			r := newRuleset(f, b.mark, next, liberal())
			r.takeOver(have)
			if closed && open(have) {
				return backend.ErrServing
			}
			if !closed {
				err = b.open(r, next.Facts, have)
			}
			if err != nil {
				return err
			}
			r.there = map[string]map[string]bool{}
			for _, table := range tables {
				t.prepare(f, table, all[table])
				r.there[table] = map[string]bool{}
				for _, name := range have[table].chains {
					r.there[table][name] = true
				}
			}
			fresh[f] = r
		case wanted:
			fresh[f].update(next, delta)
			if b.closed && !closed {
				if err := b.open(fresh[f], next.Facts, nil); err != nil {
					return err
				}
			}
		}
		if r := fresh[f]; r != nil {
			for _, table := range tables {
				t.write(f, table, r.section(table), r.there[table])
			}
		}
	}
	b.rulesets = fresh
	if closed {
		// Meanwhile more is planned.
		b.writing = make(chan error, 1)
		go func(d *direct, outcome chan<- error) { outcome <- d.commit(t) }(b.direct, b.writing)
		return nil
	}
	return b.direct.commit(t)
}

// command writes what changed through the commands. A table changes at once; after a failure between two tables or families
// the next call writes everything anew, so that a delta is never added to something unknown.
func (b *tablesBackend) command(ctx context.Context, next *plan.Snapshot, delta *plan.Delta, full bool) error {
	// Most of a small sync is commands that start: those that list run beside each other.
	before := map[intent.Family]map[string]func() (found, error){}
	for f, t := range b.tools {
		before[f] = map[string]func() (found, error){}
		for _, table := range tables {
			if full && slices.Contains(next.Facts.Families, f) {
				wait := sync.OnceValues(t.look(ctx, table))
				before[f][table] = wait
				defer wait() // whatever happens before somebody asks
			}
		}
	}
	for _, f := range []intent.Family{intent.IPv4, intent.IPv6} {
		t, ok := b.tools[f]
		wanted := slices.Contains(next.Facts.Families, f)
		var err error
		switch {
		case !ok && wanted:
			err = missing(f)
		case !wanted && full && ok:
			delete(b.rulesets, f)
			err = t.clear(ctx)
		case wanted && full:
			err = b.replace(ctx, t, next, before[f])
		case wanted:
			b.rulesets[f].update(next, delta)
			err = t.restore(ctx, b.rulesets[f].print())
		}
		if err != nil {
			return err
		}
	}
	b.unsure, b.localnet = false, false
	return nil
}

// clear removes what is ours, where there is anything at all.
func (t tool) clear(ctx context.Context) error {
	if n, err := t.inUse(ctx); err != nil || n == 0 {
		return err
	}
	return t.cleanup(ctx)
}

// replace writes everything of a family, and removes what earlier processes left.
func (b *tablesBackend) replace(ctx context.Context, t tool, next *plan.Snapshot, before map[string]func() (found, error)) error {
	r := newRuleset(t.family, b.mark, next, liberal())
	have := map[string]found{}
	for _, table := range tables {
		var err error
		if have[table], err = before[table](); err != nil {
			return err
		}
	}
	r.takeOver(have)
	if err := b.open(r, next.Facts, have); err != nil {
		return err
	}
	if err := t.restore(ctx, r.print()); err != nil {
		return err
	}
	b.rulesets[t.family] = r
	return nil
}

// open says whether packets come in.
func open(have map[string]found) bool {
	for _, f := range have {
		for _, there := range f.jumps {
			if there {
				return true
			}
		}
	}
	return false
}

func (r *ruleset) section(table string) *section {
	if table == "filter" {
		return &r.filter
	}
	return &r.nat
}

// takeOver removes the chains that earlier processes left and nobody needs.
func (r *ruleset) takeOver(have map[string]found) {
	for _, table := range tables {
		s := r.section(table)
		for _, name := range have[table].chains {
			if _, stays := s.write[name]; !stays && name != localnetChain {
				s.remove(name)
			}
		}
	}
}

func missing(f intent.Family) error {
	return fmt.Errorf("the commands for IPv%d are not on this machine any more: install the package iptables", f)
}

// open lets packets in, by those ways that are not open yet.
func (b *tablesBackend) open(r *ruleset, facts *plan.Facts, have map[string]found) error {
	if loopback(r.family, facts) {
		changed, err := openLocalnet()
		if err != nil {
			return err
		}
		if b.localnet = b.localnet || changed; b.localnet {
			r.filter.set(localnetChain, nil)
		}
	}
	for _, table := range tables {
		for _, jump := range jumps[table] {
			if !have[table].jumps["-A "+jump] {
				s := r.section(table)
				s.jumps = append(s.jumps, "-I "+jump)
			}
		}
	}
	return nil
}

// Check looks at the jumps, and at the chains that a flush of ours would have emptied.
func (b *tablesBackend) Check(ctx context.Context) error {
	if b.unsure || len(b.rulesets) == 0 {
		return errors.New("what the tables hold is not known")
	}
	for f := range b.rulesets {
		if b.direct != nil {
			if err := b.direct.check(f); err != nil {
				return err
			}
			continue
		}
		t := b.tools[f]
		for _, table := range tables {
			if _, err := t.run(ctx, nil, t.name(""), "-w", lockWait, "-t", table, "-S", canaryChain); err != nil {
				return fmt.Errorf("the %s table was flushed: %w", table, err)
			}
			for _, jump := range jumps[table] {
				from, to, _ := strings.Cut(jump, " -j ")
				if err := t.has(ctx, table, from, "-A "+jump); err != nil {
					return err
				}
				if err := t.has(ctx, table, to, "-A "+to+" "); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// has says whether a chain holds a rule that begins so.
func (t tool) has(ctx context.Context, table, chain, rule string) error {
	text, err := t.run(ctx, nil, t.name(""), "-w", lockWait, "-t", table, "-S", chain)
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(text)) {
		if strings.HasPrefix(strings.TrimSuffix(line, "\n")+" ", strings.TrimSuffix(rule, " ")+" ") {
			return nil
		}
	}
	return fmt.Errorf("the %s table's chain %s has lost its rule %q", table, chain, rule)
}
