package image

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/klauspost/compress/zstd"
)

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

// TestBadArchives: mistakes are reported, and leave nothing.
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
