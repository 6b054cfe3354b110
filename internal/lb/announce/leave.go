package announce

import (
	"context"
	"maps"
	"net/netip"
	"slices"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// A process that ends is most often restarted, and to move an address breaks its connections. So its Lease is prolonged once more, with the
// addresses in it, and the process that follows inherits them. Other addresses go to nodes that announce something. If no process follows, the
// Lease ends, and other nodes take over.

// handOverDelay is how much longer than the Lease somebody stands in: other nodes see the Lease end a little later than it does.
const handOverDelay = 3 * time.Second

// leave gives the addresses to whom they are for: a process that follows on this node, or others.
func (a *Announcer) leave() {
	a.mu.Lock()
	a.releasing = true
	own, member, known := a.own, !a.renewed.IsZero(), !a.stale(time.Now())
	a.mu.Unlock()
	if !member {
		return
	}
	var grace time.Duration
	// Who could not renew its Lease does not know whose addresses they are by now.
	if a.Grace != nil && known && len(own) > 0 {
		grace = min(a.Grace(), a.members.longest) // nobody believes a Lease that is longer
	}
	if grace < time.Second { // the unit of a Lease
		a.release()
		return
	}
	until := time.Now().Add(grace)
	err := a.writeLast(func(l *coordinationv1.Lease) {
		now, seconds := metav1.NowMicro(), int32(grace/time.Second)
		l.Spec.HolderIdentity, l.Spec.RenewTime, l.Spec.LeaseDurationSeconds = &a.Identity, &now, &seconds
		l.Annotations[holdsAnnotation], l.Annotations[leavingAnnotation] = writeHolds(own), "true"
	})
	if err != nil {
		a.Log.Warn("could not prolong this node's Lease: others take over when it ends", "err", err)
		return
	}
	a.Log.Info("leaving addresses to the process that follows on this node", "addresses", len(own), "for", grace)
	if a.StandIn == nil {
		return
	}
	if err := a.StandIn(own, until.Add(handOverDelay)); err != nil {
		a.Log.Warn("nobody answers for this node's addresses until the next process does: neighbours that don't know them yet have to wait", "err", err)
	}
}

// release has others take over at once.
func (a *Announcer) release() {
	err := a.writeLast(func(l *coordinationv1.Lease) {
		empty := ""
		l.Spec.HolderIdentity = &empty
		delete(l.Annotations, holdsAnnotation)
	})
	if err != nil {
		a.Log.Warn("could not release this node's Lease: others take over when it ends", "err", err)
	}
}

// writeLast changes the Lease for the last time. A renewal that was broken off when the process was stopped may still be carried out, so what is known of the
// Lease may be outdated: it is read again then.
func (a *Announcer) writeLast(change func(*coordinationv1.Lease)) (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), a.Times.Lease)
	defer cancel()
	a.mu.Lock()
	lease := a.lease
	a.mu.Unlock()
	for range 3 {
		_, err = a.write(ctx, lease, func(l *coordinationv1.Lease) {
			if l.Annotations = maps.Clone(l.Annotations); l.Annotations == nil {
				l.Annotations = map[string]string{}
			}
			change(l)
		})
		if err == nil || ctx.Err() != nil {
			return err
		}
		lease = nil
	}
	return err
}

// inherit is what an earlier process of this node announced, if others still believe that it does. Both had this machine's clock; if that was turned
// meanwhile, nothing is inherited.
func (a *Announcer) inherit(l *coordinationv1.Lease, now time.Time) []netip.Addr {
	s := &l.Spec
	if s.HolderIdentity == nil || *s.HolderIdentity == "" || s.RenewTime == nil || s.LeaseDurationSeconds == nil {
		return nil
	}
	lasts := min(a.members.longest, time.Duration(*s.LeaseDurationSeconds)*time.Second)
	if age := now.Sub(s.RenewTime.Time); age < 0 || age >= lasts {
		return nil
	}
	return slices.Collect(maps.Keys(parseHolds(l.Annotations[holdsAnnotation])))
}

// held is what this node says that it announces.
func (a *Announcer) held() []netip.Addr {
	if a.settled {
		return a.own
	}
	return a.inherited
}

// settle notes that the process knows by itself what it announces.
func (a *Announcer) settle() {
	if a.settled {
		return
	}
	a.settled = true
	if len(a.inherited) > 0 {
		a.Log.Info("followed an earlier process of this node", "inherited", len(a.inherited), "announcing", len(a.own))
		a.inherited = nil
		signal(a.renewNow) // some may not be its own any more
	}
}

func (a *Announcer) hasSettled() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.settled
}
