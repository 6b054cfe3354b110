package house

import (
	"go/ast"
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

// TestPointers checks where CONTRIBUTING.md says things are decided: the files exist and declare what is said to be in them, and each
// question is there once.
func TestPointers(t *testing.T) {
	declared := map[string][]string{} // names by file, and by folder
	for _, f := range files(t) {
		for _, name := range declarations(f.syntax) {
			declared[f.path], declared[f.dir] = append(declared[f.path], name), append(declared[f.dir], name)
		}
	}
	name := regexp.MustCompile(`^\w+$`)
	asked := map[string]bool{}
	pointers := 0
	for row := range strings.Lines(section(t, read(t, "CONTRIBUTING.md"), "Where is it decided …")) {
		question, answer, found := strings.Cut(strings.TrimPrefix(row, "| "), " | ")
		if !found || !strings.Contains(answer, "`") {
			continue
		}
		if asked[question] {
			t.Errorf("CONTRIBUTING.md says twice where it is decided %s", question)
		}
		asked[question] = true
		folder := ""
		var names []string // that the next path is to have
		for _, m := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(answer, -1) {
			path := m[1]
			switch bare := strings.HasSuffix(path, ".go") && !strings.Contains(path, "/"); {
			case name.MatchString(path):
				names = append(names, path)
				continue
			case bare:
				path = folder + "/" + path
			case !strings.HasPrefix(path, "cmd/") && !strings.HasPrefix(path, "internal/"):
				continue // a command, a flag, what somebody asks for
			}
			pointers++
			if !exists(path) {
				t.Errorf("%s: %s does not exist", question, path)
			}
			for _, one := range names {
				if !slices.Contains(declared[path], one) {
					t.Errorf("%s: %s does not declare %s", question, path, one)
				}
			}
			names, folder = nil, strings.TrimSuffix(path, "/"+filepath.Base(path))
			if !strings.Contains(filepath.Base(path), ".") {
				folder = path
			}
		}
		if len(names) > 0 {
			t.Errorf("%s: no path is behind %q", question, names)
		}
	}
	if pointers < 10 {
		t.Fatalf("only %d pointers found", pointers)
	}
}

// declarations are the names that a file declares: functions, types with their methods and fields, variables and constants.
func declarations(of *ast.File) (out []string) {
	ast.Inspect(of, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.FuncDecl:
			out = append(out, n.Name.Name)
			return false
		case *ast.TypeSpec:
			out = append(out, n.Name.Name)
		case *ast.ValueSpec:
			out = append(out, namesOf(n.Names)...)
		case *ast.Field:
			out = append(out, namesOf(n.Names)...)
		}
		return true
	})
	return out
}

func namesOf(list []*ast.Ident) (out []string) {
	for _, n := range list {
		out = append(out, n.Name)
	}
	return out
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
