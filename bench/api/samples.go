package main

import (
	"slices"
	"time"
)

// sample is how long something took, and when it was done.
type sample struct {
	took time.Duration
	done time.Time
}

type samples []sample

// spread is how samples lie, in milliseconds.
type spread struct {
	P50 float64 `json:"p50ms"`
	P99 float64 `json:"p99ms"`
}

func (s samples) summary() spread {
	sorted := make([]time.Duration, len(s))
	for i, one := range s {
		sorted[i] = one.took
	}
	slices.Sort(sorted)
	return spread{P50: milliseconds(quantile(sorted, 0.50)), P99: milliseconds(quantile(sorted, 0.99))}
}

// quantile is the smallest of the sorted samples that at least the share q of them do not exceed.
func quantile(sorted []time.Duration, q float64) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	at := int(q * float64(len(sorted)))
	if float64(at) == q*float64(len(sorted)) && at > 0 {
		at--
	}
	return sorted[min(at, len(sorted)-1)]
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

func megabytes(bytes int64) float64 { return float64(bytes) / 1e6 }
