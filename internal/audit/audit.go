// Package audit finds claims on addresses and ports that no Service holds, and Services that hold what they have not
// claimed. The API server writes both in one transaction, so that either is the work of somebody who edited etcd. It
// reports, repairs what is safe, and says what it did. It chooses and allocates nothing.
package audit

import (
	"context"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"k8s.io/apimachinery/pkg/runtime"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

// Name is what --controllers calls it.
const Name = "audit"

const (
	// settle is how long after its start the first audit comes, when the server has other things to do.
	settle = 5 * time.Second
	// retry is how soon an audit that could not be made is tried again.
	retry = 30 * time.Second
)

// Options are what an Auditor needs.
type Options struct {
	KV clientv3.KV
	// Core decodes Services, Networking decodes and encodes IPAddresses and ServiceCIDRs, as they are stored.
	Core       runtime.Decoder
	Networking runtime.Codec
	// NodePorts is the range that node ports come from.
	NodePorts utilnet.PortRange
	// Client writes Events; without one there are none.
	Client kubernetes.Interface
	// Interval is how often Run audits; if it is not positive, never.
	Interval time.Duration
	// Clock is the wall clock if nil.
	Clock clock.WithTicker
}

// Auditor audits, in the background and when asked.
type Auditor struct {
	opts   Options
	events events
	// turn is held by the audit that is under way: one at a time is work enough for etcd.
	turn chan struct{}
}

// Report is the outcome of an audit.
type Report struct {
	// Revision is that of etcd at which everything was read.
	Revision int64 `json:"revision"`
	// Services, Addresses and Ports are how many Services, IPAddresses and claims on ports there were.
	Services  int `json:"services"`
	Addresses int `json:"addresses"`
	Ports     int `json:"ports"`
	// Findings are what is wrong, after the repairs if there were any.
	Findings []Finding `json:"findings"`
	Repairs  []Repair  `json:"repairs,omitempty"`
}

// New makes an Auditor. Run is for the background; Audit and Handler work without it.
func New(opts Options) *Auditor {
	registerMetrics()
	if opts.Clock == nil {
		opts.Clock = clock.RealClock{}
	}
	return &Auditor{opts: opts, turn: make(chan struct{}, 1)}
}

// Run audits and repairs, shortly after its start and then at the interval, until ctx ends.
func (a *Auditor) Run(ctx context.Context) error {
	defer a.events.start(ctx, a.opts.Client)()
	if a.opts.Interval <= 0 {
		<-ctx.Done()
		return nil
	}
	timer := a.opts.Clock.NewTimer(min(settle, a.opts.Interval))
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-timer.C():
		}
		next := a.opts.Interval
		if _, err := a.Audit(ctx, true); err != nil && ctx.Err() == nil {
			klog.FromContext(ctx).Error(err, "audit of addresses and ports failed, retrying", "in", min(retry, next))
			next = min(retry, next)
		}
		timer.Reset(next)
	}
}

// Audit reads everything and checks it. With repair it repairs what is safe, reports it in Events and in the log, and
// reports what is left.
func (a *Auditor) Audit(ctx context.Context, repair bool) (Report, error) {
	select {
	case a.turn <- struct{}{}:
		defer func() { <-a.turn }()
	case <-ctx.Done():
		return Report{}, ctx.Err()
	}
	start := a.opts.Clock.Now()
	report, err := a.look(ctx)
	if err != nil {
		return Report{}, err
	}
	if repair {
		found := report.Findings
		if repairs := a.repairAll(ctx, found); len(repairs) > 0 {
			if report, err = a.look(ctx); err != nil {
				return Report{}, err
			}
			report.Repairs = repairs
		}
		a.tell(ctx, found, report)
	}
	measure(report)
	lastRun.Set(float64(a.opts.Clock.Now().Unix()))
	duration.Observe(a.opts.Clock.Since(start).Seconds())
	return report, nil
}

func (a *Auditor) look(ctx context.Context) (Report, error) {
	snapshot, err := a.read(ctx)
	if err != nil {
		return Report{}, err
	}
	report := Report{Revision: snapshot.Revision, Services: len(snapshot.Services), Findings: Check(snapshot)}
	for i := range snapshot.Claims {
		if snapshot.Claims[i].isPort() {
			report.Ports++
		} else {
			report.Addresses++
		}
	}
	if report.Findings == nil {
		report.Findings = []Finding{} // a list in JSON, if an empty one
	}
	return report, nil
}
