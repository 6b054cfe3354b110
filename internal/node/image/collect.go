package image

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// InUseError says that a container has the image that was to be removed.
type InUseError struct{ Image string }

func (e *InUseError) Error() string {
	return fmt.Sprintf("image %q: a container of this node has it; delete its Pod first", e.Image)
}

// used says whether containers have an image, by any of its names in the API.
func (r *Record) used(inUse map[string]bool) bool {
	return inUse[r.ID] || slices.ContainsFunc(r.Digests, func(d string) bool { return inUse[d] })
}

func (s *Store) inUse() (map[string]bool, error) {
	if s.InUse == nil {
		return nil, nil
	}
	return s.InUse()
}

// Lookup finds an image's record by a reference, its ID, or the beginning of its ID.
func (s *Store) Lookup(ref string) (*Record, error) {
	list, err := s.List()
	if err != nil {
		return nil, err
	}
	if hex := strings.TrimPrefix(ref, "sha256:"); len(hex) >= 8 && strings.Trim(hex, "0123456789abcdef") == "" {
		var found []*Record
		for _, r := range list {
			if strings.HasPrefix(r.ID, "sha256:"+hex) {
				found = append(found, r)
			}
		}
		switch len(found) {
		case 1:
			return found[0], nil
		case 0:
		default:
			return nil, fmt.Errorf("image %q: %d images' IDs begin like this", ref, len(found))
		}
	}
	if _, err := parse(ref, nil); err != nil {
		return nil, err
	}
	if r := named(list, ref); r != nil {
		return r, nil
	}
	return nil, &UnknownError{ref}
}

// Remove takes a name away from an image, and removes the image with its last name.
func (s *Store) Remove(ctx context.Context, ref string) (removed bool, err error) {
	work, err := s.workspace(ctx)
	if err != nil {
		return false, err
	}
	defer work.close()
	if removed, err = s.removeRecord(ctx, ref); err != nil || !removed {
		return removed, err
	}
	return true, s.dropLayers(ctx, work)
}

func (s *Store) removeRecord(ctx context.Context, ref string) (bool, error) {
	unlock, err := s.lock(ctx)
	if err != nil {
		return false, err
	}
	defer unlock()
	r, err := s.Lookup(ref)
	if err != nil {
		return false, err
	}
	if i := slices.Index(r.Names, Normalize(ref)); i >= 0 && len(r.Names) > 1 {
		r.Names = slices.Delete(r.Names, i, i+1)
		return false, s.save(r)
	}
	inUse, err := s.inUse()
	if err != nil {
		return false, err
	}
	if r.used(inUse) {
		return false, &InUseError{ref}
	}
	return true, os.Remove(s.recordPath(r.ID))
}

// Choose are the images to remove so that at least need bytes are free: those that nobody uses, that are not pinned, and that were not
// used since, the least recently used first. list is ordered as List does.
func Choose(list []*Record, inUse map[string]bool, need int64, since time.Time) (out []*Record) {
	holders := map[string]int{}
	for _, r := range list {
		for _, l := range r.Layers {
			holders[l.Dir]++
		}
	}
	for _, r := range slices.Backward(list) {
		if need <= 0 {
			break
		}
		if r.Pinned || r.used(inUse) || r.Used.After(since) || r.Pulled.After(since) {
			continue
		}
		out = append(out, r)
		for _, l := range r.Layers {
			if holders[l.Dir]--; holders[l.Dir] == 0 {
				need -= l.Size
			}
		}
	}
	return out
}

// Prune removes unused images, until at least need bytes are free. Pinned ones, those that were used since, and those of containers stay.
func (s *Store) Prune(ctx context.Context, need int64, since time.Time) ([]*Record, error) {
	if _, err := os.Stat(s.Dir); s.Dir == "" || errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	work, err := s.workspace(ctx)
	if err != nil {
		return nil, err
	}
	defer work.close()
	removed, err := s.pruneRecords(ctx, need, since)
	if err != nil {
		return nil, err
	}
	return removed, s.dropLayers(ctx, work)
}

func (s *Store) pruneRecords(ctx context.Context, need int64, since time.Time) ([]*Record, error) {
	unlock, err := s.lock(ctx)
	if err != nil {
		return nil, err
	}
	defer unlock()
	list, err := s.List()
	if err != nil {
		return nil, err
	}
	inUse, err := s.inUse()
	if err != nil {
		return nil, err
	}
	chosen := Choose(list, inUse, need, since)
	for _, r := range chosen {
		if err := os.Remove(s.recordPath(r.ID)); err != nil {
			return nil, err
		}
	}
	return chosen, nil
}

// Thresholds say when unused images are removed: in percent of the disk that is used.
type Thresholds struct {
	High, Low int
	// MinAge is how long an image stays at least after it was pulled or used.
	MinAge time.Duration
}

// Collect removes unused images if the disk is fuller than High, until it is no fuller than Low.
func (s *Store) Collect(ctx context.Context, t Thresholds) ([]*Record, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(s.Dir, &st); err != nil {
		if errors.Is(err, unix.ENOENT) {
			return nil, nil
		}
		return nil, err
	}
	need := excess(int64(st.Blocks)*st.Bsize, int64(st.Bavail)*st.Bsize, t)
	if need <= 0 {
		return nil, nil
	}
	return s.Prune(ctx, need, time.Now().Add(-t.MinAge))
}

// excess is how much has to be removed from a disk.
func excess(capacity, available int64, t Thresholds) int64 {
	if capacity <= 0 || t.High >= 100 || (capacity-available)*100 < capacity*int64(t.High) {
		return 0
	}
	return capacity*int64(100-t.Low)/100 - available
}
