package image

import (
	"archive/tar"
	"bytes"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	goruntime "runtime"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/klauspost/compress/zstd"
)

// testRegistry is a registry on loopback that counts what is asked of it.
type testRegistry struct {
	host   string
	blobs  atomic.Int32
	change func(http.ResponseWriter, *http.Request) bool // answers instead
}

func newRegistry(t testing.TB) *testRegistry {
	t.Helper()
	r := &testRegistry{}
	inner := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		if q.Method == http.MethodGet && strings.Contains(q.URL.Path, "/blobs/") {
			r.blobs.Add(1)
		}
		if r.change != nil && q.Method == http.MethodGet && r.change(w, q) {
			return
		}
		inner.ServeHTTP(w, q)
	}))
	t.Cleanup(server.Close)
	r.host = strings.TrimPrefix(server.URL, "http://")
	return r
}

func (r *testRegistry) push(t testing.TB, ref string, img v1.Image) string {
	t.Helper()
	full := r.host + "/" + ref
	parsed, err := name.ParseReference(full)
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.Write(parsed, img); err != nil {
		t.Fatal(err)
	}
	return full
}

// testLayer is a layer of files, compressed in one of the ways that there are.
func testLayer(t testing.TB, how string, entries ...tar.Header) v1.Layer {
	t.Helper()
	data := tarOf(t, entries...)
	switch how {
	case "gzip":
		l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(data)), nil })
		if err != nil {
			t.Fatal(err)
		}
		return l
	case "zstd":
		var out bytes.Buffer
		w, err := zstd.NewWriter(&out)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = w.Write(data)
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		return zstdLayer{static.NewLayer(out.Bytes(), types.OCILayerZStd), data}
	}
	return static.NewLayer(data, types.OCIUncompressedLayer)
}

// zstdLayer knows its uncompressed digest, which static layers take for that of their content.
type zstdLayer struct {
	v1.Layer
	plain []byte
}

func (l zstdLayer) DiffID() (v1.Hash, error) { return v1.NewHash(sum(l.plain)) }

func (l zstdLayer) Uncompressed() (io.ReadCloser, error) {
	return io.NopCloser(bytes.NewReader(l.plain)), nil
}

func testImage(t testing.TB, config v1.Config, layers ...v1.Layer) v1.Image {
	t.Helper()
	img, err := mutate.AppendLayers(empty.Image, layers...)
	if err != nil {
		t.Fatal(err)
	}
	img, err = mutate.ConfigFile(img, func() *v1.ConfigFile {
		c, err := img.ConfigFile()
		if err != nil {
			t.Fatal(err)
		}
		c = c.DeepCopy()
		c.OS, c.Architecture, c.Config = "linux", goruntime.GOARCH, config
		return c
	}())
	if err != nil {
		t.Fatal(err)
	}
	return img
}

func newTestStore(t testing.TB, change ...func(*Options)) *Store {
	t.Helper()
	needRoot(t)
	o := Options{Dir: filepath.Join(t.TempDir(), "images"), MaxSize: 64 << 20}
	for _, c := range change {
		c(&o)
	}
	return NewStore(o)
}

var base = []tar.Header{folder("etc"), file("etc/passwd", "root:x:0:0::/root:/bin/sh\nweb:x:101:102::/:/bin/sh\n"), file("etc/group", "web:x:102:\nextra:x:103:other,web\n"), folder("bin"), file("bin/web", "#!")}

func nothingHere(t *testing.T, s *Store) {
	t.Helper()
	for _, dir := range []string{s.layers(), s.records(), s.temporary()} {
		if list, _ := os.ReadDir(dir); len(list) != 0 {
			t.Errorf("%s has %v", dir, list)
		}
	}
}
