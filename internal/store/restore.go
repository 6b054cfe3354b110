package store

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"go.etcd.io/etcd/etcdutl/v3/snapshot"
	"go.uber.org/zap"
)

// SnapshotInfo describes a snapshot file.
type SnapshotInfo struct {
	File      string `json:"file"`
	SizeBytes int64  `json:"sizeBytes"`
	Revision  int64  `json:"revision"`
	// Keys counts every key in it.
	Keys int `json:"keys"`
	// Checksum says that the file ends with its SHA-256. A database taken from a data directory has none.
	Checksum bool `json:"checksum"`
}

// SaveSnapshot has write write a snapshot, checks it, and only then puts it where file says. Nobody else can read it.
func SaveSnapshot(file string, write func(io.Writer) error) (_ SnapshotInfo, err error) {
	part, err := os.CreateTemp(filepath.Dir(file), "."+filepath.Base(file)+".*") // with mode 0600
	if err != nil {
		return SnapshotInfo{}, err
	}
	defer func() {
		_ = part.Close()
		if err != nil {
			_ = os.Remove(part.Name())
		}
	}()
	if err := write(part); err != nil {
		return SnapshotInfo{}, err
	}
	if err := part.Sync(); err != nil {
		return SnapshotInfo{}, err
	}
	info, err := CheckSnapshot(part.Name())
	if err != nil {
		return SnapshotInfo{}, err
	}
	if !info.Checksum {
		return SnapshotInfo{}, errors.New("the snapshot ended early: its checksum is missing")
	}
	info.File = file
	return info, os.Rename(part.Name(), file)
}

// CheckSnapshot says what is in a snapshot file, if it is whole.
func CheckSnapshot(file string) (SnapshotInfo, error) {
	out := SnapshotInfo{File: file}
	info, err := os.Stat(file)
	if err != nil {
		return out, err
	}
	if !info.Mode().IsRegular() || info.Size() == 0 {
		return out, fmt.Errorf("%s is no snapshot: it is empty or no regular file", file)
	}
	out.SizeBytes = info.Size()
	// Pages are multiples of 512 bytes; what is over is the checksum.
	if out.Checksum = info.Size()%512 == sha256.Size; out.Checksum {
		if err := checkSum(file, info.Size()-sha256.Size); err != nil {
			return out, err
		}
	}
	if _, err := checkDatabase(file); err != nil {
		return out, fmt.Errorf("%s is no intact snapshot: %w", file, err)
	}
	status, err := snapshot.NewV3(zap.NewNop()).Status(file)
	if err != nil {
		return out, fmt.Errorf("%s is no intact snapshot: %s", file, strings.ReplaceAll(err.Error(), "\n", "; "))
	}
	out.Revision, out.Keys = status.Revision, status.TotalKey
	return out, nil
}

func checkSum(file string, size int64) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	sum := sha256.New()
	if _, err := io.CopyN(sum, f, size); err != nil {
		return err
	}
	want, err := io.ReadAll(f)
	if err != nil {
		return err
	}
	if !bytes.Equal(sum.Sum(nil), want) {
		return fmt.Errorf("%s is no intact snapshot: its contents don't match the SHA-256 at its end", file)
	}
	return nil
}

// Target is what a snapshot is restored to.
type Target struct {
	// Dir becomes etcd's data directory. It must hold no data.
	Dir string
	// Name, Cluster and PeerURLs are those of a member of an external cluster, as its flags --name, --initial-cluster and
	// --initial-advertise-peer-urls; without a Name the data is for the embedded etcd.
	Name, Cluster string
	PeerURLs      []string
}

// revisionBump is how far a restored etcd's revision lies beyond that of the snapshot: farther than any that a client
// can remember from after the snapshot was taken. All below count as compacted, so that clients which resume from one are
// told to list again, instead of waiting for it or missing events.
const revisionBump = 1_000_000_000

// Restore makes a data directory from a snapshot file.
func Restore(file string, target Target) (SnapshotInfo, error) {
	info, err := CheckSnapshot(file)
	if err != nil {
		return info, err
	}
	if target.Name == "" {
		target.Name, target.Cluster, target.PeerURLs = memberName, initialCluster, []string{peerURL}
	}
	if err := os.MkdirAll(target.Dir, 0o700); err != nil {
		return info, err
	}
	lock, err := lockDir(target.Dir)
	if err != nil {
		return info, err
	}
	defer lock.Close()
	entries, err := os.ReadDir(target.Dir)
	if err != nil {
		return info, err
	}
	for _, entry := range entries {
		if entry.Name() != lockName {
			return info, fmt.Errorf("%s is not empty (%s): rename it, or restore to another directory", target.Dir, entry.Name())
		}
	}
	// Beside the place, so that a restore which ends half-way leaves nothing that looks like data.
	part := filepath.Join(target.Dir, "restoring")
	defer os.RemoveAll(part)
	_, err = guarded(func() (struct{}, error) {
		return struct{}{}, snapshot.NewV3(zap.NewNop()).Restore(snapshot.RestoreConfig{
			SnapshotPath: file, OutputDataDir: part, SkipHashCheck: !info.Checksum,
			Name: target.Name, InitialCluster: target.Cluster, PeerURLs: target.PeerURLs, InitialClusterToken: "etcd-cluster",
			RevisionBump: revisionBump, MarkCompacted: true,
		})
	})
	if err != nil {
		return info, fmt.Errorf("restore %s: %w", file, err)
	}
	return info, os.Rename(filepath.Join(part, "member"), filepath.Join(target.Dir, "member"))
}
