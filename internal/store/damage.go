package store

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"time"

	bolt "go.etcd.io/bbolt"
	"go.etcd.io/etcd/server/v3/etcdserver/api/snap"
	"go.etcd.io/etcd/server/v3/storage/wal"
	"go.etcd.io/etcd/server/v3/storage/wal/walpb"
	"go.uber.org/zap"
	"google.golang.org/protobuf/proto"
)

// DamagedError says that etcd's files can't be used, and what to do about it.
type DamagedError struct {
	// Dir is etcd's directory.
	Dir string
	// Cause says what is wrong with it.
	Cause error
	// Salvageable says that the database itself can be read.
	Salvageable bool
}

func (e *DamagedError) Error() string {
	from := "SNAPSHOT` with a file that `portal storage snapshot` wrote"
	if e.Salvageable {
		from = filepath.Join(e.Dir+".damaged", "member", "snap", "db") + "`, because the database itself can be read, or the same with a snapshot"
	}
	return fmt.Sprintf("the storage in %s is damaged: %v: rename it to %s.damaged and run `portal storage restore --data-dir %s %s",
		e.Dir, e.Cause, e.Dir, filepath.Dir(e.Dir), from)
}

func (e *DamagedError) Unwrap() error { return e.Cause }

// checkFiles looks for damage that etcd itself answers with a panic or by waiting for ever. It reads what etcd will read.
func checkFiles(dir string) error {
	member := filepath.Join(dir, "member")
	if _, err := os.Stat(member); errors.Is(err, os.ErrNotExist) {
		return nil // a new one
	}
	database := filepath.Join(member, "snap", "db")
	applied, err := checkDatabase(database)
	if err != nil {
		return &DamagedError{Dir: dir, Cause: fmt.Errorf("the database member/snap/db: %w", err)}
	}
	last, err := guarded(func() (uint64, error) {
		return lastLogged(filepath.Join(member, "wal"), filepath.Join(member, "snap"), applied)
	})
	if err == nil && last < applied {
		err = fmt.Errorf("its last entry is number %d, and the database has %d of them", last, applied)
	}
	if err != nil {
		return &DamagedError{Dir: dir, Cause: fmt.Errorf("the write-ahead log member/wal: %w", err), Salvageable: applied > 0}
	}
	return nil
}

// guarded turns panics into errors, those of reading beyond the end of a mapped file included.
func guarded[T any](read func() (T, error)) (out T, err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("it can't be read: %v", p)
		}
	}()
	return read()
}

// checkDatabase walks through a database and returns the index of the last log entry in it: 0 if there is no database,
// or nothing in it. etcd builds that again from its log.
func checkDatabase(path string) (uint64, error) {
	info, err := os.Stat(path)
	if errors.Is(err, os.ErrNotExist) || err == nil && info.Size() == 0 {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	return guarded(func() (applied uint64, err error) {
		db, err := bolt.Open(path, 0, &bolt.Options{ReadOnly: true, Timeout: time.Second})
		if err != nil {
			return 0, err
		}
		defer db.Close()
		err = db.View(func(tx *bolt.Tx) error {
			if info.Size() < tx.Size() {
				return fmt.Errorf("it was cut off: %d of %d bytes are there", info.Size(), tx.Size())
			}
			if meta := tx.Bucket([]byte("meta")); meta != nil {
				if index := meta.Get([]byte("consistent_index")); len(index) == 8 {
					applied = binary.BigEndian.Uint64(index)
				}
			}
			return tx.ForEach(func(_ []byte, bucket *bolt.Bucket) error {
				return bucket.ForEach(func(_, _ []byte) error { return nil })
			})
		})
		return applied, err
	})
}

// lastLogged reads the log as etcd does at its start and returns the index of its last entry.
func lastLogged(dir, snapDir string, applied uint64) (uint64, error) {
	if !wal.Exist(dir) {
		if applied == 0 {
			return 0, nil // etcd ended before it wrote anything
		}
		return 0, errors.New("it is missing")
	}
	snapshots, err := wal.ValidSnapshotEntries(zap.NewNop(), dir)
	if err != nil {
		return 0, err
	}
	start := &walpb.Snapshot{Index: proto.Uint64(0), Term: proto.Uint64(0)}
	newest, err := snap.New(zap.NewNop(), snapDir).LoadNewestAvailable(snapshots)
	switch {
	case err == nil:
		start.Index, start.Term = newest.Metadata.Index, newest.Metadata.Term
	case !errors.Is(err, snap.ErrNoSnapshot):
		return 0, err
	}
	log, err := wal.OpenForRead(zap.NewNop(), dir, start)
	if err != nil {
		return 0, err
	}
	defer log.Close()
	_, _, entries, err := log.ReadAll()
	if err != nil {
		return 0, err
	}
	if len(entries) == 0 {
		return start.GetIndex(), nil
	}
	return entries[len(entries)-1].GetIndex(), nil
}
