package house

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// read returns a file of the repository.
func read(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(root, path))
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// section returns what is below a heading of a Markdown file, up to the next heading.
func section(t *testing.T, text, heading string) string {
	t.Helper()
	_, rest, found := strings.Cut(text, "\n## "+heading+"\n")
	if !found {
		t.Fatalf("there is no heading %q", heading)
	}
	rest, _, _ = strings.Cut(rest, "\n## ")
	return rest
}

func exists(path string) bool {
	_, err := os.Stat(filepath.Join(root, path))
	return err == nil
}

// TestMap compares the map in CONTRIBUTING.md with the tree: every package is on it, and everything on it exists.
func TestMap(t *testing.T) {
	var listed []string
	for _, m := range regexp.MustCompile(`(?m)^((?:cmd|internal|test|bench|docs)\S*)`).FindAllStringSubmatch(section(t, read(t, "CONTRIBUTING.md"), "The map"), -1) {
		listed = append(listed, m[1])
		if path := strings.TrimSuffix(m[1], "/…"); !exists(path) {
			t.Errorf("CONTRIBUTING.md's map has %s, which does not exist", m[1])
		}
	}
	covered := func(dir string) bool {
		return slices.ContainsFunc(listed, func(entry string) bool {
			below, all := strings.CutSuffix(entry, "/…")
			return entry == dir || all && strings.HasPrefix(dir, below+"/")
		})
	}
	reported := map[string]bool{}
	for _, f := range files(t) {
		if !covered(f.dir) && !reported[f.dir] {
			reported[f.dir] = true
			t.Errorf("CONTRIBUTING.md's map does not show the package %s", f.dir)
		}
	}
}

// TestPointers checks that the files exist in which CONTRIBUTING.md says things are decided.
func TestPointers(t *testing.T) {
	found := regexp.MustCompile("`((?:cmd|internal)/[^`]+)`").FindAllStringSubmatch(section(t, read(t, "CONTRIBUTING.md"), "Where is it decided …"), -1)
	if len(found) < 10 {
		t.Fatalf("only %d pointers found", len(found))
	}
	for _, m := range found {
		if !exists(m[1]) {
			t.Errorf("CONTRIBUTING.md points to %s, which does not exist", m[1])
		}
	}
}

// TestDecisions checks that the index of decisions has every page, with the page's own title.
func TestDecisions(t *testing.T) {
	index := read(t, "docs/adr/README.md")
	pages, err := filepath.Glob(filepath.Join(root, "docs/adr/[0-9]*.md"))
	if err != nil || len(pages) == 0 {
		t.Fatal("no decisions found: ", err)
	}
	for _, page := range pages {
		name := filepath.Base(page)
		number, _, _ := strings.Cut(name, "-")
		first, _, _ := strings.Cut(read(t, "docs/adr/"+name), "\n")
		title := strings.TrimPrefix(first, "# "+number+": ")
		if title == first {
			t.Errorf("%s begins with %q; want # %s: and a title", name, first, number)
		}
		if row := "| [" + number + "](" + name + ") | " + title + " |"; !strings.Contains(index, row) {
			t.Errorf("docs/adr/README.md lacks the row %s", row)
		}
	}
}

// TestLinks checks that relative links in the documents lead somewhere.
func TestLinks(t *testing.T) {
	documents := []string{"README.md", "CONTRIBUTING.md"}
	for _, pattern := range []string{"docs/*.md", "docs/adr/*.md"} {
		found, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range found {
			rel, err := filepath.Rel(root, path)
			if err != nil {
				t.Fatal(err)
			}
			documents = append(documents, rel)
		}
	}
	link := regexp.MustCompile(`\]\(([^)#:]+)(#[^)]*)?\)`)
	for _, document := range documents {
		for _, m := range link.FindAllStringSubmatch(read(t, document), -1) {
			if !exists(filepath.Join(filepath.Dir(document), m[1])) {
				t.Errorf("%s links to %s, which does not exist", document, m[1])
			}
		}
	}
}
