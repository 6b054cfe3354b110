package store

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dustin/go-humanize"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
)

// space watches how full etcd is. An etcd that reaches its quota raises the alarm NOSPACE and refuses everything but
// reads, deletions and compaction until somebody disarms it. space is that somebody: it compacts, defragments the embedded
// etcd, and disarms the alarm when there is room. An external etcd belongs to its administrator and may serve others, so
// it is defragmented on command only.
//
// Of the embedded etcd a reserve beyond the quota is kept for writes that lead to room: deleting a namespace, a Pod or
// an object with finalizers writes the object before it removes it, and so does whoever elects the controllers that do it.
type space struct {
	maintenance
	poll time.Duration
	// again asks for a look before the next poll: a write was refused.
	again chan struct{}
	// refused says why writes are refused; "" if they are accepted.
	refused atomic.Pointer[string]
	// pressed is set when a write did not fit into the embedded etcd's quota. From then on all are refused until there is
	// room, so that what is refused does not depend on how large it is.
	pressed atomic.Bool
	// uncommitted is how many bytes were admitted since etcd was last made to commit: what it has not committed is not in its size yet.
	uncommitted atomic.Int64
	// defragmenting is set while etcd answers nothing for a known reason.
	defragmenting atomic.Bool
	// looking is held by whoever measures, compacts and defragments: an old measurement never replaces a newer one.
	looking sync.Mutex
	making  making
	// useless is how much was in use when defragmentation last did not make enough room.
	useless int64
}

// reserve is how far the embedded etcd's own quota lies beyond the one that users are held to.
func reserve(quota int64) int64 {
	if quota <= 0 {
		return 0
	}
	return max(quota/16, 4<<20)
}

type exemptKey struct{}

// exempt marks a write that may use the reserve. The value may be set until the write is issued.
func exempt(ctx context.Context, allowed *bool) context.Context {
	return context.WithValue(ctx, exemptKey{}, allowed)
}

// admit refuses a write of so many bytes that is beyond the quota and may not use the reserve.
func (s *space) admit(ctx context.Context, cost int) error {
	if !s.embedded || s.quota <= 0 {
		return nil
	}
	allowed, _ := ctx.Value(exemptKey{}).(*bool)
	if allowed == nil || !*allowed {
		if why := s.disk.full(); why != "" {
			s.noSpace()
			return notStored(why)
		}
	}
	switch {
	case s.accepts(cost):
	case allowed != nil && *allowed:
		s.pressed.Store(true)
		s.noSpace()
	case !s.makeRoom(ctx, cost):
		s.noSpace()
		return s.explain(rpctypes.ErrNoSpace)
	}
	s.uncommitted.Add(int64(cost))
	return nil
}

// accepts says that a write of so many bytes is within the embedded etcd's quota.
func (s *space) accepts(cost int) bool {
	if s.pressed.Load() {
		return false
	}
	free := s.quota - s.backend.Size() - int64(cost)
	if free > 0 && s.uncommitted.Load() >= free {
		// Many writes come between two commits of a busy etcd: together they must not use up the reserve.
		s.uncommitted.Store(0)
		s.backend.ForceCommit()
		free = s.quota - s.backend.Size() - int64(cost)
	}
	return free > 0
}

// makeRoom waits for room to be made for a write of so many bytes, unless that was tried in vain: what was deleted or written over takes
// up room until then, and must not be why the write is refused. It does not wait for long, since requests that do count as being
// served, and deletions should be.
func (s *space) makeRoom(ctx context.Context, cost int) bool {
	made := s.making.begin(s, cost)
	if made == nil {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, writePatience)
	defer cancel()
	select {
	case <-made:
	case <-ctx.Done():
	}
	return s.accepts(cost)
}

// making is room being made for writes, by one goroutine for all.
type making struct {
	mu   sync.Mutex
	done chan struct{} // nil: it is not being made
	// failed is when there was no room even so.
	failed time.Time
	closed bool
}

// begin returns what is closed when room has been made, or nil if that is of no use.
func (m *making) begin(s *space, cost int) <-chan struct{} {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.closed || *s.refused.Load() != "":
		return nil
	case m.done != nil:
		return m.done
	case time.Since(m.failed) < time.Second: // one attempt a second is enough for all
		return nil
	}
	done := make(chan struct{})
	m.done = done
	go func() {
		s.pressed.Store(true)
		s.look(context.Background(), int64(cost))
		m.mu.Lock()
		defer m.mu.Unlock()
		if !s.accepts(cost) {
			m.failed = time.Now()
		}
		m.done = nil
		close(done)
	}()
	return done
}

// close has no more room made, and waits until none is, but not for an etcd that has ended by itself.
func (m *making) close() {
	m.mu.Lock()
	m.closed = true
	done := m.done
	m.mu.Unlock()
	if done != nil {
		select {
		case <-done:
		case <-time.After(2 * writePatience):
		}
	}
}

const (
	pollEmbedded = 2 * time.Second // an in-process call that reads a few counters
	pollExternal = 15 * time.Second
	// roomShare is the part of the quota, 1/roomShare, that must be free before writes are accepted again: with less, the
	// alarm would come and go with every few writes.
	roomShare = 20
	// writePatience is how long a write waits for room.
	writePatience = 5 * time.Second
)

func newSpace(m maintenance) *space {
	s := &space{maintenance: m, poll: pollExternal, again: make(chan struct{}, 1)}
	if m.embedded {
		s.poll = pollEmbedded
	}
	s.refused.Store(new(string))
	registerMetrics()
	return s
}

// noSpace is called when a write was refused.
func (s *space) noSpace() {
	select {
	case s.again <- struct{}{}:
	default:
	}
}

// run looks after etcd's space until ctx ends.
func (s *space) run(ctx context.Context) {
	tick := time.NewTicker(s.poll)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-s.again:
		}
		s.look(ctx, 0)
		// Refused writes come in crowds; one look a second is enough for all.
		select {
		case <-ctx.Done():
			return
		case <-time.After(min(s.poll, time.Second)):
		}
	}
}

// look measures, and makes room if etcd is full or has none for so many bytes.
func (s *space) look(ctx context.Context, need int64) {
	s.looking.Lock()
	defer s.looking.Unlock()
	members := s.members(ctx)
	if s.embedded {
		s.disk.look(sizeOf(members), s.applied())
	}
	if s.full(members) || s.wasteful(members) || s.pressed.Load() {
		if err := s.recover(ctx, members, need); err != nil && ctx.Err() == nil {
			klog.ErrorS(err, "making room in etcd failed, retrying", "in", s.poll)
		}
		members = s.members(ctx)
	}
	s.report(members)
}

func (s *space) report(members []MemberStatus) {
	if roomy(members) {
		s.pressed.Store(false)
	}
	why := s.why(members)
	before := *s.refused.Swap(&why)
	measure(members, why != "")
	switch {
	case why != "" && before == "":
		klog.ErrorS(nil, "storage refuses writes", "reason", why)
	case why == "" && before != "":
		klog.InfoS("storage accepts writes again")
	}
}

func (s *space) full(members []MemberStatus) bool {
	return slices.ContainsFunc(members, func(m MemberStatus) bool { return m.full(s.embedded) })
}

// full says that the member refuses writes, or that the reserve of the embedded one has been touched.
func (m *MemberStatus) full(embedded bool) bool {
	return slices.Contains(m.Alarms, noSpaceAlarm) || embedded && m.QuotaBytes > 0 && m.SizeBytes >= m.QuotaBytes
}

// wasteful says that the embedded etcd is about to reach its quota although most of its file is free pages.
func (s *space) wasteful(members []MemberStatus) bool {
	m := members[0]
	return s.embedded && m.QuotaBytes > 0 && m.SizeBytes > m.QuotaBytes/10*9 && m.InUseBytes < m.QuotaBytes/2 && s.worthwhile(m)
}

const noSpaceAlarm = "NOSPACE"

// recover makes room, also for so many bytes, and, if there is enough, disarms the alarm.
func (s *space) recover(ctx context.Context, members []MemberStatus, need int64) error {
	if err := s.compact(ctx); err != nil {
		return err
	}
	enough := func() bool {
		return roomy(members) && members[0].SizeBytes+need < members[0].QuotaBytes && !s.wasteful(members)
	}
	if s.embedded && !enough() {
		members = s.membersAfterCompaction(ctx, need)
		if m := members[0]; m.InUseBytes <= limit(m) && m.InUseBytes+need < m.QuotaBytes && s.worthwhile(m) && s.disk.holds(m.InUseBytes) {
			if err := s.defragmentNow(ctx); err != nil {
				return err
			}
			members = s.members(ctx)
			s.useless = 0
			if !enough() {
				s.useless = m.InUseBytes
			}
		}
	}
	if !roomy(members) || !alarmed(members) {
		return nil
	}
	return s.disarm(ctx)
}

// membersAfterCompaction measures the embedded etcd until what compaction has freed is counted.
func (s *space) membersAfterCompaction(ctx context.Context, need int64) []MemberStatus {
	s.countFree()
	members := s.members(ctx)
	for same := 0; same < 3 && members[0].Error == "" && (members[0].InUseBytes > limit(members[0]) || members[0].InUseBytes+need >= members[0].QuotaBytes); {
		time.Sleep(20 * time.Millisecond)
		s.countFree()
		before := members[0].InUseBytes
		if members = s.members(ctx); members[0].InUseBytes < before {
			same = 0
		} else {
			same++
		}
	}
	return members
}

func alarmed(members []MemberStatus) bool {
	return slices.ContainsFunc(members, func(m MemberStatus) bool { return slices.Contains(m.Alarms, noSpaceAlarm) })
}

// worthwhile says that defragmenting can do more than it did the last time.
func (s *space) worthwhile(m MemberStatus) bool {
	return s.useless == 0 || m.InUseBytes < s.useless-m.QuotaBytes/100
}

func (s *space) defragmentNow(ctx context.Context) error {
	s.defragmenting.Store(true)
	defer s.defragmenting.Store(false)
	start := time.Now()
	before := s.members(ctx)
	if err := s.defragment(ctx); err != nil {
		return err
	}
	defragmentations.Inc()
	after := s.members(ctx)
	klog.InfoS("defragmented etcd", "before", humanSize(sizeOf(before)), "after", humanSize(sizeOf(after)), "took", time.Since(start))
	return nil
}

// limit is the size up to which a member counts as having room.
func limit(m MemberStatus) int64 { return m.QuotaBytes - m.QuotaBytes/roomShare }

// roomy says that every member is known to have room.
func roomy(members []MemberStatus) bool {
	return !slices.ContainsFunc(members, func(m MemberStatus) bool {
		return m.Error != "" || m.QuotaBytes <= 0 || m.SizeBytes > limit(m)
	})
}

func sizeOf(members []MemberStatus) int64 {
	var size int64
	for _, m := range members {
		size = max(size, m.SizeBytes)
	}
	return size
}

// why says why writes are refused, and what to do about it; "" if they are accepted.
func (s *space) why(members []MemberStatus) string {
	if full := s.disk.full(); full != "" {
		return full
	}
	for _, m := range members {
		if slices.Contains(m.Alarms, "CORRUPT") {
			return "etcd has found its data corrupt (alarm CORRUPT at " + m.Endpoint + "): restore a snapshot with `portal storage restore`"
		}
		if !m.full(s.embedded) && !s.pressed.Load() {
			continue
		}
		if s.embedded {
			return fmt.Sprintf("etcd is full: %s in use of a quota of %s; writes are accepted again below %s: delete objects, or raise --etcd-quota-bytes",
				humanSize(m.InUseBytes), humanSize(m.QuotaBytes), humanSize(limit(m)))
		}
		return fmt.Sprintf("etcd is full (alarm NOSPACE; %s holds %s, %s in use): delete objects and run `portal storage defrag`, or raise etcd's --quota-backend-bytes",
			m.Endpoint, humanSize(m.SizeBytes), humanSize(m.InUseBytes))
	}
	return ""
}

func humanSize(n int64) string { return humanize.IBytes(uint64(max(n, 0))) }

// explain makes of etcd's refusal an answer that says what is wrong and what to do.
func (s *space) explain(err error) error {
	if !IsNoSpace(err) {
		return err
	}
	why := *s.refused.Load()
	if why == "" {
		why = "etcd has reached its quota and is making room: try again, and if that does not help, delete objects or raise the quota"
	}
	return notStored(why)
}

func notStored(why string) error {
	return &apierrors.StatusError{ErrStatus: metav1.Status{
		Status: metav1.StatusFailure, Code: http.StatusInsufficientStorage, Reason: metav1.StatusReasonInternalError,
		Message: "the object was not stored: " + why,
	}}
}

// Writable says why etcd refuses writes; nil if it accepts them.
func (s *Store) Writable() error {
	if why := *s.space.refused.Load(); why != "" {
		return errors.New(why)
	}
	return nil
}

// Status describes the storage.
func (s *Store) Status(ctx context.Context) (Status, error) {
	status, err := s.space.status(ctx)
	status.WritesRefused = s.space.why(status.Members)
	return status, err
}

// Defragment drops old revisions, gives free pages back to the file system, and lets etcd accept writes again if it
// refused them and there is room now.
func (s *Store) Defragment(ctx context.Context) (Status, error) {
	if err := s.space.onCommand(ctx); err != nil {
		return Status{}, err
	}
	return s.Status(ctx)
}

func (s *space) onCommand(ctx context.Context) error {
	s.looking.Lock()
	defer s.looking.Unlock()
	if err := s.compact(ctx); err != nil {
		return err
	}
	if used := s.members(ctx)[0].InUseBytes; !s.disk.holds(used) {
		return fmt.Errorf("defragmenting writes a second copy of %s, for which the file system of %s has no room: free some space there", humanSize(used), s.disk.dir)
	}
	if err := s.defragmentNow(ctx); err != nil {
		return err
	}
	members := s.members(ctx)
	// An etcd before 3.6 doesn't tell its quota. Whoever asks for this expects writes to be tried again.
	unknown := !slices.ContainsFunc(members, func(m MemberStatus) bool { return m.Error != "" || m.QuotaBytes > 0 })
	if alarmed(members) && (roomy(members) || unknown) {
		if err := s.disarm(ctx); err != nil {
			return err
		}
		members = s.members(ctx)
	}
	s.report(members)
	return nil
}

func isCompacted(err error) bool {
	return errors.Is(err, rpctypes.ErrCompacted) || strings.Contains(err.Error(), "required revision has been compacted")
}

// Snapshot writes the whole database, followed by its SHA-256.
func (s *Store) Snapshot(ctx context.Context, to io.Writer) error { return s.space.snapshot(ctx, to) }
