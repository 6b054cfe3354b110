package image

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	goruntime "runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
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

// TestPull: an image is pulled, found, recognised as the same, and replaced by what its name then is.
func TestPull(t *testing.T) {
	t.Parallel()
	s, r := newTestStore(t), newRegistry(t)
	config := v1.Config{
		Entrypoint: []string{"/bin/web"}, Cmd: []string{"-v"}, Env: []string{"A=b"}, WorkingDir: "/srv", User: "web", StopSignal: "SIGQUIT",
		Volumes: map[string]struct{}{"/data": {}},
	}
	layers := []v1.Layer{testLayer(t, "gzip", base...), testLayer(t, "zstd", folder("srv"), file("srv/x", "1")), testLayer(t, "", folder("srv"), file("srv/.wh.x", ""))}
	ref := r.push(t, "team/web:1", testImage(t, config, layers...))
	if _, err := s.Find(ref); !errors.As(err, new(*UnknownError)) {
		t.Errorf("before it is pulled: %v", err)
	}
	var seen []Progress
	rec, err := s.Pull(t.Context(), ref, Credentials{}, func(p Progress) { seen = append(seen, p) })
	if err != nil {
		t.Fatal(err)
	}
	if last := seen[len(seen)-1]; last.Layer != 3 || last.Layers != 3 || !last.Done || last.Read != last.Size {
		t.Errorf("progress ended with %+v", last)
	}
	img, err := s.Find(ref)
	if err != nil {
		t.Fatal(err)
	}
	if len(img.Lower) != 3 || !strings.HasPrefix(img.ID, r.host+"/team/web@sha256:") || !img.OCI || img.Config.Entrypoint[0] != "/bin/web" || img.Config.StopSignal != "SIGQUIT" {
		t.Errorf("%+v", img)
	}
	if got := tree(t, img.Lower[0]); got != "srv/\nsrv/x gone" {
		t.Errorf("the uppermost layer: %s", got)
	}
	if user, err := img.Lookup(img.Config.Account); err != nil || user.UID != 101 || user.GID != 102 || !slices.Equal(user.Groups, []int64{103}) || !user.Named {
		t.Errorf("user: %+v, %v", user, err)
	}
	byDigest, err := s.Find(rec.Digests[0])
	if err != nil || byDigest.ID != img.ID {
		t.Errorf("by digest: %+v, %v", byDigest, err)
	}
	// Nothing is fetched again but the configuration.
	before := r.blobs.Load()
	if _, err := s.Pull(t.Context(), ref, Credentials{}, nil); err != nil {
		t.Fatal(err)
	}
	if n := r.blobs.Load() - before; n > 1 {
		t.Errorf("pulling the same again fetched %d blobs", n)
	}
	r.push(t, "team/web:1", testImage(t, v1.Config{Cmd: []string{"/new"}}, layers[0]))
	if _, err := s.Pull(t.Context(), ref, Credentials{}, nil); err != nil {
		t.Fatal(err)
	}
	if img, err = s.Find(ref); err != nil || img.Config.Cmd[0] != "/new" || len(img.Lower) != 1 {
		t.Errorf("the new one: %+v, %v", img, err)
	}
	list, err := s.List()
	if err != nil || len(list) != 2 || len(list[0].Names)+len(list[1].Names) != 1 {
		t.Errorf("%d images, %v", len(list), err)
	}
	// The old one has no name, and goes first. The layer that both have stays.
	removed, err := s.Prune(t.Context(), 1, time.Now().Add(time.Hour))
	if err != nil || len(removed) != 1 || len(removed[0].Names) != 0 {
		t.Errorf("pruned %+v, %v", removed, err)
	}
	if _, err := s.Find(ref); err != nil {
		t.Error(err)
	}
	if dirs, _ := os.ReadDir(s.layers()); len(dirs) != 1 {
		t.Errorf("%d layers are left", len(dirs))
	}
}

// TestPullPlatform chooses from an index what this machine runs, and says so if there is nothing.
func TestPullPlatform(t *testing.T) {
	t.Parallel()
	s, r := newTestStore(t), newRegistry(t)
	mine, other := testImage(t, v1.Config{Cmd: []string{"mine"}}, testLayer(t, "gzip", base...)), testImage(t, v1.Config{Cmd: []string{"other"}}, testLayer(t, "gzip", file("x", "y")))
	push := func(tag string, list ...mutate.IndexAddendum) string {
		ref, err := name.ParseReference(r.host + "/multi:" + tag)
		if err != nil {
			t.Fatal(err)
		}
		if err := remote.WriteIndex(ref, mutate.AppendManifests(empty.Index, list...)); err != nil {
			t.Fatal(err)
		}
		return ref.String()
	}
	for_ := func(img v1.Image, os, arch string) mutate.IndexAddendum {
		return mutate.IndexAddendum{Add: img, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: os, Architecture: arch}}}
	}
	ref := push("both", for_(other, "linux", "s390x"), for_(mine, "linux", goruntime.GOARCH))
	if _, err := s.Pull(t.Context(), ref, Credentials{}, nil); err != nil {
		t.Fatal(err)
	}
	if img, err := s.Find(ref); err != nil || img.Config.Cmd[0] != "mine" {
		t.Errorf("%+v, %v", img, err)
	}
	ref = push("none", for_(other, "linux", "s390x"))
	if _, err := s.Pull(t.Context(), ref, Credentials{}, nil); err == nil {
		t.Error("an image for other machines was pulled")
	}
	windows, err := mutate.ConfigFile(mine, func() *v1.ConfigFile {
		c, _ := mine.ConfigFile()
		c = c.DeepCopy()
		c.OS = "windows"
		return c
	}())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Pull(t.Context(), r.push(t, "win:1", windows), Credentials{}, nil); err == nil || !strings.Contains(err.Error(), "windows/") {
		t.Errorf("%v", err)
	}
}

// TestBadRegistries: what is not what its digest says is refused, and leaves nothing.
func TestBadRegistries(t *testing.T) {
	t.Parallel()
	layer := testLayer(t, "gzip", base...)
	digest, _ := layer.Digest()
	img := testImage(t, v1.Config{}, layer)
	config, _ := img.ConfigName()
	for what, c := range map[string]struct {
		change func(http.ResponseWriter, *http.Request) bool
		want   string
	}{
		"another layer": {func(w http.ResponseWriter, q *http.Request) bool {
			if !strings.Contains(q.URL.Path, digest.Hex) {
				return false
			}
			z := gzip.NewWriter(w)
			_, _ = z.Write(tarOf(t, file("evil", "x")))
			_ = z.Close()
			return true
		}, "layer 1 of 1"},
		"another configuration": {func(w http.ResponseWriter, q *http.Request) bool {
			if !strings.Contains(q.URL.Path, config.Hex) {
				return false
			}
			_, _ = io.WriteString(w, `{"os":"linux"}`)
			return true
		}, ""},
		"half a layer": {func(w http.ResponseWriter, q *http.Request) bool {
			if !strings.Contains(q.URL.Path, digest.Hex) {
				return false
			}
			data, _ := layer.Compressed()
			all, _ := io.ReadAll(data)
			w.Header().Set("Content-Length", fmt.Sprint(len(all)))
			_, _ = w.Write(all[:len(all)/2])
			return true
		}, "layer 1 of 1"},
		"an endless layer": {func(w http.ResponseWriter, q *http.Request) bool {
			if !strings.Contains(q.URL.Path, digest.Hex) {
				return false
			}
			z := gzip.NewWriter(w)
			block := make([]byte, 1<<20)
			for q.Context().Err() == nil {
				if _, err := z.Write(block); err != nil {
					break
				}
			}
			return true
		}, ""},
		"errors": {func(w http.ResponseWriter, q *http.Request) bool {
			if !strings.Contains(q.URL.Path, "/manifests/") {
				return false
			}
			w.WriteHeader(http.StatusTeapot)
			_, _ = io.WriteString(w, `{"errors":[{"code":"DENIED","message":"no tea"}]}`)
			return true
		}, "no tea"},
		"a redirect to http": {func(w http.ResponseWriter, q *http.Request) bool {
			if !strings.Contains(q.URL.Path, digest.Hex) {
				return false
			}
			http.Redirect(w, q, "http://registry.invalid/blob", http.StatusTemporaryRedirect)
			return true
		}, ""},
		"no JSON": {func(w http.ResponseWriter, q *http.Request) bool {
			if !strings.Contains(q.URL.Path, "/manifests/") {
				return false
			}
			w.Header().Set("Content-Type", string(types.OCIManifestSchema1))
			_, _ = io.WriteString(w, `<html>`)
			return true
		}, ""},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			s, r := newTestStore(t), newRegistry(t)
			ref := r.push(t, "bad:1", img)
			r.change = c.change
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			defer cancel()
			_, err := s.Pull(ctx, ref, Credentials{}, nil)
			if err == nil || !strings.Contains(err.Error(), c.want) || ctx.Err() != nil {
				t.Errorf("%v, want %q", err, c.want)
			}
			nothingHere(t, s)
			r.change = nil
			if _, err := s.Pull(t.Context(), ref, Credentials{}, nil); err != nil {
				t.Errorf("afterwards: %v", err)
			}
		})
	}
}

func nothingHere(t *testing.T, s *Store) {
	t.Helper()
	for _, dir := range []string{s.layers(), s.records(), s.temporary()} {
		if list, _ := os.ReadDir(dir); len(list) != 0 {
			t.Errorf("%s has %v", dir, list)
		}
	}
}

// TestPlainRegistries: only this machine's registries, and those that are named, are reached without encryption.
func TestPlainRegistries(t *testing.T) {
	for host, want := range map[string]bool{
		"localhost": true, "localhost:5000": true, "127.0.0.1:5000": true, "127.9.9.9": true, "[::1]:5000": true, "10.0.0.1:5000": false, "192.168.1.1": false,
		"registry.local:5000": false, "plain.example": true, "plain.example:5000": true, "other.example:81": true, "other.example:82": false, "localhost.example": false,
	} {
		if got := mayBePlain(host, []string{"plain.example", "other.example:81"}); got != want {
			t.Errorf("%s: %v, want %v", host, got, want)
		}
	}
	// The library would use http for private addresses.
	s := newTestStore(t)
	request, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://10.255.255.1/v2/", nil)
	if _, err := s.transport.RoundTrip(request); err == nil || !strings.Contains(err.Error(), "--insecure-registry") {
		t.Errorf("%v", err)
	}
}

// TestSharedPull: those who ask for one image at a time share a pull, and it ends when the last of them leaves.
func TestSharedPull(t *testing.T) {
	t.Parallel()
	s, r := newTestStore(t), newRegistry(t)
	layer := testLayer(t, "gzip", base...)
	digest, _ := layer.Digest()
	ref := r.push(t, "shared:1", testImage(t, v1.Config{}, layer))
	gate, asked := make(chan struct{}), make(chan struct{}, 10)
	r.change = func(w http.ResponseWriter, q *http.Request) bool {
		if strings.Contains(q.URL.Path, digest.Hex) {
			asked <- struct{}{}
			select {
			case <-gate:
			case <-q.Context().Done():
			}
		}
		return false
	}
	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	for i := range 5 {
		all.Go(func() {
			mine := t.Context()
			if i == 0 {
				mine = ctx
			}
			if _, err := s.Pull(mine, ref, Credentials{}, nil); (err != nil) != (i == 0) {
				t.Errorf("%d: %v", i, err)
			}
		})
	}
	<-asked
	time.Sleep(50 * time.Millisecond)
	cancel() // one of five leaves
	time.Sleep(50 * time.Millisecond)
	close(gate)
	all.Wait()
	if len(asked) != 0 {
		t.Errorf("the layer was fetched %d times more", len(asked))
	}
	// The only one leaves.
	s2, stuck := newTestStore(t), make(chan struct{})
	r.change = func(w http.ResponseWriter, q *http.Request) bool {
		if strings.Contains(q.URL.Path, digest.Hex) {
			close(stuck)
			<-q.Context().Done()
		}
		return false
	}
	ctx, cancel = context.WithCancel(t.Context())
	go func() {
		<-stuck
		cancel()
	}()
	if _, err := s2.Pull(ctx, ref, Credentials{}, nil); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	nothingHere(t, s2)
}

// TestCredentials: those that fit are tried, the most specific first, and then none.
func TestCredentials(t *testing.T) {
	t.Parallel()
	s, r := newTestStore(t), newRegistry(t)
	ref := r.push(t, "private/web:1", testImage(t, v1.Config{}, testLayer(t, "gzip", base...)))
	r.change = func(w http.ResponseWriter, q *http.Request) bool {
		if user, password, _ := q.BasicAuth(); user == "me" && password == "secret word" {
			return false
		}
		w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
		w.WriteHeader(http.StatusUnauthorized)
		return true
	}
	auth := func(user, password string) string {
		return base64.StdEncoding.EncodeToString([]byte(user + ":" + password))
	}
	creds := func(auths map[string]string) Credentials {
		m := map[string]any{}
		for k, v := range auths {
			m[k] = map[string]string{"auth": v}
		}
		data, _ := json.Marshal(map[string]any{"auths": m})
		c, err := ParseCredentials(data, false)
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	if _, err := s.Pull(t.Context(), ref, Credentials{}, nil); err == nil || !strings.Contains(err.Error(), "401") {
		t.Errorf("without credentials: %v", err)
	}
	_, err := s.Pull(t.Context(), ref, creds(map[string]string{r.host: auth("me", "wrong word")}), nil)
	if err == nil || strings.Contains(err.Error(), "wrong word") {
		t.Errorf("with wrong credentials: %v", err)
	}
	if _, err := s.Pull(t.Context(), ref, creds(map[string]string{r.host: auth("me", "wrong"), "http://" + r.host + "/private/": auth("me", "secret word")}), nil); err != nil {
		t.Errorf("with credentials: %v", err)
	}
	for pattern, want := range map[string]bool{"registry.example": false, "*.example": false, "a.registry.example": true, "*.registry.example": true, "a.*.example": true, "a.registry.example:1": false} {
		if got := matchHost(pattern, "a.registry.example"); got != want {
			t.Errorf("%s: %v", pattern, got)
		}
	}
	if host, path := registryKey("https://index.docker.io/v1/"); host != "index.docker.io" || path != "" {
		t.Errorf("%s %s", host, path)
	}
	if _, err := ParseCredentials([]byte("secret word"), false); err == nil || strings.Contains(err.Error(), "secret word") {
		t.Errorf("%v", err)
	}
}

// archives are the same image as programs write it.
func archives(t *testing.T, img v1.Image) map[string][]byte {
	t.Helper()
	tag, err := name.NewTag("example.com/web:1")
	if err != nil {
		t.Fatal(err)
	}
	var saved bytes.Buffer
	if err := tarball.Write(tag, img, &saved); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	index := mutate.AppendManifests(empty.Index, mutate.IndexAddendum{Add: img, Descriptor: v1.Descriptor{Annotations: map[string]string{nameAnnotation: "example.com/web:1"}}})
	if _, err := layout.Write(dir, index); err != nil {
		t.Fatal(err)
	}
	oci := tarFolder(t, dir)
	var zipped, zst bytes.Buffer
	z := gzip.NewWriter(&zipped)
	_, _ = z.Write(oci)
	_ = z.Close()
	e, _ := zstd.NewWriter(&zst)
	_, _ = e.Write(saved.Bytes())
	_ = e.Close()
	return map[string][]byte{"docker save": saved.Bytes(), "OCI layout": oci, "OCI layout, gzip": zipped.Bytes(), "docker save, zstd": zst.Bytes()}
}

func tarFolder(t *testing.T, dir string) []byte {
	t.Helper()
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	if err := w.AddFS(os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	_ = w.Close()
	return out.Bytes()
}

func TestLoad(t *testing.T) {
	t.Parallel()
	img := testImage(t, v1.Config{Cmd: []string{"/bin/web"}}, testLayer(t, "gzip", base...), testLayer(t, "gzip", file("etc/x", "1")), testLayer(t, "gzip", base...))
	for what, data := range archives(t, img) {
		for _, from := range []string{"file", "stream"} {
			t.Run(what+", "+from, func(t *testing.T) {
				s := newTestStore(t)
				var r io.Reader = bytes.NewReader(data)
				if from == "file" {
					path := filepath.Join(t.TempDir(), "archive")
					if err := os.WriteFile(path, data, 0o600); err != nil {
						t.Fatal(err)
					}
					f, err := os.Open(path)
					if err != nil {
						t.Fatal(err)
					}
					defer f.Close()
					r = f
				}
				list, err := s.Load(t.Context(), r, "", nil)
				if err != nil || len(list) != 1 || !list[0].Pinned {
					t.Fatalf("%+v, %v", list, err)
				}
				found, err := s.Find("example.com/web:1")
				// The layer that is there twice is mounted once.
				if err != nil || len(found.Lower) != 2 || found.Config.Cmd[0] != "/bin/web" {
					t.Fatalf("%+v, %v", found, err)
				}
				if removed, err := s.Prune(t.Context(), 1<<40, time.Now().Add(time.Hour)); err != nil || len(removed) != 0 {
					t.Errorf("a loaded image was pruned: %v, %v", removed, err)
				}
				if gone, err := s.Remove(t.Context(), "example.com/web:1"); err != nil || !gone {
					t.Errorf("%v, %v", gone, err)
				}
				nothingHere(t, s)
			})
		}
	}
}

// TestBadArchives: mistakes are told, and leave nothing.
func TestBadArchives(t *testing.T) {
	t.Parallel()
	img := testImage(t, v1.Config{}, testLayer(t, "gzip", base...))
	good := archives(t, img)
	config, _ := img.RawConfigFile()
	digest, _ := img.ConfigName()
	other := testImage(t, v1.Config{}, testLayer(t, "gzip", file("x", "y")))
	layer, _ := other.Layers()
	read, _ := layer[0].Compressed()
	wrong, _ := io.ReadAll(read)
	manifest := func(cfg, layers string) tar.Header {
		return file("manifest.json", fmt.Sprintf(`[{"Config":%q,"RepoTags":["a:1"],"Layers":[%s]}]`, cfg, layers))
	}
	bomb := func() []byte {
		var out bytes.Buffer
		z, _ := gzip.NewWriterLevel(&out, 9)
		block := make([]byte, 1<<20)
		for range 200 {
			_, _ = z.Write(block)
		}
		_ = z.Close()
		return out.Bytes()
	}()
	for what, c := range map[string]struct {
		data []byte
		want string
	}{
		"nothing":             {nil, "neither"},
		"text":                {bytes.Repeat([]byte("x"), 2000), "no tar archive"},
		"no manifest":         {tarOf(t, file("a", "b")), "neither"},
		"bad manifest":        {tarOf(t, file("manifest.json", "{")), "manifest.json"},
		"bad index":           {tarOf(t, file("index.json", "[]")), "index.json"},
		"empty index":         {tarOf(t, file("index.json", "{}")), "no image for"},
		"config is missing":   {tarOf(t, manifest("c.json", "")), "no file"},
		"config outside":      {tarOf(t, manifest("../../etc/passwd", "")), "no file"},
		"config is another":   {tarOf(t, manifest(digest.Hex+".json", ""), file(digest.Hex+".json", "{}")), "its content is another"},
		"layer is missing":    {tarOf(t, manifest("c.json", `"l.tar"`), file("c.json", string(config))), "no file"},
		"layer is another":    {tarOf(t, manifest("c.json", `"l.tar"`), file("c.json", string(config)), file("l.tar", string(wrong))), "but the image says"},
		"too few layers":      {tarOf(t, manifest("c.json", ""), file("c.json", string(config))), "names 1 layers"},
		"a bomb":              {bomb, "--image-max-size"},
		"a bomb inside":       {tarOf(t, manifest("c.json", `"l.tar"`), file("c.json", string(config)), file("l.tar", string(bomb))), ""},
		"a bad name":          {bytes.ReplaceAll(good["docker save"], []byte("example.com/web:1"), []byte("EXAMPLE.com/Web:1")), "reference"},
		"links in a circle":   {tarOf(t, manifest("c.json", ""), symlink("c.json", "d.json"), symlink("d.json", "c.json")), "no file"},
		"an enormous config":  {tarOf(t, manifest("c.json", ""), file("c.json", strings.Repeat(" ", 5<<20))), "more than a manifest"},
		"cut off":             {good["OCI layout"][:len(good["OCI layout"])/2], ""},
		"a name that is gone": {tarOf(t, file("manifest.json", strings.ReplaceAll(`[{"Config":"c.json","Layers":["l.tar"]}]`, "'", "")), file("c.json", string(config)), file("l.tar", "")), "--name"},
	} {
		t.Run(what, func(t *testing.T) {
			s := newTestStore(t, func(o *Options) { o.MaxSize = 8 << 20 })
			_, err := s.Load(t.Context(), bytes.NewReader(c.data), "", nil)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, want %q", err, c.want)
			}
			nothingHere(t, s)
		})
	}
}

// TestInterrupted: what a killed process left is removed by the next, and what a living one works on is not.
func TestInterrupted(t *testing.T) {
	t.Parallel()
	s := newTestStore(t)
	living, err := s.workspace(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	dead := filepath.Join(s.temporary(), "dead")
	if err := os.MkdirAll(filepath.Join(dead, "layer-0/usr"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dead, workspaceLock), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(s.layer("sha256-orphan"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := s.Clean(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(dead); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the dead one's: %v", err)
	}
	if _, err := os.Stat(s.layer("sha256-orphan")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a layer of no image: %v", err)
	}
	if _, err := os.Stat(living.dir); err != nil {
		t.Errorf("the living one's: %v", err)
	}
	living.close()
	nothingHere(t, s)
}

// TestTogether has two processes' worth of stores pull, load, prune and remove in one folder at once: an image that is found is complete.
func TestTogether(t *testing.T) {
	t.Parallel()
	first, r := newTestStore(t), newRegistry(t)
	second := NewStore(first.Options)
	shared := testLayer(t, "gzip", base...)
	var refs []string
	for i := range 4 {
		refs = append(refs, r.push(t, fmt.Sprintf("many:%d", i), testImage(t, v1.Config{Cmd: []string{fmt.Sprint(i)}}, shared, testLayer(t, "gzip", file("n", fmt.Sprint(i))))))
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	var all sync.WaitGroup
	var pulled atomic.Int32
	for i, s := range []*Store{first, second, first, second} {
		all.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				ref := refs[(n+i)%len(refs)]
				rec, err := s.Pull(ctx, ref, Credentials{}, nil)
				if err != nil && ctx.Err() == nil {
					t.Errorf("pull: %v", err)
					return
				}
				if err == nil && len(rec.Layers) != 2 {
					t.Errorf("%+v", rec)
				}
				pulled.Add(1)
			}
		})
	}
	all.Go(func() {
		for ctx.Err() == nil {
			if _, err := second.Prune(ctx, 1<<40, time.Now().Add(time.Hour)); err != nil && ctx.Err() == nil {
				t.Errorf("prune: %v", err)
			}
			if err := first.Clean(ctx); err != nil && ctx.Err() == nil {
				t.Errorf("clean: %v", err)
			}
		}
	})
	all.Wait()
	if pulled.Load() < 8 {
		t.Errorf("only %d pulls", pulled.Load())
	}
	if _, err := first.Prune(t.Context(), 1<<40, time.Now().Add(time.Hour)); err != nil {
		t.Fatal(err)
	}
	nothingHere(t, first)
}

func TestRemoveAndChoose(t *testing.T) {
	t.Parallel()
	used := map[string]bool{}
	s, r := newTestStore(t, func(o *Options) { o.InUse = func() (map[string]bool, error) { return used, nil } }), newRegistry(t)
	img := testImage(t, v1.Config{}, testLayer(t, "gzip", base...))
	a, b := r.push(t, "web:1", img), r.push(t, "web:2", img)
	for _, ref := range []string{a, b} {
		if _, err := s.Pull(t.Context(), ref, Credentials{}, nil); err != nil {
			t.Fatal(err)
		}
	}
	found, err := s.Find(a)
	if err != nil {
		t.Fatal(err)
	}
	if gone, err := s.Remove(t.Context(), a); err != nil || gone {
		t.Errorf("the first of two names: %v, %v", gone, err)
	}
	used[found.ID] = true
	if _, err := s.Remove(t.Context(), b); !errors.As(err, new(*InUseError)) {
		t.Errorf("in use: %v", err)
	}
	if removed, err := s.Prune(t.Context(), 1<<40, time.Now().Add(time.Hour)); err != nil || len(removed) != 0 {
		t.Errorf("in use: %v, %v", removed, err)
	}
	delete(used, found.ID)
	list, _ := s.List()
	if gone, err := s.Remove(t.Context(), strings.TrimPrefix(list[0].ID, "sha256:")[:12]); err != nil || !gone {
		t.Errorf("by ID: %v, %v", gone, err)
	}
	if _, err := s.Remove(t.Context(), b); !errors.As(err, new(*UnknownError)) {
		t.Errorf("twice: %v", err)
	}

	now := time.Now()
	rec := func(id string, age time.Duration, pinned bool, layers ...Layer) *Record {
		return &Record{ID: id, Used: now.Add(-age), Pulled: now.Add(-age), Pinned: pinned, Layers: layers}
	}
	common, own := Layer{Dir: "common", Size: 100}, func(n string) Layer { return Layer{Dir: n, Size: 10} }
	all := []*Record{rec("new", time.Second, false, own("0")), rec("b", time.Hour, false, common, own("1")), rec("pinned", 2*time.Hour, true, own("2")), rec("used", 2*time.Hour, false, own("3")), rec("c", 3*time.Hour, false, common, own("4"))}
	for need, want := range map[int64]string{0: "", 5: "c", 10: "c", 11: "c b", 1000: "c b"} {
		var got []string
		for _, r := range Choose(all, map[string]bool{"used": true}, need, now.Add(-time.Minute)) {
			got = append(got, r.ID)
		}
		if strings.Join(got, " ") != want {
			t.Errorf("need %d: %v, want %s", need, got, want)
		}
	}
	for _, c := range []struct{ capacity, available, want int64 }{{1000, 200, 0}, {1000, 151, 0}, {1000, 150, 50}, {1000, 0, 200}, {0, 0, 0}} {
		if got := excess(c.capacity, c.available, Thresholds{High: 85, Low: 80}); got != c.want {
			t.Errorf("%+v: %d", c, got)
		}
	}
}

func TestLookup(t *testing.T) {
	dir := t.TempDir()
	top, bottom := filepath.Join(dir, "top"), filepath.Join(dir, "bottom")
	for path, text := range map[string]string{
		bottom + "/etc/passwd": "root:x:0:0::/:\nweb:x:101:102::/:\n",
		top + "/etc/group":     "wheel:x:10:root,web\nweb:x:102:\n",
		bottom + "/etc/group":  "hidden:x:99:web\n",
	} {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	img := Image{Lower: []string{top, bottom}}
	for account, want := range map[string]string{
		"": "{0 0 [10] false}", "0": "{0 0 [10] false}", "web": "{101 102 [10] true}", "101": "{101 102 [10] false}", "web:wheel": "{101 10 [] true}",
		"web:7": "{101 7 [] true}", "5": "{5 0 [] false}", "5:6": "{5 6 [] false}",
	} {
		if got, err := img.Lookup(account); err != nil || fmt.Sprint(got) != want {
			t.Errorf("%q: %v, %v, want %s", account, got, err, want)
		}
	}
	for _, account := range []string{"nobody", "web:nobody", "99999999999", "4294967295"} {
		if got, err := img.Lookup(account); err == nil {
			t.Errorf("%q: %v", account, got)
		}
	}
	if got, err := (Image{Lower: []string{dir}}).Lookup(""); err != nil || got.UID != 0 {
		t.Errorf("without /etc/passwd: %v, %v", got, err)
	}
}
