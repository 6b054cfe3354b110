package main

import (
	"fmt"
	"io"
	"time"
)

// teller says what is going on, for whoever waits.
type teller struct {
	out     io.Writer
	started time.Time
	subject string
}

func newTeller(out io.Writer) *teller { return &teller{out: out, started: time.Now()} }

// about says what the next lines are about.
func (t *teller) about(format string, args ...any) { t.subject = fmt.Sprintf(format, args...) }

func (t *teller) progress(format string, args ...any) {
	elapsed := time.Since(t.started).Round(time.Second)
	fmt.Fprintf(t.out, "%6s  %s: %s\n", elapsed, t.subject, fmt.Sprintf(format, args...))
}
