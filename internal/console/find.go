package console

import (
	"context"
	"encoding/json"
	"errors"
	"reflect"
	"time"

	"portal/internal/explain"
)

const (
	// findingsEvery is the shortest time between two looks for findings. Looks that take long are rarer: at most a tenth of the time
	// is spent on them.
	findingsEvery   = 2 * time.Second
	findingsTimeout = 20 * time.Second
	// longestRest is after what time there is another look all the same.
	longestRest = 30 * time.Second
	// settle is how long a look waits after a change: what is watched for findings may come a little later than what is shown.
	settle = 300 * time.Millisecond
	// aroundEvery is how soon a change elsewhere in the namespace has a page look again, and findingsAnyway when it looks without a
	// change: what nodes report is not watched.
	aroundEvery    = 10 * time.Second
	findingsAnyway = time.Minute
)

// find looks for findings at once, and again some time after something of the Service changed.
func (p *page) find(ctx context.Context, c *Console, s *session, f *feed, k key) {
	objects, release, err := p.hold(ctx, s.account)
	if err != nil {
		return
	}
	defer func() { release() }()
	first := true
	for ctx.Err() == nil {
		if objects.ended.Err() != nil { // rights have changed
			release()
			if objects, release, err = p.hold(ctx, s.account); err != nil {
				release = func() {}
				return
			}
		}
		started := time.Now()
		at, _ := p.version(f, k)
		seen := p.state(f, k)
		found, revision, err := p.lookFor(ctx, c, s, objects, k, first)
		rest := min(max(findingsEvery, 10*time.Since(started)), longestRest)
		if err != nil { // what was found before stays, and is looked for again whether something changes or not
			if !sleep(ctx, rest) {
				return
			}
			continue
		}
		first = false
		p.changeIf(func() bool {
			before := p.findings
			p.findings = found
			return !reflect.DeepEqual(before, found)
		})
		if !sleep(ctx, rest) {
			return
		}
		p.awaitReason(ctx, f, k, at, seen, func() bool { return objects.touchedAt(k.namespace) != revision || objects.ended.Err() != nil })
		if !sleep(ctx, settle) {
			return
		}
	}
}

// hold waits until the account can have objects. The page says meanwhile why it can't.
func (p *page) hold(ctx context.Context, a *account) (*objects, func(), error) {
	for {
		held, release, err := a.hold()
		if err == nil || !errors.Is(err, errTooManyFeeds) {
			p.change(func() { p.unexplained = "" })
			return held, release, err
		}
		p.change(func() { p.unexplained = err.Error() })
		if !sleep(ctx, aroundEvery) {
			return nil, nil, ctx.Err()
		}
	}
}

// lookFor looks once.
func (p *page) lookFor(ctx context.Context, c *Console, s *session, o *objects, k key, first bool) (found []Finding, revision uint64, err error) {
	ctx, cancel := context.WithTimeout(ctx, findingsTimeout)
	defer cancel()
	subject := Subject{Namespace: k.namespace, Name: k.name, Config: s.config, Turn: func(ctx context.Context) (func(), error) {
		return c.turn.take(ctx, func(took time.Duration) time.Duration {
			if first { // somebody waits
				return 0
			}
			return restShare * took
		})
	}}
	if o.prepare(ctx, k.namespace) == nil {
		subject.Known, subject.Covered, revision = o.evidence(k.namespace)
	} else {
		subject.Known, subject.Covered = &explain.Evidence{}, map[string]bool{}
	}
	if subject.Known.Events = p.evidence(); !p.hides("Events") {
		subject.Covered["events"] = true
	}
	found, err = c.opts.Findings(ctx, subject)
	return found, revision, err
}

// restShare bounds what all pages together compute: after each look, nobody does for so many times as long.
const restShare = 4

func (p *page) hides(what string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.hidden[what]
}

// awaitReason waits until it is worth looking again: the Service is not as it was seen, or after a while because of something around it.
func (p *page) awaitReason(ctx context.Context, f *feed, k key, at version, seen string, around func() bool) {
	anyway := time.After(findingsAnyway)
	tick := time.NewTicker(aroundEvery)
	defer tick.Stop()
	for ctx.Err() == nil {
		now, changes := p.version(f, k)
		if now != at {
			at = now
			if p.state(f, k) != seen {
				return
			}
		}
		select {
		case <-changes.feed:
			sleep(ctx, coalesce)
		case <-changes.page:
			sleep(ctx, coalesce)
		case <-tick.C:
			if around() {
				return
			}
		case <-anyway:
			return
		case <-ctx.Done():
		}
	}
}

// state changes when something of the Service does, findings excepted.
func (p *page) state(f *feed, k key) string {
	out := p.build(f, k)
	out.Findings, out.Status, out.Timeline, out.Unexplained = nil, Status{}, nil, ""
	data, err := json.Marshal(out)
	if err != nil {
		return err.Error()
	}
	return string(data)
}

// sleep waits, and reports whether ctx goes on.
func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}
