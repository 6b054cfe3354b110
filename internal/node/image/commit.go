package image

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// errVanished says that a layer that was here has been removed meanwhile.
var errVanished = errors.New("a layer was removed while the image was unpacked")

// unpack unpacks an image's layers that are not here yet, and records it.
func (s *Store) unpack(ctx context.Context, src *source, pin bool, progress func(Progress)) (*Record, error) {
	config, err := s.readConfig(src)
	if err != nil {
		return nil, err
	}
	for tries := 0; ; tries++ {
		rec, err := s.unpackOnce(ctx, src, config, pin, progress)
		if !errors.Is(err, errVanished) && !errors.Is(err, os.ErrNotExist) || tries == 2 || ctx.Err() != nil {
			return rec, err
		}
	}
}

// readConfig checks what an image says about itself.
func (s *Store) readConfig(src *source) (*v1.ConfigFile, error) {
	c, err := v1.ParseConfigFile(bytes.NewReader(src.config))
	if err != nil {
		return nil, fmt.Errorf("its configuration can't be read: %w", err)
	}
	if here := s.platform(); !fits(v1.Platform{OS: c.OS, Architecture: c.Architecture}, here) {
		return nil, fmt.Errorf("it is for %s/%s, and this node is %s/%s", c.OS, c.Architecture, here.OS, here.Architecture)
	}
	ids := c.RootFS.DiffIDs
	if len(ids) != len(src.layers) {
		return nil, fmt.Errorf("its configuration names %d layers, and it has %d", len(ids), len(src.layers))
	}
	if len(ids) == 0 {
		return nil, errors.New("it has no files")
	}
	for _, id := range ids {
		if id.Algorithm != "sha256" || len(id.Hex) != 64 || strings.Trim(id.Hex, "0123456789abcdef") != "" {
			return nil, fmt.Errorf("layer %q: only digests of the kind sha256 are known", id)
		}
	}
	return c, nil
}

// chain are the digests of an image's layers with all those below them.
func chain(ids []v1.Hash) []string {
	out := make([]string, len(ids))
	for i, id := range ids {
		out[i] = id.String()
		if i > 0 {
			sum := sha256.Sum256([]byte(out[i-1] + " " + id.String()))
			out[i] = "sha256:" + hex.EncodeToString(sum[:])
		}
	}
	return out
}

func folderOf(digest string) string { return strings.Replace(digest, ":", "-", 1) }

func (s *Store) unpackOnce(ctx context.Context, src *source, config *v1.ConfigFile, pin bool, progress func(Progress)) (*Record, error) {
	work, err := s.workspace(ctx)
	if err != nil {
		return nil, err
	}
	defer work.close()
	have, err := s.haveLayers()
	if err != nil {
		return nil, err
	}
	ids, chains := config.RootFS.DiffIDs, chain(config.RootFS.DiffIDs)
	budget := &Budget{Size: s.MaxSize, Entries: maxEntries}
	rec := &Record{
		ID: src.configID, Names: src.names, Pinned: pin, Pulled: time.Now().UTC().Truncate(time.Second), Config: honoured(config),
	}
	if src.digest != "" && src.repo != "" {
		rec.Digests = []string{src.repo + "@" + src.digest}
	}
	var parents []string // the uppermost first
	fresh := map[string]string{}
	for i := range src.layers {
		p := Progress{Image: src.title(), Layer: i + 1, Layers: len(ids), Size: src.layers[i].size}
		l, here := have[folderOf(chains[i])]
		if !here || l.DiffID != ids[i].String() {
			l, here = have[folderOf(ids[i].String())]
			here = here && !l.Dependent
		}
		where := s.layer(l.Dir)
		if again, twice := twice(rec.Layers, ids[i]); !here && twice {
			l, here, where = again, true, fresh[again.Dir]
		}
		if here {
			if err := budget.take(l.Size); err != nil {
				return nil, err
			}
			p.Here, p.Done = true, true
			tell(progress, p)
		} else {
			where = filepath.Join(work.dir, fmt.Sprint("layer-", i))
			out, err := s.unpackLayer(ctx, src.layers[i], ids[i], where, parents, budget, func(read int64, done bool) {
				p.Read, p.Done = read, done
				tell(progress, p)
			})
			if err != nil {
				return nil, fmt.Errorf("layer %d of %d: %w", i+1, len(ids), err)
			}
			l = Layer{Dir: folderOf(ids[i].String()), DiffID: ids[i].String(), Size: out.Size, Dependent: out.Dependent}
			if out.Dependent {
				l.Dir = folderOf(chains[i])
			}
			fresh[l.Dir] = where
		}
		rec.Layers = append(rec.Layers, l)
		rec.Size += l.Size
		parents = append([]string{where}, parents...)
	}
	return rec, s.commit(ctx, rec, fresh)
}

// twice finds a layer that the image has further down, too: an empty one, for example.
func twice(list []Layer, id v1.Hash) (Layer, bool) {
	for _, l := range list {
		if l.DiffID == id.String() && !l.Dependent {
			return l, true
		}
	}
	return Layer{}, false
}

func tell(progress func(Progress), p Progress) {
	if progress != nil {
		progress(p)
	}
}

func (src *source) title() string {
	if len(src.names) > 0 {
		return src.names[0]
	}
	return src.repo + "@" + src.digest
}

// haveLayers are the layers of the images that are here, by folder.
func (s *Store) haveLayers() (map[string]Layer, error) {
	list, err := s.List()
	if err != nil {
		return nil, err
	}
	out := map[string]Layer{}
	for _, r := range list {
		for _, l := range r.Layers {
			if _, err := os.Stat(s.layer(l.Dir)); err == nil {
				out[l.Dir] = l
			}
		}
	}
	return out, nil
}

// unpackLayer writes a layer to a folder, and checks that it is what the image's configuration says.
func (s *Store) unpackLayer(ctx context.Context, src layerSource, id v1.Hash, dir string, parents []string, budget *Budget, progress func(int64, bool)) (Unpacked, error) {
	if err := os.Mkdir(dir, 0o755); err != nil {
		return Unpacked{}, err
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		return Unpacked{}, err
	}
	raw, err := src.open(ctx)
	if err != nil {
		return Unpacked{}, err
	}
	defer raw.Close()
	counted := &counter{r: raw, tell: func(n int64) { progress(n, false) }}
	plain, err := decompress(counted)
	if err != nil {
		return Unpacked{}, err
	}
	defer plain.Close()
	digest := sha256.New()
	// Padding and headers are no files, and have to end too.
	stream := io.TeeReader(&bounded{plain, s.MaxSize*2 + (16 << 20)}, digest)
	out, err := Unpack(ctx, stream, dir, parents, budget)
	if err != nil {
		return out, err
	}
	for _, rest := range []io.Reader{stream, counted} {
		if _, err := io.Copy(io.Discard, rest); err != nil {
			return out, err
		}
	}
	if have := digestOf(digest); have != id.String() {
		return out, fmt.Errorf("its content is %s, but the image says %s", have, id)
	}
	progress(counted.n, true)
	return out, syncFolder(dir)
}

func digestOf(h hash.Hash) string { return "sha256:" + hex.EncodeToString(h.Sum(nil)) }

// counter tells, now and then, how much has been read.
type counter struct {
	r    io.Reader
	n    int64
	last time.Time
	tell func(int64)
}

func (c *counter) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.n += int64(n)
	if now := time.Now(); now.Sub(c.last) > 200*time.Millisecond {
		c.last = now
		c.tell(c.n)
	}
	return n, err
}

func honoured(c *v1.ConfigFile) ociConfig {
	return ociConfig{
		Entrypoint: c.Config.Entrypoint, Cmd: c.Config.Cmd, Env: c.Config.Env, WorkingDir: c.Config.WorkingDir, User: c.Config.User,
		StopSignal: c.Config.StopSignal, Volumes: slices.Sorted(maps.Keys(c.Config.Volumes)),
	}
}

// commit puts layers in their place and the record beside them.
func (s *Store) commit(ctx context.Context, rec *Record, fresh map[string]string) error {
	unlock, err := s.lock(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	for dir, from := range fresh {
		if _, err := os.Stat(s.layer(dir)); err == nil {
			continue // another process was faster
		}
		if err := os.Rename(from, s.layer(dir)); err != nil {
			return err
		}
	}
	if !s.complete(rec) {
		return errVanished
	}
	list, err := s.List()
	if err != nil {
		return err
	}
	for _, old := range list {
		if old.ID == rec.ID {
			rec.Names, rec.Digests = union(rec.Names, old.Names), union(rec.Digests, old.Digests)
			rec.Pinned = rec.Pinned || old.Pinned
			continue
		}
		left := slices.DeleteFunc(slices.Clone(old.Names), func(n string) bool { return slices.Contains(rec.Names, n) })
		if len(left) == len(old.Names) {
			continue
		}
		// The name is another image's now. Nobody asks for the old one again.
		old.Names = left
		old.Pinned = old.Pinned && len(left) > 0
		used := old.Used
		if err := s.save(old); err != nil {
			return err
		}
		_ = os.Chtimes(s.recordPath(old.ID), used, used)
	}
	if err := s.save(rec); err != nil {
		return err
	}
	rec.Used = time.Now()
	return nil
}

func union(a, b []string) []string {
	for _, x := range b {
		if !slices.Contains(a, x) {
			a = append(a, x)
		}
	}
	return a
}
