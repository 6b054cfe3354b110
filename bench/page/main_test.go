package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"portal/bench/report"
)

func TestPageShowsWhatWasMissedFirst(t *testing.T) {
	dir := t.TempDir()
	var files []string
	for name, title := range map[string]string{"b": "Second", "a": "First"} {
		r := report.New(name, title, []string{"peer"}, []string{"portal"})
		at := r.At("restart", 100, "Services")
		at.Lower("peer", "start", 2, "s")
		at.Lower("portal", "start", 1, "s")
		at.WantTimes("portal", "start", "peer", map[string]float64{"a": 2, "b": 3}[name])
		file := filepath.Join(dir, name+".json")
		if err := r.Save(file); err != nil {
			t.Fatal(err)
		}
		files = append(files, file)
	}
	out := filepath.Join(dir, "page.md")
	if err := write(out, files); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	page := string(data)
	at := 0
	for _, want := range []string{"1 of 2 targets are met. Missed:", "- Second: restart, 100 Services: start of portal is 2×", "## First", "## Second"} {
		i := strings.Index(page, want)
		if i < at {
			t.Errorf("%q is not where it should be in:\n%s", want, page)
		}
		at = i
	}
}
