package l2

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"portal/internal/hostnet"
)

// Options are a Responder's.
type Options struct {
	// Interfaces are the links to announce on; none: for each address those of its network.
	Interfaces []string
	// Contested, if not nil, is called when another machine announces an address that this one does. What it returns says whether this
	// machine insists.
	Contested func(netip.Addr) bool
	Log       *slog.Logger
}

// Responder answers for addresses.
type Responder struct {
	Options
	arp, ndp *socket // ndp is nil without IPv6
	groups   *groups

	listing sync.Mutex // held while links are listed, and before mu: packets are answered meanwhile

	mu       sync.Mutex
	all      []*link   // of this machine
	links    []*link   // of these, those to announce on
	listed   time.Time // when they were, and due is when they are next
	due      time.Time
	announce map[netip.Addr]*announced
	wake     chan struct{}

	answers, announcements, contests atomic.Uint64
}

// announced is an address that this machine answers for.
type announced struct {
	links []*link
	// left is how many unsolicited announcements are still to be sent, and next when. defended is when one was last sent because of another
	// machine.
	left     int
	next     time.Time
	defended time.Time
}

const (
	// An address is announced several times: a packet may be lost, and a switch busy.
	repeats     = 4
	repeatDelay = 250 * time.Millisecond
	// defendDelay keeps two machines that both insist from a storm.
	defendDelay = time.Second
	// Links are listed when the kernel says that they changed, but not for each of many changes; and now and then without.
	relistMin = time.Second
	relistMax = time.Minute
)

// New opens the sockets, which takes the capability NET_RAW. It answers nothing before Run.
func New(o Options) (*Responder, error) {
	r := &Responder{Options: o, announce: map[netip.Addr]*announced{}, wake: make(chan struct{}, 1)}
	var err error
	if r.all, err = listLinks(); err != nil {
		return nil, err
	}
	r.links = choose(r.all, o.Interfaces)
	for _, name := range o.Interfaces {
		if !slices.ContainsFunc(r.links, func(l *link) bool { return l.name == name }) {
			return nil, fmt.Errorf("there is no Ethernet interface %q that is up and uses ARP", name)
		}
	}
	if r.arp, err = openARP(); err != nil {
		return nil, fmt.Errorf("open a socket for ARP: %w", err)
	}
	if r.groups, err = openGroups(); err != nil {
		o.Log.Warn("no IPv6 address is announced: the kernel has no IPv6", "err", err)
		return r, nil
	}
	if r.ndp, err = openNDP(); err != nil {
		r.Close()
		return nil, fmt.Errorf("open a socket for neighbour discovery: %w", err)
	}
	return r, nil
}

// Close closes the sockets of a Responder that was not run.
func (r *Responder) Close() {
	r.arp.close()
	if r.ndp != nil {
		r.ndp.close()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.groups != nil {
		r.groups.close()
	}
}

// Set has the responder answer for these addresses and no others. Those that are new are announced at once.
func (r *Responder) Set(addrs []netip.Addr) {
	if len(addrs) > 0 {
		r.refresh() // while nothing is announced, nobody does
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for a, s := range r.announce {
		if !slices.Contains(addrs, a) {
			r.groups.leave(a, s.links)
			delete(r.announce, a)
			r.Log.Info("no longer announcing an address", "address", a)
		}
	}
	for _, a := range addrs {
		if r.announce[a] != nil || a.Is6() && r.ndp == nil {
			continue
		}
		s := &announced{links: linksFor(r.links, len(r.Interfaces) > 0, a), left: repeats}
		r.announce[a] = s
		r.logLinks(a, s.links)
		r.groups.join(a, s.links, r.Log)
	}
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

func (r *Responder) logLinks(a netip.Addr, links []*link) {
	if len(links) == 0 {
		r.Log.Warn("no interface to announce an address on: none is of its network, and none has a default route", "address", a)
		return
	}
	r.Log.Info("announcing an address", "address", a, "interface", links[0].name)
}

// Addresses are those that it answers for.
func (r *Responder) Addresses() (out []netip.Addr) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for a := range r.announce {
		out = append(out, a)
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return out
}

// Counts are how many requests were answered, announcements sent, and addresses seen with another machine.
func (r *Responder) Counts() (answers, announcements, contests uint64) {
	return r.answers.Load(), r.announcements.Load(), r.contests.Load()
}

// outdated says whether to list the links again. While nothing is announced nothing depends on them.
func (r *Responder) outdated(now time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.announce) > 0 && !now.Before(r.due)
}

// changed is called when links may have changed.
func (r *Responder) changed() {
	r.listing.Lock() // what is being listed may not show the change
	defer r.listing.Unlock()
	r.mu.Lock()
	defer r.mu.Unlock()
	if soon := r.listed.Add(relistMin); soon.Before(r.due) {
		r.due = soon
	}
}

// refresh lists the links again: interfaces come and go, and so do their addresses.
func (r *Responder) refresh() {
	r.listing.Lock()
	defer r.listing.Unlock()
	began := time.Now()
	all, err := listLinks()
	r.mu.Lock()
	defer r.mu.Unlock()
	if err != nil {
		r.Log.Warn("interfaces not read, announcing as before", "err", err)
		r.due = began.Add(relistMin)
		return
	}
	r.all, r.links, r.listed, r.due = all, choose(all, r.Interfaces), began, began.Add(relistMax)
	for a, s := range r.announce {
		now := linksFor(r.links, len(r.Interfaces) > 0, a)
		same := slices.EqualFunc(now, s.links, func(x, y *link) bool { return x.index == y.index && x.mac == y.mac })
		if !same {
			r.groups.leave(a, s.links)
			r.groups.join(a, now, r.Log)
			r.logLinks(a, now)
			s.left, s.next = repeats, time.Time{}
		}
		s.links = now
	}
}

// Run answers until the context ends, and closes the sockets.
func (r *Responder) Run(ctx context.Context) error {
	defer r.Close()
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	failed := make(chan error, 2)
	listen := func(s *socket, handle func([]byte, int, MAC)) {
		context.AfterFunc(ctx, s.close)
		wg.Go(func() { failed <- s.receive(handle) })
	}
	listen(r.arp, r.handleARP)
	if r.ndp != nil {
		listen(r.ndp, r.handleNDP)
	}
	changes := hostnet.Watch(ctx, interest)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-failed:
			if ctx.Err() != nil {
				return nil
			}
			return errors.Join(errors.New("answering ARP and neighbour discovery ended"), err)
		case <-changes:
			r.changed()
		case <-r.wake:
		case <-timer.C:
		}
		if r.outdated(time.Now()) {
			r.refresh()
		}
		timer.Reset(r.sendDue())
	}
}

// sendDue announces what is due, and says how long nothing else is.
func (r *Responder) sendDue() time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	now, wait := time.Now(), relistMax
	if len(r.announce) > 0 {
		wait = max(time.Millisecond, r.due.Sub(now))
	}
	for a, s := range r.announce {
		if s.left == 0 {
			continue
		}
		if !now.Before(s.next) {
			r.sendUnsolicited(a, s)
			s.left--
			s.next = now.Add(repeatDelay)
		}
		wait = min(wait, max(time.Millisecond, time.Until(s.next)))
	}
	return wait
}

func (r *Responder) sendUnsolicited(a netip.Addr, s *announced) {
	for _, l := range s.links {
		r.announcements.Add(1)
		if a.Is4() {
			for _, p := range AnnounceARP(a, l.mac) {
				r.send(r.arp, l, Broadcast, p.Append(nil))
			}
			continue
		}
		if from := l.from(); from.IsValid() {
			r.send(r.ndp, l, allNodesMAC, AnnounceNDP(a, l.mac, from).Append(nil))
		}
	}
}

func (r *Responder) send(s *socket, l *link, to MAC, packet []byte) {
	if err := s.send(l.index, to, packet); err != nil {
		r.Log.Debug("announcement not sent", "interface", l.name, "err", err)
	}
}

// handleARP is called for each ARP packet that came in by an interface.
func (r *Responder) handleARP(packet []byte, index int, _ MAC) {
	a, err := ParseARP(packet)
	if err != nil {
		return
	}
	r.mu.Lock()
	if l := r.on(a.Target, index); l != nil && a.Op == ARPRequest && a.Sender != a.Target {
		r.answers.Add(1)
		r.send(r.arp, l, a.SenderMAC, AnswerARP(a, l.mac).Append(nil))
	}
	contested := r.on(a.Sender, index) != nil && !r.mine(a.SenderMAC)
	r.mu.Unlock()
	if contested {
		r.contested(a.Sender)
	}
}

// handleNDP is called for each solicitation and advertisement that came in by an interface.
func (r *Responder) handleNDP(packet []byte, index int, from MAC) {
	n, err := ParseNDP(packet)
	if err != nil {
		return
	}
	r.mu.Lock()
	l := r.on(n.Target, index)
	if l != nil && !n.Advertisement {
		to := from
		if n.HasLinkAddress {
			to = n.LinkAddress
		}
		answer := AnswerNDP(n, l.mac, l.from())
		if answer.To == AllNodes {
			to = allNodesMAC
		}
		if answer.Source.IsValid() {
			r.answers.Add(1)
			r.send(r.ndp, l, to, answer.Append(nil))
		}
	}
	contested := l != nil && n.Advertisement && n.HasLinkAddress && !r.mine(n.LinkAddress)
	r.mu.Unlock()
	if contested {
		r.contested(n.Target)
	}
}

// mine says whether a link of this machine has an Ethernet address. Two may be on one segment, where each receives what the other sends.
func (r *Responder) mine(m MAC) bool {
	return slices.ContainsFunc(r.all, func(l *link) bool { return l.mac == m })
}

// on is the link of an index if this machine answers for the address there.
func (r *Responder) on(a netip.Addr, index int) *link {
	s := r.announce[a]
	if s == nil {
		return nil
	}
	i := slices.IndexFunc(s.links, func(l *link) bool { return l.index == index })
	if i < 0 {
		return nil
	}
	return s.links[i]
}

// contested: another machine says that it has an address that this one answers for.
func (r *Responder) contested(a netip.Addr) {
	r.contests.Add(1)
	if r.Contested != nil && !r.Contested(a) {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if s := r.announce[a]; s != nil && time.Since(s.defended) > defendDelay {
		s.defended = time.Now()
		r.sendUnsolicited(a, s)
	}
}
