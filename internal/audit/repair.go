package audit

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"

	clientv3 "go.etcd.io/etcd/client/v3"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"portal/internal/alloc"
	"portal/internal/apiserver/registry/service"
)

// repair is one write that puts a claim right, if both the claim and the Service are still what the audit saw.
type repair struct {
	on alloc.Claim
	// key is the claim's, and seen its revision; 0 if there was none.
	key  string
	seen int64
	// guard is the Service's key, and guardSeen its revision; no key if no Service has to do with it.
	guard     string
	guardSeen int64
	// owner is whose the claim shall be; nil removes it.
	owner *service.Owner
}

// Outcome is what became of a repair.
type Outcome string

// Outcomes.
const (
	Repaired Outcome = "repaired"
	// Changed means that somebody wrote the Service or the claim after the audit read them: nothing was done.
	Changed Outcome = "changed"
	Failed  Outcome = "failed"
)

// Repair is a finding and what was done about it.
type Repair struct {
	Finding
	Outcome Outcome `json:"outcome"`
	Error   string  `json:"error,omitempty"`
}

// repairsAtOnce hides the time that etcd takes to write to its disk: it groups what comes together.
const repairsAtOnce = 16

// repairAll does what can be done about the findings, each on its own, so that one which fails stops no other.
func (a *Auditor) repairAll(ctx context.Context, findings []Finding) []Repair {
	var out []Repair
	for _, f := range findings {
		if f.repair != nil {
			out = append(out, Repair{Finding: f})
		}
	}
	var group sync.WaitGroup
	places := make(chan struct{}, repairsAtOnce)
	for i := range out {
		places <- struct{}{}
		group.Go(func() {
			defer func() { <-places }()
			out[i].attempt(ctx, a)
		})
	}
	group.Wait()
	return out
}

func (r *Repair) attempt(ctx context.Context, a *Auditor) {
	err := a.commit(ctx, r.repair)
	switch {
	case err == nil:
		r.Outcome = Repaired
	case errors.Is(err, errChanged):
		r.Outcome = Changed
	default:
		r.Outcome, r.Error = Failed, err.Error()
	}
}

var errChanged = errors.New("it was changed after the audit read it")

func (a *Auditor) commit(ctx context.Context, r *repair) error {
	op := clientv3.OpDelete(r.key)
	if r.owner != nil {
		value, err := a.claimFor(ctx, r)
		if err != nil {
			return err
		}
		op = clientv3.OpPut(r.key, string(value))
	}
	// A key that does not exist has the revision 0.
	conditions := []clientv3.Cmp{clientv3.Compare(clientv3.ModRevision(r.key), "=", r.seen)}
	if r.guard != "" {
		conditions = append(conditions, clientv3.Compare(clientv3.ModRevision(r.guard), "=", r.guardSeen))
	}
	resp, err := a.opts.KV.Txn(ctx).If(conditions...).Then(op).Commit()
	if err != nil {
		return fmt.Errorf("write %s: %w", r.key, err)
	}
	if !resp.Succeeded {
		return errChanged
	}
	return nil
}

// claimFor is the claim as the API server would have written it.
func (a *Auditor) claimFor(ctx context.Context, r *repair) ([]byte, error) {
	if !r.on.Addr.IsValid() {
		return json.Marshal(r.owner)
	}
	svc := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: r.owner.Namespace, Name: r.owner.Name, UID: uid(*r.owner)}}
	object := service.NewIPAddress(svc, r.on.Addr)
	if r.seen != 0 {
		if err := a.keepIdentity(ctx, r, object); err != nil {
			return nil, err
		}
	}
	return runtime.Encode(a.opts.Networking, object)
}

// keepIdentity carries over from a stored IPAddress what does not say whose it is: to watchers it stays the same
// object, and what users wrote on it stays theirs. Nothing can be kept of one that can't be read.
func (a *Auditor) keepIdentity(ctx context.Context, r *repair, next *networkingv1.IPAddress) error {
	resp, err := a.opts.KV.Get(ctx, r.key)
	if err != nil {
		return fmt.Errorf("read %s: %w", r.key, err)
	}
	if len(resp.Kvs) == 0 || resp.Kvs[0].ModRevision != r.seen {
		return errChanged
	}
	stored, err := decode[*networkingv1.IPAddress](a.opts.Networking, resp.Kvs[0].Value)
	if err != nil || stored.Name != next.Name {
		return nil
	}
	labels := next.Labels
	stored.ObjectMeta.DeepCopyInto(&next.ObjectMeta)
	next.Generation++
	if next.Labels == nil {
		next.Labels = map[string]string{}
	}
	for key, value := range labels {
		next.Labels[key] = value
	}
	return nil
}
