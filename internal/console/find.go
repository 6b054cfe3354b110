package console

import (
	"context"
	"encoding/json"
	"errors"
	"time"
)

// rightsEvery is how soon it is found out anew what may be looked at, after rights have changed.
const rightsEvery = 2 * time.Second

// find has findings looked for at once, and again some time after something of the Service changed: see survey.
func (p *page) find(ctx context.Context, c *Console, s *session, f *feed, k key) {
	for ctx.Err() == nil {
		held, release, err := p.hold(ctx, s.account)
		if err != nil {
			return
		}
		within, stop := context.WithCancel(ctx)
		end := context.AfterFunc(held.ended, stop) // rights have changed: what may be looked at is found out anew
		p.findIn(within, c, held, f, k)
		end()
		stop()
		release()
		if !sleep(ctx, rightsEvery) {
			return
		}
	}
}

// findIn has findings looked for in objects, until ctx ends.
func (p *page) findIn(ctx context.Context, c *Console, o *objects, f *feed, k key) {
	if !p.awaitEvents(ctx) || o.prepare(ctx, k.namespace) != nil {
		return
	}
	all := o.survey(c, o.scope(k.namespace, !p.hides("Events")))
	var one *surveyed
	p.awaitReasons(ctx, f, k, func() {
		if one == nil {
			one = all.join(p, k)
		} else {
			all.request()
		}
	})
	all.leave(one)
}

// awaitEvents waits until the page has its Events, or it is known that it may not have them, a while at most.
func (p *page) awaitEvents(ctx context.Context) bool {
	select {
	case <-p.eventsListed:
	case <-time.After(listPatience):
	case <-ctx.Done():
	}
	return ctx.Err() == nil
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

func (p *page) hides(what string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.hidden[what]
}

// awaitReasons calls look, and again whenever the Service is not as it was, until ctx ends. Changes of others don't wake it.
func (p *page) awaitReasons(ctx context.Context, f *feed, k key, look func()) {
	at, changes := p.version(f, k)
	seen := p.state(f, k)
	look()
	for {
		select {
		case <-changes.feed:
		case <-changes.page:
		case <-ctx.Done():
			return
		}
		if !sleep(ctx, coalesce) {
			return
		}
		before := at
		if at, changes = p.version(f, k); at == before {
			continue
		}
		if now := p.state(f, k); now != seen {
			seen = now
			look()
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
