package jobs

import (
	"math"
	"time"
)

// Seconds is so many seconds, or the longest time that there is: the API takes any number.
func Seconds(n int64) time.Duration {
	const most = math.MaxInt64 / int64(time.Second)
	return time.Duration(min(max(n, -most), most)) * time.Second
}
