package report

import (
	"slices"
	"time"
)

// Quantile is the smallest of some durations that at least the share q of them does not exceed, in milliseconds.
func Quantile(all []time.Duration, q float64) float64 {
	if len(all) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(all))
	at := int(q * float64(len(sorted)))
	if float64(at) == q*float64(len(sorted)) && at > 0 {
		at--
	}
	return Milliseconds(sorted[min(at, len(sorted)-1)])
}

// Milliseconds of a duration.
func Milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// Median of some figures.
func Median(all []float64) float64 {
	if len(all) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(all))
	return sorted[len(sorted)/2]
}

// Max of some figures; 0 of none.
func Max(all []float64) (out float64) {
	for i, v := range all {
		if i == 0 || v > out {
			out = v
		}
	}
	return out
}

// Mean of some figures; 0 of none.
func Mean(all []float64) (out float64) {
	for _, v := range all {
		out += v / float64(len(all))
	}
	return out
}
