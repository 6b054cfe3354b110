package top

import (
	"math"
	"time"
)

// Latency is a histogram of times until a connection's first answer, from the node where the connection meets the Service. Histograms of
// several nodes can be added up.
type Latency struct {
	Count uint64 `json:"count"`
	// Buckets count times up to Bound(i), and above the bound before; those at the end that are empty are left out.
	Buckets []uint64 `json:"buckets"`
}

const (
	// firstBound is the first bucket's; each bound is 2^(1/4) times the one before, so that a quantile is off by a tenth at most.
	firstBound   = 20 * time.Microsecond
	bucketsTwice = 4
	maxBuckets   = 20 * bucketsTwice // up to 20 s
)

// Bound is the longest time in a bucket.
func Bound(bucket int) time.Duration {
	return time.Duration(float64(firstBound) * math.Exp2(float64(bucket)/bucketsTwice))
}

func (l *Latency) note(d time.Duration) {
	bucket := 0
	if d > firstBound {
		bucket = min(maxBuckets, int(math.Ceil(bucketsTwice*math.Log2(float64(d)/float64(firstBound)))))
	}
	l.grow(bucket + 1)
	l.Buckets[bucket]++
	l.Count++
}

func (l *Latency) grow(n int) {
	for len(l.Buckets) < n {
		l.Buckets = append(l.Buckets, 0)
	}
}

// Add adds another's times.
func (l *Latency) Add(o *Latency) {
	l.grow(min(len(o.Buckets), maxBuckets+1))
	for i := range l.Buckets {
		if i < len(o.Buckets) {
			l.Buckets[i] += o.Buckets[i]
		}
	}
	l.Count += o.Count
}

// Quantile is the time that a part of all connections did not exceed, as far as buckets say; 0 if there were none.
func (l *Latency) Quantile(part float64) time.Duration {
	rank, seen := uint64(math.Ceil(part*float64(l.Count))), uint64(0)
	for i, n := range l.Buckets {
		if seen += n; n > 0 && seen >= rank {
			return Bound(i)
		}
	}
	return 0
}
