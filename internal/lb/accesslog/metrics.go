package accesslog

import "github.com/prometheus/client_golang/prometheus"

var (
	linesMetric    = prometheus.NewDesc("portal_lb_access_log_lines_total", "Lines of access logs that were taken.", []string{"balancer"}, nil)
	droppedMetric  = prometheus.NewDesc("portal_lb_access_log_dropped_total", "Lines of access logs that were dropped because their bucket could not be written for too long and memory was full.", []string{"balancer"}, nil)
	objectsMetric  = prometheus.NewDesc("portal_lb_access_log_objects_total", "Objects written to buckets.", []string{"balancer"}, nil)
	failuresMetric = prometheus.NewDesc("portal_lb_access_log_failures_total", "Attempts to write to a bucket that failed.", []string{"balancer"}, nil)
)

// Describe sends nothing: which balancers there are changes.
func (l *Logs) Describe(chan<- *prometheus.Desc) {}

// Collect sends the counters of all balancers.
func (l *Logs) Collect(out chan<- prometheus.Metric) {
	seen := map[string]bool{}
	for _, one := range l.all() {
		balancer := one.to.balancer
		if seen[balancer] {
			continue
		}
		seen[balancer] = true
		lines, dropped, objects, failures := l.Stats(balancer)
		for desc, value := range map[*prometheus.Desc]uint64{linesMetric: lines, droppedMetric: dropped, objectsMetric: objects, failuresMetric: failures} {
			out <- prometheus.MustNewConstMetric(desc, prometheus.CounterValue, float64(value), balancer)
		}
	}
}
