package console

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"io/fs"
	"net/http"
	"path"
	"strings"
)

// dist is what `make console` builds from ui/src.
//
//go:embed ui/dist
var dist embed.FS

const indexFile = "index.html"

// asset is a file of the page, as it is and compressed.
type asset struct {
	plain, compressed []byte
	kind, tag         string
}

// assets serves the page's files. Every other path gets the page itself, which shows what the path says.
type assets struct{ files map[string]asset }

var kinds = map[string]string{
	".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8",
	".svg": "image/svg+xml", ".txt": "text/plain; charset=utf-8",
}

func newAssets() (*assets, error) {
	a := &assets{files: map[string]asset{}}
	err := fs.WalkDir(dist, "ui/dist", func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		data, err := dist.ReadFile(name)
		if err != nil {
			return err
		}
		var packed bytes.Buffer
		writer, err := gzip.NewWriterLevel(&packed, gzip.BestCompression)
		if err != nil {
			return err
		}
		if _, err := writer.Write(data); err != nil {
			return err
		}
		if err := writer.Close(); err != nil {
			return err
		}
		sum := sha256.Sum256(data)
		a.files[strings.TrimPrefix(name, "ui/dist/")] = asset{
			plain: data, compressed: packed.Bytes(), kind: kinds[path.Ext(name)], tag: `"` + hex.EncodeToString(sum[:12]) + `"`,
		}
		return nil
	})
	return a, err
}

func (a *assets) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		w.Header().Set("Allow", "GET, HEAD")
		refuse(w, http.StatusMethodNotAllowed, "", "the page can only be read")
		return
	}
	name := strings.TrimPrefix(r.URL.Path, Path)
	file, found := a.files[name]
	if strings.HasPrefix(name, "assets/") {
		if !found {
			http.NotFound(w, r)
			return
		}
		// Their names have a hash of their content.
		w.Header().Set("Cache-Control", "public, max-age=31536000, immutable")
	} else {
		if !found {
			file = a.files[indexFile]
		}
		w.Header().Set("Cache-Control", "no-cache")
	}
	w.Header().Set("Content-Type", file.kind)
	w.Header().Set("ETag", file.tag)
	w.Header().Set("Vary", "Accept-Encoding")
	if r.Header.Get("If-None-Match") == file.tag {
		w.WriteHeader(http.StatusNotModified)
		return
	}
	body := file.plain
	if acceptsGzip(r) && len(file.compressed) < len(file.plain) {
		w.Header().Set("Content-Encoding", "gzip")
		body = file.compressed
	}
	if r.Method == http.MethodGet {
		_, _ = w.Write(body)
	}
}

func acceptsGzip(r *http.Request) bool {
	for _, coding := range strings.Split(r.Header.Get("Accept-Encoding"), ",") {
		name, parameters, _ := strings.Cut(strings.TrimSpace(coding), ";")
		if name == "gzip" && strings.ReplaceAll(parameters, " ", "") != "q=0" {
			return true
		}
	}
	return false
}
