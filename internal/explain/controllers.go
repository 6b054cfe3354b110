package explain

import (
	"fmt"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
)

// leaders are the Leases of those who write endpoints: Portal's controllers, or Kubernetes'.
var leaders = []string{"portal-controllers", "kube-controller-manager"}

// checkControllers looks for the leader among the controllers, and for Services that nobody looks after.
func checkControllers(v *View) []Finding {
	stale := v.unattended()
	lease := v.leader()
	r := Ref{"Lease", "kube-system", leaders[0]}
	var f Finding
	switch {
	case lease != nil && v.expired(lease):
		r.Name = lease.Name
		who := ""
		if lease.Spec.HolderIdentity != nil {
			who = *lease.Spec.HolderIdentity
		}
		f = Finding{Sure: Certain, Since: since(lease.Spec.RenewTime.Time)}
		f.Verdict = fmt.Sprintf("no controllers run: the Lease %s has not been renewed for %s, so endpoints don't follow Pods", lease.Name, ago(v.Now.Sub(lease.Spec.RenewTime.Time)))
		if who == "" {
			f.Verdict = fmt.Sprintf("no controllers run: nobody holds the Lease %s, so endpoints don't follow Pods", lease.Name)
		} else {
			f.Evidence = []string{fmt.Sprintf("the last leader was %s", who)}
		}
	case len(stale) > 0:
		f = Finding{Sure: Likely, Verdict: fmt.Sprintf("no controller writes endpoints: %s have ready Pods that are in no EndpointSlice", count(len(stale), "Service", "Services"))}
		if lease != nil {
			f.Evidence = []string{fmt.Sprintf("the Lease %s is held, so controllers run: the endpointslice controller may be turned off (--controllers)", lease.Name)}
		} else if v.sees("leases") {
			f.Evidence = []string{"there is no Lease of controllers in kube-system"}
		}
	default:
		return nil
	}
	f.Code, f.Object, f.Severity, f.Affects = "controllers-stopped", r, Degraded, stale
	if len(stale) > 0 {
		f.Severity = Broken
	}
	f.Fix = []string{"portal controllers", kubectl("kube-system", "get lease %s -o yaml", r.Name)}
	if lease != nil && v.expired(lease) && lease.Spec.LeaseDurationSeconds != nil && time.Duration(*lease.Spec.LeaseDurationSeconds)*time.Second > 30*time.Second {
		f.Evidence = append(f.Evidence, fmt.Sprintf("others wait for the %d s of spec.leaseDurationSeconds", *lease.Spec.LeaseDurationSeconds))
		f.Fix = []string{kubectl("kube-system", "delete lease %s", r.Name)}
	}
	return []Finding{f}
}

func (v *View) leader() *coordinationv1.Lease {
	for _, name := range leaders {
		for i := range v.Leases {
			if l := &v.Leases[i]; l.Namespace == "kube-system" && l.Name == name {
				return l
			}
		}
	}
	return nil
}

func (v *View) expired(l *coordinationv1.Lease) bool {
	if l.Spec.HolderIdentity == nil || *l.Spec.HolderIdentity == "" {
		return l.Spec.RenewTime != nil && v.Now.Sub(l.Spec.RenewTime.Time) > settle
	}
	if l.Spec.RenewTime == nil || l.Spec.LeaseDurationSeconds == nil {
		return false
	}
	// Whoever lives renews it much more often than others would wait, however long that is.
	return v.Now.Sub(l.Spec.RenewTime.Time) > min(time.Duration(*l.Spec.LeaseDurationSeconds)*time.Second, 30*time.Second)+settle
}

// unattended are Services with ready Pods for whom no slice was ever written, or whose Pods are missing from it.
func (v *View) unattended() (out []Ref) {
	if !v.sees("endpointslices", "pods") {
		return nil
	}
	for _, s := range v.order {
		if !s.selects() || s.DeletionTimestamp != nil {
			continue
		}
		if f, ok := v.stale(s); ok && f.Severity == Broken {
			out = append(out, s.ref())
			continue
		}
		if len(s.Slices) == 0 && v.Now.Sub(s.CreationTimestamp.Time) > settle {
			out = append(out, s.ref()) // an empty slice is written even for a selector that matches nothing
		}
	}
	return out
}
