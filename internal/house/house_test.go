package house

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const root = "../.."

// file is a Go file of the repository, parsed.
type file struct {
	path    string // from the repository's root
	dir     string
	test    bool
	imports []string
	syntax  *ast.File
}

// files parses every Go file that people wrote.
func files(t *testing.T) []file {
	t.Helper()
	var out []file
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() && (strings.HasPrefix(entry.Name(), ".") && path != root || entry.Name() == "testdata") {
			return fs.SkipDir
		}
		if entry.IsDir() || !strings.HasSuffix(path, ".go") || strings.Contains(path, "zz_generated") || strings.HasSuffix(path, "_bpfel.go") {
			return nil
		}
		syntax, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ParseComments)
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		f := file{path: rel, dir: filepath.ToSlash(filepath.Dir(rel)), test: strings.HasSuffix(path, "_test.go"), syntax: syntax}
		for _, spec := range syntax.Imports {
			name, err := strconv.Unquote(spec.Path.Value)
			if err != nil {
				return err
			}
			f.imports = append(f.imports, name)
		}
		out = append(out, f)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(out) < 20 {
		t.Fatalf("only %d Go files found: the walk is broken", len(out))
	}
	return out
}

func under(dir string, roots ...string) bool {
	return slices.ContainsFunc(roots, func(r string) bool { return dir == r || strings.HasPrefix(dir, r+"/") })
}

func standard(imported string) bool {
	first, _, _ := strings.Cut(imported, "/")
	return !strings.Contains(first, ".") && first != "portal"
}

// early are the packages in which the binary takes over under another name.
var early = []string{"internal/node/runtime/shim", "internal/lab/machine"}

var modes = []string{"nftables", "iptables", "ipvs", "userspace"}

// TestImports enforces the direction in which data flows: what users asked for → what it means here → what the kernel does.
func TestImports(t *testing.T) {
	mayUseClientGo := []string{
		// store has to name one of its types, because k8s.io/apiserver does in the signature of a storage decorator.
		"cmd", "test", "bench", "internal/store", "internal/apiserver", "internal/audit", "internal/console", "internal/server", "internal/controllers", "internal/explain/gather", "internal/intent/watch", "internal/join", "internal/lab", "internal/lb", "internal/node", "internal/reports/publish", "internal/trace/learn", "internal/up",
	}
	for _, f := range files(t) {
		for _, imported := range f.imports {
			refuse := func(why string) { t.Errorf("%s imports %s: %s", f.path, imported, why) }
			switch {
			case strings.HasPrefix(imported, "k8s.io/kubernetes") && !under(f.dir, "bench/peers"):
				refuse("k8s.io/kubernetes is no library; only bench/peers builds its programs")
			case strings.HasPrefix(imported, "k8s.io/client-go") && !under(f.dir, mayUseClientGo...):
				refuse("client-go is for the edges only")
			case f.test:
				// Tests may import more than what they test.
			case f.dir == "internal/plan" && !standard(imported) && imported != "portal/internal/intent":
				refuse("plan is pure: intent and the standard library")
			case f.dir == "internal/intent" && !standard(imported):
				refuse("intent is plain data: the standard library")
			case f.dir == "internal/alloc" && !standard(imported):
				refuse("alloc is pure: the standard library")
			case (under(f.dir, "internal/apiserver") || f.dir == "internal/audit") && strings.HasPrefix(imported, "portal/internal/controllers"):
				refuse("controllers are clients of the API, which knows none of them")
			case under(f.dir, early...) && !standard(imported) && imported != "golang.org/x/sys/unix":
				refuse("it takes over before other packages are initialised, and its processes are small")
			case nodePart(f.dir) != "" && nodePart(strings.TrimPrefix(imported, "portal/")) != "" && nodePart(strings.TrimPrefix(imported, "portal/")) != nodePart(f.dir):
				refuse("the parts of a node know nothing of each other: internal/node brings them together")
			case f.dir == "internal/node/life" && strings.HasPrefix(imported, "portal/") && imported != "portal/internal/restarts":
				refuse("life is pure: the API's types, the standard library, and what the API server decides in the same way")
			case under(f.dir, "internal/store") && strings.HasPrefix(imported, "portal/"):
				refuse("store knows no resource by name")
			case mode(f.dir) != "":
				if strings.HasPrefix(imported, "k8s.io/") {
					refuse("a mode encodes a Snapshot and knows nothing of Kubernetes")
				}
				if other := mode(strings.TrimPrefix(imported, "portal/")); other != "" && other != mode(f.dir) {
					refuse("a mode knows no other mode")
				}
			}
		}
	}
}

// nodePart is the part of a node that a folder belongs to, or "".
func nodePart(dir string) string {
	rest, found := strings.CutPrefix(dir, "internal/node/")
	if !found {
		return ""
	}
	part, _, _ := strings.Cut(rest, "/")
	return part
}

// mode is the proxy mode that a folder belongs to, or "".
func mode(dir string) string {
	for _, m := range modes {
		if under(dir, "internal/proxy/"+m) {
			return m
		}
	}
	return ""
}

// TestNoHiddenStart allows no init functions and no package-level flags: what happens is in constructors and Run.
func TestNoHiddenStart(t *testing.T) {
	for _, f := range files(t) {
		if f.test {
			continue
		}
		for _, decl := range f.syntax.Decls {
			// These exist to come before other packages are initialised.
			if fn, ok := decl.(*ast.FuncDecl); ok && fn.Recv == nil && fn.Name.Name == "init" && f.dir != "internal/translations" && !slices.Contains(early, f.dir) {
				t.Errorf("%s has an init function: importing a package must do nothing", f.path)
			}
		}
		if slices.Contains(f.imports, "flag") && !under(f.dir, "bench") {
			t.Errorf("%s imports flag: flags are read in cmd, by cobra", f.path)
		}
	}
}

// TestNetlinkDeadlines allows no netlink sockets that are kept and wait for an answer for ever, as those of netlink.NewHandle do.
func TestNetlinkDeadlines(t *testing.T) {
	for _, f := range files(t) {
		if f.test || f.dir == "internal/hostnet" || !slices.Contains(f.imports, "github.com/vishvananda/netlink") {
			continue
		}
		ast.Inspect(f.syntax, func(n ast.Node) bool {
			if s, ok := n.(*ast.SelectorExpr); ok && strings.HasPrefix(s.Sel.Name, "NewHandle") {
				if of, ok := s.X.(*ast.Ident); ok && of.Name == "netlink" {
					t.Errorf("%s calls netlink.%s: hostnet.OpenNetlink sets a deadline", f.path, s.Sel.Name)
				}
			}
			return true
		})
	}
}

// TestPackageComments requires a doc comment that says what the package is for.
func TestPackageComments(t *testing.T) {
	documented := map[string]bool{}
	for _, f := range files(t) {
		if !f.test {
			documented[f.dir] = documented[f.dir] || f.syntax.Doc != nil
		}
	}
	for dir, ok := range documented {
		if !ok {
			t.Errorf("package %s has no doc comment", dir)
		}
	}
}

// TestModuleFile allows no replaced dependencies: Portal is an ordinary module.
func TestModuleFile(t *testing.T) {
	data, err := os.ReadFile(filepath.Join(root, "go.mod"))
	if err != nil {
		t.Fatal(err)
	}
	for line := range bytes.Lines(data) {
		if bytes.HasPrefix(bytes.TrimSpace(line), []byte("replace")) {
			t.Errorf("go.mod replaces a dependency: %s", line)
		}
	}
}
