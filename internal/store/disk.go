package store

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"

	"go.uber.org/zap/zapcore"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
)

// disk keeps the embedded etcd from meeting a full file system, which ends it: a commit, the next segment of its log or a snapshot that
// can't be written is fatal to etcd. While less than diskReserve or fewer than inodeReserve are free, writes are refused as they are at the quota,
// and the blocks that the database needs next are allocated beforehand, so that deletions and compaction still work when others have used up
// what was left.
type disk struct {
	dir string
	// secured is the size of the database for which blocks were last allocated.
	secured atomic.Int64
	// freed: files of the reserve were deleted to make room for a snapshot.
	freed bool
}

const (
	// walSegment is what etcd allocates for each segment of its log, always one ahead of the one it writes to.
	walSegment = 64_000_000
	// diskReserve is what must be free for writes to be accepted: a segment, and what the database grows by.
	diskReserve = walSegment + secureAhead
	// newDirNeeds is what a new directory takes: two segments, and the reserve.
	newDirNeeds = 2*walSegment + diskReserve
	// inodeReserve is how many new files must be possible for writes to be accepted: etcd makes one for each segment and snapshot. newDirInodes
	// is what a new directory takes.
	inodeReserve = 16
	newDirInodes = 2 * inodeReserve
	// snapshotEvery is after how many writes etcd makes a snapshot; if no more than that many are left until then, and the disk is full, room is made. Deletions and
	// renewals of Leases count, too.
	snapshotEvery, snapshotAhead = 10_000, 5000
	// secureAhead is how much more than the database's size is allocated: bbolt grows its file by 16 MiB, and one commit may need twice as much.
	secureAhead = 32 << 20
)

func databaseFile(dir string) string { return filepath.Join(dir, "member", "snap", "db") }

// room is what a file system has left for this process.
type room struct{ bytes, inodes int64 }

// free is what is left in the file system of the directory. What it does not say counts as enough.
func (d *disk) free() (room, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(d.dir, &st); err != nil {
		return room{}, err
	}
	left := room{math.MaxInt64, math.MaxInt64}
	if st.Blocks > 0 { // a ramfs, for one, does not say
		left.bytes = int64(min(st.Bavail, 1<<40)) * st.Bsize
	}
	if st.Files > 0 { // Btrfs, for one, has as many as fit
		left.inodes = int64(min(st.Ffree, math.MaxInt64))
	}
	return left, nil
}

func (r room) holds(need room) bool { return r.bytes >= need.bytes && r.inodes >= need.inodes }

func (r room) enough() bool { return r.holds(room{diskReserve, inodeReserve}) }

// lacks says what there is too little of, and what to do.
func (r room) lacks() (what, fix string) {
	if r.bytes < diskReserve {
		return humanSize(r.bytes) + " are free", "free some space there"
	}
	return fmt.Sprintf("%d inodes are free", r.inodes), "remove some files there"
}

// full says why nothing more should be written, and what to do; "" if there is room, or if nobody knows.
func (d *disk) full() string {
	if d == nil {
		return ""
	}
	free, err := d.free()
	if err != nil || free.enough() {
		return ""
	}
	what, fix := free.lacks()
	return fmt.Sprintf("the disk is full: %s in the file system of %s; writes are accepted again when %s and %d inodes are: %s",
		what, d.dir, humanSize(diskReserve), inodeReserve, fix)
}

// holds says that so many bytes more fit into the file system, the reserve left aside.
func (d *disk) holds(size int64) bool {
	if d == nil {
		return true
	}
	free, err := d.free()
	return err != nil || free.enough() && free.bytes-diskReserve >= size
}

// secure allocates the blocks that a database of this size has and will need next: bbolt extends its file without them. A file system that
// can't allocate beforehand has only the reserve.
func (d *disk) secure(size int64) error {
	f, err := os.OpenFile(databaseFile(d.dir), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	length := size
	if free, err := d.free(); err != nil || free.bytes >= diskReserve { // the segment comes first: etcd asks for it once, and ends if it has none when it needs it
		length += secureAhead
	}
	if err := unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_KEEP_SIZE, 0, length); err != nil && !errors.Is(err, unix.EOPNOTSUPP) {
		return err
	}
	d.secured.Store(size)
	return nil
}

// keepName is the file that keeps room for what etcd writes when it starts: some blocks while it runs, and while it does not, also those of
// the segment that it allocates ahead. keepMore keeps an inode beside it, for a snapshot of a running etcd.
const (
	keepName = "portal.reserve"
	keepMore = keepName + ".more"
	keepSome = 4 << 20
)

// snapshotRoom is more than a snapshot takes: the data are not in it. startRoom is what a start takes beside the segment.
var snapshotRoom, startRoom = room{1 << 20, 1}, room{1 << 20, 4}

func (d *disk) keep(size int64) {
	for name, size := range map[string]int64{keepName: size, keepMore: snapshotRoom.bytes} {
		f, err := os.OpenFile(filepath.Join(d.dir, name), os.O_CREATE|os.O_WRONLY, 0o600)
		if err != nil {
			return
		}
		_ = unix.Fallocate(int(f.Fd()), 0, 0, size) // without it etcd may have to be started once more when there is room again
		_ = f.Close()
	}
}

// look is what has to be done now and then for a database of this size, to which so many writes were made.
func (d *disk) look(size int64, writes uint64) {
	if d == nil {
		return
	}
	d.ensureSnapshotRoom(writes)
	if d.secured.Load() == size {
		return
	}
	if err := d.secure(size); err != nil {
		klog.V(1).InfoS("cannot allocate blocks for etcd's database beforehand", "err", err)
		return
	}
	if !d.freed {
		d.keep(keepSome)
	}
}

// ensureSnapshotRoom deletes older snapshots or files of the reserve if a snapshot is due soon and the disk is full. The reserve is made again
// when there is room.
func (d *disk) ensureSnapshotRoom(writes uint64) {
	free, err := d.free()
	switch {
	case err != nil:
	case d.freed && free.enough():
		d.keep(keepSome)
		d.freed = false
	case free.holds(snapshotRoom):
	default:
		list := d.snapshots()
		if last := writesOf(list); writes < last || writes-last <= snapshotEvery-snapshotAhead {
			return
		}
		d.freed = true
		d.makeRoom(snapshotRoom, slices.Concat(older(list), []string{filepath.Join(d.dir, keepMore), filepath.Join(d.dir, keepName)}))
	}
}

// makeRoom deletes files until there is so much room.
func (d *disk) makeRoom(need room, files []string) {
	for _, name := range files {
		if free, err := d.free(); err != nil || free.holds(need) {
			return
		}
		if os.Remove(name) == nil {
			klog.InfoS("deleted a file to make room for etcd on a full disk", "file", name)
		}
	}
}

// snapshots are etcd's, the oldest first: their names begin with term and index in hexadecimal.
func (d *disk) snapshots() []string {
	list, _ := filepath.Glob(filepath.Join(d.dir, "member", "snap", "*-*.snap"))
	slices.Sort(list)
	return list
}

// older are all but the newest.
func older(snapshots []string) []string { return snapshots[:max(0, len(snapshots)-1)] }

// writesOf says how many writes are in the newest of the snapshots; a new storage has none.
func writesOf(snapshots []string) (writes uint64) {
	if len(snapshots) > 0 {
		_, index, _ := strings.Cut(strings.TrimSuffix(filepath.Base(snapshots[len(snapshots)-1]), ".snap"), "-")
		writes, _ = strconv.ParseUint(index, 16, 64)
	}
	return writes
}

// release makes room for the segment that etcd allocates when it starts: what was kept, or what a killed etcd left.
func (d *disk) release() {
	left, _ := filepath.Glob(filepath.Join(d.dir, "member", "wal", "*.tmp"))
	for _, name := range append(left, filepath.Join(d.dir, keepName), filepath.Join(d.dir, keepMore)) {
		_ = os.Remove(name)
	}
	d.makeRoom(startRoom, older(d.snapshots()))
}

// check refuses to start an etcd that would end at its first write.
func (d *disk) check() error {
	d.release()
	free, unknown := d.free()
	info, err := os.Stat(databaseFile(d.dir))
	switch {
	case errors.Is(err, os.ErrNotExist):
		if unknown == nil && (free.bytes < newDirNeeds || free.inodes < newDirInodes) {
			return fmt.Errorf("the disk is full: a new storage in %s needs %s and %d inodes, and its file system has %s and %d free: free some space there, or choose another --data-dir",
				d.dir, humanSize(newDirNeeds), newDirInodes, humanSize(free.bytes), free.inodes)
		}
	case err == nil:
		if err := d.secure(info.Size()); errors.Is(err, unix.ENOSPC) {
			return fmt.Errorf("the disk is full: %s are free in the file system of %s, too little for etcd to start: free some space there",
				humanSize(free.bytes), d.dir)
		}
	}
	return nil
}

// OnWrite says in one line why etcd ended the process, after its own message was logged.
func (d *disk) OnWrite(e *zapcore.CheckedEntry, _ []zapcore.Field) {
	fix := "see what etcd logged before"
	if free, err := d.free(); err == nil && !free.enough() {
		what, how := free.lacks()
		fix = fmt.Sprintf("the disk is full (%s): %s, and start again", what, how)
	}
	klog.ErrorS(errors.New(e.Message), "the storage can't go on and ends this process", "directory", d.dir, "fix", fix)
	klog.Flush()
	os.Exit(1)
}
