package iptables

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"portal/internal/intent"
	"portal/internal/plan"
	"portal/internal/proxy/nf"
)

// tablesBackend is the mode at work.
type tablesBackend struct {
	mark     mark
	log      *slog.Logger
	now      func() time.Time
	tools    map[intent.Family]tool
	rulesets map[intent.Family]*ruleset
	// direct is nil where commands write.
	direct *direct
	// retry is when netlink is tried again after a fallback to commands, after waiting for pause.
	retry     time.Time
	pause     time.Duration
	fallbacks uint64
	// unsure: the last Apply failed or there was none, so that what the tables hold is not what rulesets say.
	unsure bool
	// localnet: we have turned route_localnet on, and the table doesn't say so yet.
	localnet bool
}

// Close leaves everything in the kernel.
func (b *tablesBackend) Close() error {
	if b.direct == nil {
		return nil
	}
	return b.direct.Close()
}

// Fallbacks counts how often commands had to write because netlink failed.
func (b *tablesBackend) Fallbacks() uint64 { return b.fallbacks }

// After a fallback commands write for a time, which doubles with each fallback in a row.
const firstPause, longestPause = time.Minute, time.Hour

// Apply writes what changed, over netlink where the tables are nf_tables'. What that can't do (a kernel may know an
// extension in another revision) the commands do, which then write for a time.
func (b *tablesBackend) Apply(ctx context.Context, next *plan.Snapshot, delta *plan.Delta) error {
	full := delta.Full || delta.Facts || b.unsure
	b.unsure = true
	if b.direct == nil || b.now().Before(b.retry) {
		return b.command(ctx, next, delta, full)
	}
	err := b.write(ctx, next, delta, full || !b.retry.IsZero())
	if err == nil {
		b.unsure, b.localnet, b.retry, b.pause = false, false, time.Time{}, 0
		return nil
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if failed := b.command(ctx, next, delta, true); failed != nil {
		return failed
	}
	b.fallbacks++
	b.pause = min(max(firstPause, 2*b.pause), longestPause)
	b.retry = b.now().Add(b.pause)
	b.log.Warn("netlink failed, falling back to the iptables commands", "err", err, "retry", b.pause, "fallbacks", b.fallbacks)
	return nil
}

// write writes what changed in one transaction.
func (b *tablesBackend) write(ctx context.Context, next *plan.Snapshot, delta *plan.Delta, full bool) error {
	batch := nf.NewBatch()
	fresh := maps.Clone(b.rulesets)
	for _, f := range []intent.Family{intent.IPv4, intent.IPv6} {
		tool, ok := b.tools[f]
		switch wanted := slices.Contains(next.Facts.Families, f); {
		case !ok && wanted:
			return missing(f)
		case !wanted && full && ok:
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
			if err := b.open(r, next.Facts, have); err != nil {
				return err
			}
			for _, table := range tables {
				ensureBuiltin(batch, f, table, all[table])
				for _, name := range have[table].chains {
					if r.there[table][name] = (chainDigest{rules: 1}); name == localnetChain { // how many doesn't matter: it is flushed
						r.there[table][name] = chainDigest{}
					}
				}
			}
			fresh[f] = r
		case wanted:
			fresh[f].update(next, delta)
		}
		if r := fresh[f]; r != nil {
			for _, table := range tables {
				r.section(table).write(batch, f, table, r.there[table])
			}
		}
	}
	b.rulesets = fresh
	if !batch.Empty() {
		if err := b.direct.Commit(batch); err != nil {
			return err
		}
	}
	for _, r := range fresh {
		r.written(true)
	}
	return nil
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
			if err = t.restore(ctx, b.rulesets[f].print()); err == nil {
				b.rulesets[f].written(false)
			}
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
	// Chains that are kept as they are, but not ours to write, count too.
	r.written(false)
	b.rulesets[t.family] = r
	return nil
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
			if _, stays := s.whole[name]; !stays && name != localnetChain {
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
		for _, j := range jumps[table] {
			if !have[table].jumps["-A "+j.String()] {
				s := r.section(table)
				s.enter = append(s.enter, j)
			}
		}
	}
	return nil
}

// Check compares our chains with what was written, and looks for the jumps to them. Over netlink it costs one question while
// nobody else changes anything in nf_tables.
func (b *tablesBackend) Check(ctx context.Context) error {
	if b.unsure || len(b.rulesets) == 0 {
		return errors.New("what the tables hold is not known")
	}
	if b.direct == nil {
		return b.compare(func(f intent.Family, table string) (found, error) { return b.tools[f].list(ctx, table) })
	}
	return b.direct.Verify(func() error { return b.compare(b.direct.contents) })
}

func (b *tablesBackend) compare(contents func(intent.Family, string) (found, error)) error {
	for f, r := range b.rulesets {
		for _, table := range tables {
			have, err := contents(f, table)
			if err != nil {
				return err
			}
			if err := r.missing(table, have); err != nil {
				return fmt.Errorf("IPv%d: %w", f, err)
			}
		}
	}
	return nil
}
