package announce

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// Address is one to announce.
type Address struct {
	Addr netip.Addr
	// Eligible says whether a node may announce it.
	Eligible func(node string) bool
}

// Announcing is how addresses are announced: it answers for these and no others.
type Announcing interface {
	Set([]netip.Addr)
}

// Times are how fast a lost node is noticed. A node that announces something, or would be the next to, renews its Lease every Renew, and
// is lost Lease after the last time; the others do so more seldom, because nothing depends on them.
type Times struct{ Lease, Renew, IdleLease, IdleRenew time.Duration }

// DefaultTimes have another node take over within 2.5 s.
var DefaultTimes = Times{Lease: 2 * time.Second, Renew: 500 * time.Millisecond, IdleLease: 15 * time.Second, IdleRenew: 5 * time.Second}

// Options are an Announcer's.
type Options struct {
	// Node is this machine's, Identity this process'.
	Node, Identity string
	Client         kubernetes.Interface
	Namespace      string
	Times          Times
	// Leases are the members', and Addresses what is to be announced, as the informers have them. Owner references of the Lease are
	// what Owners returns.
	Leases    func() []*coordinationv1.Lease
	Addresses func() []Address
	Owners    func() []metav1.OwnerReference
	Out       Announcing
	// Grace is asked when this process ends: for how long its addresses are kept for one that follows on this node; 0: others have them
	// at once. nil: always 0.
	Grace func() time.Duration
	// StandIn has another process of this machine answer for addresses while none of this package does, until a time. nil: nobody does.
	StandIn func(addrs []netip.Addr, until time.Time) error
	// Settled is called once, on a goroutine of its own, when this process answers for what is its own: nobody needs to stand in for it any
	// more. It may be nil.
	Settled func()
	Log     *slog.Logger
}

// Announcer has one node of the cluster announce each address.
type Announcer struct {
	Options
	dirty, renewNow chan struct{}
	moved           atomic.Bool // the addresses have changed since they were last ranked

	mu      sync.Mutex
	members members
	renewed time.Time     // when this process last began to write its Lease, and did: others may have seen it ever since
	lasting time.Duration // of the Lease as it was last written
	// releasing: this process ends, and others may have taken over already.
	releasing bool
	lease     *coordinationv1.Lease
	own       []netip.Addr
	// inherited is what an earlier process of this node announced, if its Lease still runs. It is this one's until it has found out by
	// itself what is.
	inherited []netip.Addr
	settled   bool // it has
	busy      bool // it announces something, or is the next to
	yielded   map[netip.Addr]bool
	ranked    []Member // whom the addresses were last ranked among
	alive     int
}

// New makes an announcer.
func New(o Options) *Announcer {
	return &Announcer{
		Options: o, dirty: make(chan struct{}, 1), renewNow: make(chan struct{}, 1), yielded: map[netip.Addr]bool{},
		members: members{seen: map[string]*sighting{}, longest: max(o.Times.Lease, o.Times.IdleLease)},
	}
}

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Changed says that addresses, or who may serve them, have changed. It never blocks.
func (a *Announcer) Changed() {
	a.moved.Store(true)
	signal(a.dirty)
}

// Renewed says that Leases have changed, most of which is no news: only who is alive, and has what. It never blocks.
func (a *Announcer) Renewed() { signal(a.dirty) }

// Status are the addresses that this node announces, and how many nodes are alive.
func (a *Announcer) Status() (own []netip.Addr, members int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.own, a.alive
}

// Insist says whether this node is right to announce an address that another one announces too. While the API is away it can't know: others may
// have seen its Lease end, so it yields, and keeps what nobody else announces. Nor does it know once it releases its Lease.
func (a *Announcer) Insist(addr netip.Addr) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.releasing {
		return false
	}
	if !a.stale(time.Now()) {
		return slices.Contains(a.own, addr)
	}
	a.yielded[addr] = true
	signal(a.dirty)
	return false
}

// stale says whether this process could not renew its Lease for as long as it lasts.
func (a *Announcer) stale(now time.Time) bool { return now.Sub(a.renewed) >= a.lasting }

func (a *Announcer) lasts() time.Duration {
	if a.busy {
		return a.Times.Lease
	}
	return a.Times.IdleLease
}

// Run announces until the context ends. Then it leaves its addresses to the process that follows on this node, or to other nodes.
func (a *Announcer) Run(ctx context.Context) {
	var wg sync.WaitGroup
	wg.Go(func() { a.renewing(ctx) })
	defer wg.Wait()
	timer := time.NewTimer(0)
	defer timer.Stop()
	settled := a.Settled
	for {
		select {
		case <-ctx.Done():
			// This node still answers while it leaves: between two owners packets would be lost.
			wg.Wait()
			a.leave()
			a.Out.Set(nil)
			return
		case <-a.dirty:
		case <-timer.C:
		}
		timer.Reset(a.decide(time.Now()))
		if settled != nil && a.hasSettled() {
			wg.Go(settled)
			settled = nil
		}
	}
}

// doubtDelay is how soon to look again at a Lease that has ended, while it is not known whether the API is there.
const doubtDelay = 20 * time.Millisecond

// decide finds out which addresses this node announces, and says when to look again.
func (a *Announcer) decide(now time.Time) time.Duration {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.members.observe(a.Leases(), a.Node, now)
	const regular = 10 * time.Second
	if a.renewed.IsZero() {
		return regular // it is no member yet
	}
	if a.stale(now) {
		// It sees nobody's renewals either. Traffic goes on: what it announces it keeps, but for what others have taken.
		a.set(slices.DeleteFunc(slices.Clone(a.own), func(x netip.Addr) bool { return a.yielded[x] }))
		a.ranked = nil
		return a.Times.Renew
	}
	clear(a.yielded)
	alive, next, doubt := a.members.alive(now)
	if doubt && now.Sub(a.renewed) >= a.Times.Renew {
		signal(a.renewNow) // that it is seen settles it
	}
	// Its own Lease is what it has written, whatever the informer shows.
	alive = slices.DeleteFunc(alive, func(m Member) bool { return m.Name == a.Node })
	me := Member{Name: a.Node, Holds: map[netip.Addr]bool{}}
	for _, x := range a.held() {
		me.Holds[x] = true
	}
	alive = append(alive, me)
	a.alive = len(alive)
	if moved := a.moved.Swap(false); moved || !slices.EqualFunc(alive, a.ranked, func(x, y Member) bool {
		return x.Name == y.Name && x.Leaving == y.Leaving && maps.Equal(x.Holds, y.Holds)
	}) {
		a.ranked = alive
		a.rank(alive)
		a.settle()
	}
	if doubt {
		return doubtDelay
	}
	if next.IsZero() {
		return regular
	}
	return min(regular, max(time.Millisecond, time.Until(next)))
}

// rank finds out what is this node's among the living.
func (a *Announcer) rank(alive []Member) {
	var own []netip.Addr
	busy := false
	for _, x := range a.Addresses() {
		order := rank(x.Addr, alive, x.Eligible)
		if len(order) > 0 && order[0] == a.Node {
			own = append(own, x.Addr)
		}
		busy = busy || slices.Contains(order[:min(2, len(order))], a.Node)
	}
	if busy != a.busy {
		a.busy = busy
		signal(a.renewNow)
	}
	a.set(own)
}

func (a *Announcer) set(own []netip.Addr) {
	slices.SortFunc(own, netip.Addr.Compare)
	if slices.Equal(own, a.own) {
		return
	}
	a.own = own
	a.Out.Set(own)
	signal(a.renewNow)
}

// renewing writes the Lease until the context ends.
func (a *Announcer) renewing(ctx context.Context) {
	failing := false
	for {
		began := time.Now()
		err := a.renew(ctx)
		switch {
		case ctx.Err() != nil:
			return
		case err != nil && !failing:
			a.Log.Warn("could not renew this node's Lease, retrying: it keeps announcing what no other node does", "err", err)
		case err == nil && failing:
			a.Log.Info("this node's Lease is renewed again")
		}
		failing = err != nil
		wait, now := a.Times.IdleRenew, a.renewNow
		a.mu.Lock()
		if a.busy {
			wait = a.Times.Renew
		}
		a.mu.Unlock()
		if err != nil {
			wait, now = a.Times.Renew, nil // whatever the hurry, a server that does not answer gets no storm
		}
		select {
		case <-ctx.Done():
			return
		case <-now:
		case <-time.After(max(0, wait-time.Since(began))):
		}
	}
}

// renew writes the Lease once.
func (a *Announcer) renew(ctx context.Context) error {
	a.mu.Lock()
	limit := a.Times.Lease * 3 / 4 // a request without an answer must not cost the Lease
	lease := a.lease
	lasts, holds, first := a.lasts(), writeHolds(a.held()), a.renewed.IsZero()
	var inherited []netip.Addr
	a.mu.Unlock()
	began := time.Now()
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	written, err := a.write(ctx, lease, func(l *coordinationv1.Lease) {
		if first {
			inherited = a.inherit(l, began)
			holds = writeHolds(inherited)
		}
		now, seconds := metav1.NowMicro(), int32(lasts/time.Second)
		l.Spec.HolderIdentity, l.Spec.RenewTime, l.Spec.LeaseDurationSeconds = &a.Identity, &now, &seconds
		if l.Annotations = maps.Clone(l.Annotations); l.Annotations == nil {
			l.Annotations = map[string]string{}
		}
		l.Annotations[holdsAnnotation] = holds
		delete(l.Annotations, leavingAnnotation) // of an earlier process
	})
	a.mu.Lock()
	defer a.mu.Unlock()
	if err != nil {
		a.lease = nil // it may be another one by now
		return err
	}
	if first {
		a.inherited = inherited
	}
	if first || a.stale(time.Now()) {
		signal(a.dirty)
	}
	a.lease, a.renewed, a.lasting = written, began, lasts
	return nil
}

// write changes the Lease, which is read if it is not known, and made if there is none.
func (a *Announcer) write(ctx context.Context, lease *coordinationv1.Lease, change func(*coordinationv1.Lease)) (*coordinationv1.Lease, error) {
	api := a.Client.CoordinationV1().Leases(a.Namespace)
	if lease == nil {
		var err error
		lease, err = api.Get(ctx, LeasePrefix+a.Node, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			lease = &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{
				Namespace: a.Namespace, Name: LeasePrefix + a.Node, Labels: map[string]string{MemberLabel: "true"}, OwnerReferences: a.Owners(),
			}}
			change(lease)
			return api.Create(ctx, lease, metav1.CreateOptions{})
		}
		if err != nil {
			return nil, fmt.Errorf("read this node's Lease: %w", err)
		}
	}
	lease = lease.DeepCopy()
	change(lease)
	return api.Update(ctx, lease, metav1.UpdateOptions{})
}
