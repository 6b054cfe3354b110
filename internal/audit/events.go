package audit

import (
	"context"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
)

// told is how many findings of one audit are reported one by one: an etcd that was restored from the wrong file may have
// tens of thousands, and the first hundred say so.
const told = 100

// component is the source of the Events.
const component = "portal-audit"

// events records Events while the Auditor runs.
type events struct {
	mu       sync.Mutex
	recorder record.EventRecorder
}

// start makes Events possible until the function that it returns is called.
func (e *events) start(ctx context.Context, client kubernetes.Interface) (stop func()) {
	if client == nil {
		return func() {}
	}
	// A finding that stays is one Event with a count, and an object with many findings has to wait: the defaults.
	broadcaster := record.NewBroadcaster(record.WithContext(ctx))
	broadcaster.StartRecordingToSink(&typedcorev1.EventSinkImpl{Interface: client.CoreV1().Events("")})
	e.set(broadcaster.NewRecorder(scheme.Scheme, corev1.EventSource{Component: component}))
	return func() {
		e.set(nil)
		broadcaster.Shutdown()
	}
}

func (e *events) set(recorder record.EventRecorder) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.recorder = recorder
}

func (e *events) warn(f Finding, message string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.recorder != nil {
		e.recorder.Event(&f.about, corev1.EventTypeWarning, string(f.Problem), message)
	}
}

// tell says in the log and in Events what was found and what was done about it.
func (a *Auditor) tell(ctx context.Context, found []Finding, report Report) {
	if len(found) == 0 {
		return
	}
	log := klog.FromContext(ctx)
	outcomes := make(map[*repair]*Repair, len(report.Repairs))
	for i := range report.Repairs {
		outcomes[report.Repairs[i].repair] = &report.Repairs[i]
	}
	for _, f := range found[:min(told, len(found))] {
		message := f.Message + "; to put it right: " + f.Remedy
		if done := outcomes[f.repair]; done != nil {
			message = f.Message + "; " + done.String()
		}
		a.events.warn(f, message)
		log.Info("The audit of addresses and ports found a problem", "problem", f.Problem, "message", message)
	}
	log.Info("The audit of addresses and ports is not clean", "revision", report.Revision, "services", report.Services,
		"found", len(found), "repairs", len(report.Repairs), "left", len(report.Findings))
}

// String says what was done, as the end of a sentence about what was found.
func (r *Repair) String() string {
	switch r.Outcome {
	case Repaired:
		return "repaired"
	case Changed:
		return "left alone: " + errChanged.Error()
	default:
		return "the repair failed: " + r.Error
	}
}
