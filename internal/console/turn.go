package console

import (
	"context"
	"time"
)

// turn lets one page at a time compute: findings and traces of a large cluster take a processor for a while.
type turn chan struct{}

// take waits for the turn. After release, the next one has it when rest has passed, which depends on how long this one took.
func (t turn) take(ctx context.Context, rest func(took time.Duration) time.Duration) (release func(), err error) {
	select {
	case t <- struct{}{}:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	started := time.Now()
	return func() {
		pause := rest(time.Since(started))
		if pause <= 0 {
			<-t
			return
		}
		time.AfterFunc(pause, func() { <-t })
	}, nil
}
