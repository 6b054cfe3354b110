package main

import (
	"fmt"
	"io"
	"time"
)

// progressLog prints progress with the time since the start.
type progressLog struct {
	out     io.Writer
	started time.Time
	subject string
}

func newProgressLog(out io.Writer) *progressLog { return &progressLog{out: out, started: time.Now()} }

// setSubject sets the prefix of the following lines.
func (t *progressLog) setSubject(format string, args ...any) {
	t.subject = fmt.Sprintf(format, args...)
}

func (t *progressLog) printf(format string, args ...any) {
	elapsed := time.Since(t.started).Round(time.Second)
	fmt.Fprintf(t.out, "%6s  %s: %s\n", elapsed, t.subject, fmt.Sprintf(format, args...))
}
