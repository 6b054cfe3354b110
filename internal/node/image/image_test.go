package image

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestNormalize(t *testing.T) {
	for in, want := range map[string]string{
		"nginx": "docker.io/library/nginx:latest", "nginx:1": "docker.io/library/nginx:1", "a/b": "docker.io/a/b:latest", "r.example/a": "r.example/a:latest",
		"localhost/a:1": "localhost/a:1", "r:5000/a@sha256:00": "r:5000/a@sha256:00", "docker.io/library/nginx:latest": "docker.io/library/nginx:latest",
	} {
		if got := Normalize(in); got != want {
			t.Errorf("%s: %s, want %s", in, got, want)
		}
	}
}

func TestFind(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "map.yaml")
	write := func(text string) {
		if err := os.WriteFile(file, []byte(strings.ReplaceAll(text, "DIR", dir)), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("images:\n- {name: example.com/web:1, dir: DIR, entrypoint: [/web], user: 7}\n")
	list, err := ReadMap(file)
	if err != nil {
		t.Fatal(err)
	}
	s := NewStore(Options{Mappings: list, Hidden: []string{"/data"}})
	web, err := s.Find("example.com/web:1")
	if err != nil || web.Lower[0] != dir || web.Config.Entrypoint[0] != "/web" || *web.Config.User != 7 || len(web.Hide) != 0 {
		t.Errorf("%+v, %v", web, err)
	}
	host, err := s.Find("host")
	if err != nil || !slices.Contains(host.Hide, "/data") || !slices.Contains(host.Hide, "/etc/shadow") || host.Lower[0] != "/" {
		t.Errorf("%+v, %v", host, err)
	}
	var unknown *UnknownError
	if _, err := s.Find("example.com/web:2"); !errors.As(err, &unknown) {
		t.Error(err)
	}
	for text, want := range map[string]string{
		"images: [{dir: DIR}]":                                      "images[0].name: is required",
		"images: [{name: host, dir: DIR}]":                          "can't be mapped",
		"images: [{name: a, dir: x}]":                               "must be an absolute path",
		"images: [{name: a, dir: DIR/none}]":                        "is not a folder",
		"images: [{name: a, dir: DIR}, {name: a:latest, dir: DIR}]": "there twice",
		"image: []": "unknown field",
	} {
		write(text)
		if _, err := ReadMap(file); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
}
