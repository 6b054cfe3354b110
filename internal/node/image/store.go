package image

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	goruntime "runtime"
	"slices"
	"strings"
	"sync"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/unix"
)

// Options are a Store's.
type Options struct {
	// Dir is where OCI images are kept. Empty: there are none, and none can be pulled.
	Dir string
	// Mappings are images that stand for folders.
	Mappings []Mapping
	// Hidden are further paths of the node's own root that containers don't see, its data directory among them.
	Hidden []string
	// Insecure are registries (host or host:port) that may be spoken to without encryption, besides those of this machine.
	Insecure []string
	// MaxSize is the most that an image may take when it is unpacked; 0: DefaultMaxSize.
	MaxSize int64
	// InUse are the IDs of the images that containers have, as Image.ID has them.
	InUse func() (map[string]bool, error)
	// UserAgent says who asks, to registries.
	UserAgent string
}

// DefaultMaxSize is the most that an image may take, unless a node says otherwise.
const DefaultMaxSize = 32 << 30

// Store knows the images of a node. Several processes may use one folder at a time: what they change together, they change under a
// lock, and each file appears as a whole.
type Store struct {
	Options
	mapped    map[string]Mapping
	hidden    []string
	transport http.RoundTripper

	mu    sync.Mutex
	pulls map[string]*call
	slots *slots
}

// parallelPulls is how many images are pulled at a time.
const parallelPulls = 3

// NewStore makes a Store. It changes nothing yet.
func NewStore(o Options) *Store {
	s := &Store{Options: o, mapped: map[string]Mapping{}, pulls: map[string]*call{}, slots: newSlots(parallelPulls)}
	for _, m := range o.Mappings {
		s.mapped[Normalize(m.Name)] = m
	}
	if s.MaxSize == 0 {
		s.MaxSize = DefaultMaxSize
	}
	s.hidden = slices.Concat(secrets, o.Hidden)
	s.transport = plainOnly(o.Insecure, stallTimeout)
	return s
}

// UnknownError says that there is no such image here.
type UnknownError struct{ Image string }

func (e *UnknownError) Error() string {
	return fmt.Sprintf("image %q: is not on this node", e.Image)
}

// Layer is a folder of an image's files.
type Layer struct {
	Dir  string `json:"dir"` // below layers
	Size int64  `json:"size"`
	// DiffID is the digest of the uncompressed layer.
	DiffID string `json:"diffID"`
	// Dependent says that it was unpacked for the layers that it is on.
	Dependent bool `json:"dependent,omitempty"`
}

// Record is what is kept of an OCI image.
type Record struct {
	// ID is the digest of the image's configuration.
	ID    string   `json:"id"`
	Names []string `json:"names,omitempty"`
	// Digests are those of manifests, with the repository: repository@sha256:…
	Digests []string `json:"digests,omitempty"`
	// Layers are the lowest first.
	Layers []Layer `json:"layers"`
	Size   int64   `json:"size"`
	// Pinned images stay until somebody removes them.
	Pinned bool      `json:"pinned,omitempty"`
	Pulled time.Time `json:"pulled"`
	// Used is when a container was last given it.
	Used   time.Time `json:"used"`
	Config ociConfig `json:"config"`
}

// ociConfig is the part of an image's configuration that is honoured, and its volumes, which are not.
type ociConfig struct {
	Entrypoint []string `json:"entrypoint,omitempty"`
	Cmd        []string `json:"cmd,omitempty"`
	Env        []string `json:"env,omitempty"`
	WorkingDir string   `json:"workingDir,omitempty"`
	User       string   `json:"user,omitempty"`
	StopSignal string   `json:"stopSignal,omitempty"`
	Volumes    []string `json:"volumes,omitempty"`
}

// APIID is an image's name in the API: a digest that it can be pulled by, if there is one.
func (r *Record) APIID() string {
	if len(r.Digests) > 0 {
		return r.Digests[0]
	}
	return r.ID
}

func (s *Store) records() string       { return filepath.Join(s.Dir, "records") }
func (s *Store) layers() string        { return filepath.Join(s.Dir, "layers") }
func (s *Store) temporary() string     { return filepath.Join(s.Dir, "tmp") }
func (s *Store) layer(d string) string { return filepath.Join(s.layers(), d) }

// lock is held while records and layers are changed together, which is never long.
func (s *Store) lock(ctx context.Context) (func(), error) {
	if s.Dir == "" {
		return nil, errors.New("this node keeps no images")
	}
	for _, dir := range []string{s.records(), s.layers(), s.temporary()} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, err
		}
	}
	f, err := os.OpenFile(filepath.Join(s.Dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return func() { _ = f.Close() }, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			_ = f.Close()
			return nil, fmt.Errorf("lock the images: %w", err)
		}
		select {
		case <-ctx.Done():
			_ = f.Close()
			return nil, ctx.Err()
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// Find finds an image that is here.
func (s *Store) Find(ref string) (Image, error) {
	if ref == Host {
		return Image{ID: "host", Lower: []string{"/"}, Hide: s.hidden, Scratch: scratch}, nil
	}
	if m, ok := s.mapped[Normalize(ref)]; ok {
		return Image{ID: "dir:" + m.Dir, Lower: []string{m.Dir}, Config: m.Config}, nil
	}
	if _, err := parse(ref, nil); err != nil {
		return Image{}, err
	}
	list, err := s.List()
	if err != nil {
		return Image{}, err
	}
	if r := named(list, ref); r != nil && s.complete(r) {
		now := time.Now()
		_ = os.Chtimes(s.recordPath(r.ID), now, now) // it was used
		return s.image(r), nil
	}
	return Image{}, &UnknownError{ref}
}

// Local says whether an image never comes from a registry.
func (s *Store) Local(ref string) bool {
	_, mapped := s.mapped[Normalize(ref)]
	return mapped || ref == Host
}

// named finds an image by a reference: its tag, or its digest.
func named(list []*Record, ref string) *Record {
	full := Normalize(ref)
	digest := ""
	if _, d, ok := strings.Cut(full, "@"); ok {
		digest = repository(ref) + "@" + d
	}
	for _, r := range list {
		if digest != "" && slices.Contains(r.Digests, digest) || slices.Contains(r.Names, full) {
			return r
		}
	}
	return nil
}

// complete says whether an image's layers are all there.
func (s *Store) complete(r *Record) bool {
	return !slices.ContainsFunc(r.Layers, func(l Layer) bool {
		st, err := os.Stat(s.layer(l.Dir))
		return err != nil || !st.IsDir()
	})
}

func (s *Store) image(r *Record) Image {
	out := Image{ID: r.APIID(), Config: Config{
		Entrypoint: r.Config.Entrypoint, Cmd: r.Config.Cmd, Env: r.Config.Env, WorkingDir: r.Config.WorkingDir, Account: r.Config.User,
		StopSignal: r.Config.StopSignal,
	}, OCI: true}
	for _, l := range slices.Backward(r.Layers) {
		// A layer that an image has twice is hidden by its upper one, and overlayfs takes each folder once.
		if dir := s.layer(l.Dir); !slices.Contains(out.Lower, dir) {
			out.Lower = append(out.Lower, dir)
		}
	}
	return out
}

func (s *Store) recordPath(id string) string {
	return filepath.Join(s.records(), strings.TrimPrefix(id, "sha256:")+".json")
}

// List are the images that are here, the one that was used last first.
func (s *Store) List() ([]*Record, error) {
	if s.Dir == "" {
		return nil, nil
	}
	files, err := os.ReadDir(s.records())
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var out []*Record
	for _, f := range files {
		if !strings.HasSuffix(f.Name(), ".json") {
			continue
		}
		path := filepath.Join(s.records(), f.Name())
		data, err := os.ReadFile(path)
		if errors.Is(err, os.ErrNotExist) {
			continue // removed meanwhile
		}
		if err != nil {
			return nil, err
		}
		r := &Record{}
		if err := json.Unmarshal(data, r); err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		if st, err := f.Info(); err == nil {
			r.Used = st.ModTime()
		}
		out = append(out, r)
	}
	slices.SortFunc(out, func(a, b *Record) int {
		if c := b.Used.Compare(a.Used); c != 0 {
			return c
		}
		return strings.Compare(a.ID, b.ID)
	})
	return out, nil
}

// save writes a record so that it appears as a whole, also after a crash.
func (s *Store) save(r *Record) error {
	data, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	f, err := os.CreateTemp(s.records(), ".new-*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	_, err = f.Write(append(data, '\n'))
	err = errors.Join(err, f.Sync(), f.Close())
	if err != nil {
		return err
	}
	return os.Rename(f.Name(), s.recordPath(r.ID))
}

// Progress says how far an image has come.
type Progress struct {
	Image         string
	Layer, Layers int // from 1
	// Here says that the layer was here before.
	Here       bool
	Read, Size int64
	Done       bool
}

// Load reads the images of an archive: an OCI layout or what docker save writes, in tar, perhaps compressed. They stay until somebody
// removes them. name is the reference of an archive's only image, instead of what the archive says.
func (s *Store) Load(ctx context.Context, r io.Reader, name string, progress func(Progress)) ([]*Record, error) {
	if name != "" {
		if _, err := parse(name, nil); err != nil {
			return nil, err
		}
	}
	work, err := s.workspace(ctx)
	if err != nil {
		return nil, err
	}
	defer work.close()
	f, isFile := r.(*os.File)
	if begin := make([]byte, 4); !isFile || !plainTar(f, begin) {
		if f, err = work.copy(r, s.MaxSize*2+(16<<20)); err != nil {
			return nil, err
		}
		defer f.Close()
	}
	a, err := openArchive(f)
	if err != nil {
		return nil, err
	}
	list, err := a.sources(s.platform())
	if err != nil {
		return nil, err
	}
	if name != "" {
		if len(list) != 1 {
			return nil, fmt.Errorf("the archive has %d images: a name can be given to one only", len(list))
		}
		list[0].names = []string{Normalize(name)}
	}
	var out []*Record
	for _, src := range list {
		if len(src.names) == 0 {
			return nil, fmt.Errorf("the archive does not say what image %s is called: give it a name with --name", src.configID)
		}
		if src.digest != "" {
			src.repo = repository(src.names[0])
		}
		rec, err := s.unpack(ctx, src, true, progress)
		if err != nil {
			return nil, fmt.Errorf("image %s: %w", src.names[0], err)
		}
		out = append(out, rec)
	}
	return out, nil
}

// plainTar says whether a file can be read at any place, and is not compressed.
func plainTar(f *os.File, begin []byte) bool {
	st, err := f.Stat()
	if err != nil || !st.Mode().IsRegular() {
		return false
	}
	if at, err := f.Seek(0, io.SeekCurrent); err != nil || at != 0 {
		return false
	}
	if _, err := f.ReadAt(begin, 0); err != nil {
		return true // too short for an archive, which is said later
	}
	return begin[0] != 0x1f && begin[0] != 0x28
}

func (s *Store) platform() v1.Platform {
	return v1.Platform{OS: "linux", Architecture: goruntime.GOARCH}
}

func sum(data []byte) string {
	s := sha256.Sum256(data)
	return "sha256:" + hex.EncodeToString(s[:])
}

// Title is what people call an image.
func (r *Record) Title() string {
	switch {
	case len(r.Names) > 0:
		return r.Names[0]
	case len(r.Digests) > 0:
		return r.Digests[0]
	}
	return r.ID
}
