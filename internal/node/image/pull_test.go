package image

import (
	"compress/gzip"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	goruntime "runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

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

// TestPanicInPull: it reaches those who wait for the pull, who know what to do about it; the next pull begins anew.
func TestPanicInPull(t *testing.T) {
	s, r := newTestStore(t), newRegistry(t)
	ref := r.push(t, "it:1", testImage(t, v1.Config{}, testLayer(t, "gzip", base...)))
	for range 2 {
		func() {
			defer func() {
				if p := recover(); p == nil || !strings.HasPrefix(fmt.Sprint(p), "while pulling\n") {
					t.Errorf("it ended with %v", p)
				}
			}()
			_, err := s.Pull(t.Context(), ref, Credentials{}, func(Progress) { panic("while pulling") })
			t.Errorf("it ended with %v", err)
		}()
	}
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
