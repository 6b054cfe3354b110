package image

import (
	"archive/tar"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// source is an image that is not unpacked yet: from a registry or an archive.
type source struct {
	names    []string // normalized references
	digest   string   // of the manifest; empty: it has none
	repo     string   // the repository that the digest is in; empty: none
	config   []byte
	configID string // sha256:…
	layers   []layerSource
}

// layerSource is a layer, perhaps compressed.
type layerSource struct {
	size int64 // of what is read
	open func(ctx context.Context) (io.ReadCloser, error)
}

// Limits of what is read from strangers into memory.
const (
	maxManifest    = 4 << 20
	maxArchive     = 1_000_000 // files
	maxLayers      = 500       // overlayfs has no more
	nameAnnotation = "io.containerd.image.name"
	refAnnotation  = "org.opencontainers.image.ref.name"
)

// archive is a tar file with images: an OCI layout, or what docker save writes.
type archive struct {
	file  *os.File
	files map[string]section
	links map[string]string
}

type section struct{ offset, size int64 }

// openArchive reads what is in an archive. The file must be uncompressed.
func openArchive(f *os.File) (*archive, error) {
	a := &archive{file: f, files: map[string]section{}, links: map[string]string{}}
	r := tar.NewReader(f)
	for n := 0; ; n++ {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			if n == 0 {
				return nil, errors.New("it is no tar archive")
			}
			return nil, fmt.Errorf("read the archive: %w", err)
		}
		if n >= maxArchive {
			return nil, fmt.Errorf("the archive has more than %d files", maxArchive)
		}
		name, err := clean(h.Name)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", printable(h.Name), err)
		}
		switch h.Typeflag {
		case tar.TypeReg:
			// The reader is at the file's first byte now.
			at, err := f.Seek(0, io.SeekCurrent)
			if err != nil {
				return nil, err
			}
			a.files[name] = section{at, h.Size}
		case tar.TypeSymlink:
			a.links[name] = path.Join("/", path.Dir(name), h.Linkname)[1:]
		case tar.TypeLink:
			a.links[name] = strings.TrimPrefix(path.Clean("/"+h.Linkname), "/")
		}
	}
	return a, nil
}

// open opens a file of the archive. Links stay in it.
func (a *archive) open(name string) (*io.SectionReader, error) {
	name = strings.TrimPrefix(path.Clean("/"+name), "/")
	for range 8 {
		if s, ok := a.files[name]; ok {
			return io.NewSectionReader(a.file, s.offset, s.size), nil
		}
		target, ok := a.links[name]
		if !ok {
			break
		}
		name = target
	}
	return nil, fmt.Errorf("the archive has no file %s", printable(name))
}

func (a *archive) read(name string) ([]byte, error) {
	r, err := a.open(name)
	if err != nil {
		return nil, err
	}
	if r.Size() > maxManifest {
		return nil, fmt.Errorf("%s: has %d bytes, more than a manifest has", printable(name), r.Size())
	}
	return io.ReadAll(r)
}

// blob reads a manifest or configuration of an OCI layout, and checks that it is what its digest says.
func (a *archive) blob(d v1.Descriptor) ([]byte, error) {
	if d.Digest.Algorithm != "sha256" {
		return nil, fmt.Errorf("digest %q: only sha256 is known", d.Digest)
	}
	data, err := a.read("blobs/sha256/" + d.Digest.Hex)
	if err != nil {
		return nil, err
	}
	if have := sum(data); have != d.Digest.String() {
		return nil, fmt.Errorf("blob %s: its content is another, %s", d.Digest, have)
	}
	return data, nil
}

// sources are the archive's images for a platform.
func (a *archive) sources(platform v1.Platform) ([]*source, error) {
	var saved []saved
	if data, err := a.read("manifest.json"); err == nil {
		if err := json.Unmarshal(data, &saved); err != nil {
			return nil, fmt.Errorf("manifest.json: %w", err)
		}
	}
	data, err := a.read("index.json")
	if err != nil {
		if len(saved) == 0 {
			return nil, errors.New("it has neither an index.json, as OCI layouts have, nor a manifest.json, as docker save writes")
		}
		return a.savedSources(saved)
	}
	var index v1.IndexManifest
	if err := json.Unmarshal(data, &index); err != nil {
		return nil, fmt.Errorf("index.json: %w", err)
	}
	var out []*source
	for _, d := range index.Manifests {
		s, err := a.indexed(d, platform, 0)
		if err != nil {
			return nil, err
		}
		if s == nil {
			continue
		}
		// docker save writes both, and names in the other one.
		if len(s.names) == 0 {
			for _, other := range saved {
				if strings.HasSuffix(other.Config, strings.TrimPrefix(s.configID, "sha256:")) {
					s.names = append(s.names, other.RepoTags...)
				}
			}
		}
		out = append(out, s)
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("it has no image for %s/%s", platform.OS, platform.Architecture)
	}
	return merge(out)
}

// merge normalizes names, and makes two entries of one image one.
func merge(list []*source) ([]*source, error) {
	var out []*source
	for _, s := range list {
		var names []string
		for _, n := range s.names {
			if _, err := parse(n, nil); err != nil {
				return nil, err
			}
			if n = Normalize(n); !slices.Contains(names, n) {
				names = append(names, n)
			}
		}
		s.names = names
		i := slices.IndexFunc(out, func(have *source) bool { return have.configID == s.configID && have.digest == s.digest })
		if i < 0 {
			out = append(out, s)
			continue
		}
		out[i].names = append(out[i].names, slices.DeleteFunc(names, func(n string) bool { return slices.Contains(out[i].names, n) })...)
	}
	return out, nil
}

// indexed reads an image that an index names; nil: it is for another platform, or no image.
func (a *archive) indexed(d v1.Descriptor, platform v1.Platform, depth int) (*source, error) {
	if d.Platform != nil && !fits(*d.Platform, platform) {
		return nil, nil
	}
	switch {
	case d.MediaType.IsIndex():
		if depth > 3 {
			return nil, errors.New("its indexes are nested too deeply")
		}
		data, err := a.blob(d)
		if err != nil {
			return nil, err
		}
		var index v1.IndexManifest
		if err := json.Unmarshal(data, &index); err != nil {
			return nil, fmt.Errorf("index %s: %w", d.Digest, err)
		}
		for _, inner := range index.Manifests {
			s, err := a.indexed(inner, platform, depth+1)
			if err != nil {
				return nil, err
			}
			if s != nil {
				s.names = append(s.names, annotated(d)...)
				return s, nil
			}
		}
		return nil, nil
	case d.MediaType.IsImage():
		return a.image(d, platform)
	}
	return nil, nil // a signature, for example
}

func annotated(d v1.Descriptor) []string {
	if name := d.Annotations[nameAnnotation]; name != "" {
		return []string{name}
	}
	// This one may be a tag alone, which names nothing.
	if name := d.Annotations[refAnnotation]; strings.Contains(name, "/") || strings.Contains(name, ":") {
		return []string{name}
	}
	return nil
}

func (a *archive) image(d v1.Descriptor, platform v1.Platform) (*source, error) {
	data, err := a.blob(d)
	if err != nil {
		return nil, err
	}
	m, err := v1.ParseManifest(strings.NewReader(string(data)))
	if err != nil {
		return nil, fmt.Errorf("manifest %s: %w", d.Digest, err)
	}
	if !m.Config.MediaType.IsConfig() {
		return nil, nil
	}
	s := &source{names: annotated(d), digest: d.Digest.String(), configID: m.Config.Digest.String()}
	if s.config, err = a.blob(m.Config); err != nil {
		return nil, err
	}
	if d.Platform == nil {
		if c, err := v1.ParseConfigFile(strings.NewReader(string(s.config))); err == nil && !fits(*c.Platform(), platform) {
			return nil, nil
		}
	}
	for _, l := range m.Layers {
		if l.Digest.Algorithm != "sha256" {
			return nil, fmt.Errorf("layer %q: only sha256 is known", l.Digest)
		}
		if err := s.add(a, l.MediaType, "blobs/sha256/"+l.Digest.Hex); err != nil {
			return nil, err
		}
	}
	return s, nil
}

func (s *source) add(a *archive, kind types.MediaType, file string) error {
	if kind != "" && !kind.IsLayer() {
		return fmt.Errorf("%s: is no layer of files, but %q", printable(file), kind)
	}
	if len(s.layers) >= maxLayers {
		return fmt.Errorf("it has more than %d layers", maxLayers)
	}
	r, err := a.open(file)
	if err != nil {
		return err
	}
	s.layers = append(s.layers, layerSource{size: r.Size(), open: func(context.Context) (io.ReadCloser, error) {
		again, err := a.open(file)
		return io.NopCloser(again), err
	}})
	return nil
}

// saved is an image in docker save's manifest.json.
type saved struct {
	Config   string
	RepoTags []string
	Layers   []string
}

var namedByDigest = regexp.MustCompile(`(?:^|/)([0-9a-f]{64})(?:\.json)?$`)

func (a *archive) savedSources(list []saved) ([]*source, error) {
	var out []*source
	for _, m := range list {
		data, err := a.read(m.Config)
		if err != nil {
			return nil, err
		}
		s := &source{names: m.RepoTags, config: data, configID: sum(data)}
		if said := namedByDigest.FindStringSubmatch(m.Config); said != nil && "sha256:"+said[1] != s.configID {
			return nil, fmt.Errorf("%s: its content is another, %s", printable(m.Config), s.configID)
		}
		for _, l := range m.Layers {
			if err := s.add(a, "", l); err != nil {
				return nil, err
			}
		}
		out = append(out, s)
	}
	return merge(out)
}

// fits says whether what is made for one platform runs on another.
func fits(made, here v1.Platform) bool {
	if made.OS != "" && made.OS != here.OS || made.Architecture != "" && made.Architecture != here.Architecture {
		return false
	}
	// Variants of arm below ours run, others don't; only 64 bits are known here.
	return true
}
