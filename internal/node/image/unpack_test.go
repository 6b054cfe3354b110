package image

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// needRoot skips what needs the rights to give files to users and to make whiteouts.
func needRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
}

// tarOf makes an archive. Entries without a mode get a usual one.
func tarOf(t testing.TB, entries ...tar.Header) []byte {
	t.Helper()
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for _, h := range entries {
		content := h.Uname // where tests put it
		h.Uname = ""
		if h.Typeflag == 0 {
			h.Typeflag = tar.TypeReg
		}
		if h.Typeflag == tar.TypeXGlobalHeader {
			if err := w.WriteHeader(&h); err != nil {
				t.Fatal(err)
			}
			continue
		}
		if h.Mode == 0 {
			h.Mode = 0o644
			if h.Typeflag == tar.TypeDir {
				h.Mode = 0o755
			}
		}
		if h.Typeflag == tar.TypeReg {
			h.Size = int64(len(content))
		}
		if h.ModTime.IsZero() {
			h.ModTime = time.Unix(1_000_000_000, 0)
		}
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, content); err != nil && h.Typeflag == tar.TypeReg {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func file(name, content string) tar.Header { return tar.Header{Name: name, Uname: content} }
func folder(name string) tar.Header        { return tar.Header{Name: name, Typeflag: tar.TypeDir} }
func symlink(name, to string) tar.Header {
	return tar.Header{Name: name, Typeflag: tar.TypeSymlink, Linkname: to}
}
func hardlink(name, to string) tar.Header {
	return tar.Header{Name: name, Typeflag: tar.TypeLink, Linkname: to}
}

func unpackTo(t testing.TB, dir string, data []byte, parents ...string) (Unpacked, error) {
	t.Helper()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return Unpack(context.Background(), bytes.NewReader(data), dir, parents, &Budget{Size: 1 << 20, Entries: 10_000})
}

// tree describes what is below a folder.
func tree(t testing.TB, dir string) string {
	t.Helper()
	var out []string
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || path == dir {
			return err
		}
		name, _ := filepath.Rel(dir, path)
		st, err := e.Info()
		if err != nil {
			return err
		}
		sys := st.Sys().(*syscall.Stat_t)
		switch {
		case st.IsDir():
			name += "/"
			value := make([]byte, 8)
			if n, err := unix.Lgetxattr(path, opaque, value); err == nil && string(value[:n]) == "y" {
				name += " opaque"
			}
		case st.Mode()&fs.ModeSymlink != 0:
			to, _ := os.Readlink(path)
			name += " -> " + to
		case st.Mode()&fs.ModeCharDevice != 0 && sys.Rdev == 0:
			name += " gone"
		case st.Mode().IsRegular():
			data, _ := os.ReadFile(path)
			name += "=" + string(data)
		default:
			name += " " + st.Mode().Type().String()
		}
		out = append(out, name)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return strings.Join(out, "\n")
}

func TestUnpack(t *testing.T) {
	needRoot(t)
	for name, c := range map[string]struct {
		below, layer []tar.Header
		want         string
		dependent    bool
	}{
		"files": {
			layer: []tar.Header{folder("./"), folder("a/"), file("a/b", "x"), symlink("a/c", "b"), hardlink("a/d", "a/b"), {Name: "p", Typeflag: tar.TypeFifo}},
			want:  "a/\na/b=x\na/c -> b\na/d=x\np p---------",
		},
		"whiteouts":             {layer: []tar.Header{folder("a"), file("a/.wh.b", ""), file(".wh.c", "")}, want: "a/\na/b gone\nc gone"},
		"opaque":                {layer: []tar.Header{folder("a"), file("a/.wh..wh..opq", ""), file("a/b", "x")}, want: "a/ opaque\na/b=x"},
		"other notes":           {layer: []tar.Header{folder("a"), folder("a/.wh..wh.plnk"), file(".wh..wh.aufs", "")}, want: "a/"},
		"whiteout, then folder": {layer: []tar.Header{file(".wh.a", ""), folder("a"), file("a/b", "x")}, want: "a/ opaque\na/b=x"},
		"folder, then whiteout": {layer: []tar.Header{folder("a"), file("a/b", "x"), file(".wh.a", "")}, want: "a/ opaque\na/b=x"},
		"whiteout, then below":  {layer: []tar.Header{file(".wh.a", ""), file("a/b", "x")}, want: "a/ opaque\na/b=x"},
		"file, then whiteout":   {layer: []tar.Header{file("a", "x"), file(".wh.a", "")}, want: "a=x"},
		"twice":                 {layer: []tar.Header{file("a", "x"), file("a", "y")}, want: "a=y"},
		"folder becomes file":   {layer: []tar.Header{folder("a"), file("a/b", "x"), file("a", "y")}, want: "a=y"},
		"file becomes folder":   {layer: []tar.Header{file("a", "x"), folder("a"), file("a/b", "y")}, want: "a/\na/b=y"},
		"link becomes folder": {
			layer: []tar.Header{folder("c"), symlink("a", "c"), file("a/x", "1"), folder("a"), file("a/y", "2")}, want: "a/\na/y=2\nc/\nc/x=1",
		},
		"a missing folder": {layer: []tar.Header{file("a/b", "x")}, want: "a/\na/b=x", dependent: true},
		"through a link":   {layer: []tar.Header{folder("u"), symlink("a", "/u"), file("a/b", "x")}, want: "a -> /u\nu/\nu/b=x"},
		"link up and down": {layer: []tar.Header{folder("u"), folder("v"), symlink("v/a", "../../../u"), file("v/a/b", "x")}, want: "u/\nu/b=x\nv/\nv/a -> ../../../u"},
		"a link of a layer below": {
			below: []tar.Header{folder("usr"), symlink("lib", "usr/lib"), {Name: "usr/lib/", Typeflag: tar.TypeDir, Mode: 0o711}},
			layer: []tar.Header{file("lib/so", "x")}, want: "usr/\nusr/lib/\nusr/lib/so=x", dependent: true,
		},
		"a file of a layer below": {
			below: []tar.Header{folder("bin"), {Name: "bin/sh", Mode: 0o4755, Uname: "sh"}}, layer: []tar.Header{hardlink("sh", "bin/sh")},
			want: "bin/\nbin/sh=sh\nsh=sh", dependent: true,
		},
		"absolute names":  {layer: []tar.Header{file("/etc/x", "1")}, want: "etc/\netc/x=1", dependent: true},
		"devices":         {layer: []tar.Header{{Name: "null", Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 3}, {Name: "sda", Typeflag: tar.TypeBlock, Devmajor: 8}, {Name: "w", Typeflag: tar.TypeChar}}, want: ""},
		"odd characters":  {layer: []tar.Header{file("a\n\x1b[31mb", "x"), file("ü", "y"), file("\xff", "z")}, want: "a\n\x1b[31mb=x\nü=y\n\xff=z"},
		"nothing":         {want: ""},
		"global headers":  {layer: []tar.Header{{Typeflag: tar.TypeXGlobalHeader, PAXRecords: map[string]string{"comment": "x"}}}, want: ""},
		"link to a link":  {layer: []tar.Header{symlink("a", "/etc/shadow"), hardlink("b", "a")}, want: "a -> /etc/shadow\nb -> /etc/shadow"},
		"a broken link":   {layer: []tar.Header{symlink("a", "b/c"), file("a/d", "x")}, want: "a -> b/c\nb/\nb/c/\nb/c/d=x", dependent: true},
		"names with dots": {layer: []tar.Header{file("a/../b", "x"), file("./././c", "y")}, want: "b=x\nc=y"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			var parents []string
			if c.below != nil {
				if _, err := unpackTo(t, dir+"/below", tarOf(t, c.below...)); err != nil {
					t.Fatal(err)
				}
				parents = []string{dir + "/below"}
			}
			out, err := unpackTo(t, dir+"/layer", tarOf(t, c.layer...), parents...)
			if err != nil {
				t.Fatal(err)
			}
			if got := tree(t, dir+"/layer"); got != c.want {
				t.Errorf("got\n%s\nwant\n%s", got, c.want)
			}
			if out.Dependent != c.dependent {
				t.Errorf("dependent: %v, want %v", out.Dependent, c.dependent)
			}
		})
	}
}

// TestUnpackAttributes: owners, modes with set-user-ID, times, and those extended attributes that an image may have.
func TestUnpackAttributes(t *testing.T) {
	needRoot(t)
	dir := t.TempDir() + "/layer"
	when := time.Unix(1_600_000_000, 0)
	capabilities := "\x01\x00\x00\x02\x00\x04\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"
	data := tarOf(t,
		tar.Header{Name: "d/", Typeflag: tar.TypeDir, Mode: 0o1777, Uid: 7, Gid: 8, ModTime: when},
		tar.Header{Name: "d/su", Mode: 0o4755, Uid: 0, Gid: 5, ModTime: when, Uname: "x"},
		tar.Header{Name: "d/ping", Mode: 0o755, ModTime: when, Uname: "y", Format: tar.FormatPAX, PAXRecords: map[string]string{
			"SCHILY.xattr.security.capability": capabilities, "SCHILY.xattr.trusted.overlay.redirect": "/etc", "SCHILY.xattr.trusted.overlay.opaque": "y",
			"SCHILY.xattr.user.note": "n", "SCHILY.xattr.user.overlay.opaque": "y", "SCHILY.xattr.security.selinux": "z",
		}},
		tar.Header{Name: "old", Mode: 0o600, ModTime: time.Unix(-5, 0), Uname: "z"},
	)
	if _, err := unpackTo(t, dir, data); err != nil {
		t.Fatal(err)
	}
	check := func(name string, mode uint32, uid, gid uint32) {
		t.Helper()
		var st unix.Stat_t
		if err := unix.Lstat(filepath.Join(dir, name), &st); err != nil {
			t.Fatal(err)
		}
		if st.Mode&0o7777 != mode || st.Uid != uid || st.Gid != gid || name != "old" && st.Mtim.Sec != when.Unix() {
			t.Errorf("%s: mode %o, owner %d:%d, time %d", name, st.Mode, st.Uid, st.Gid, st.Mtim.Sec)
		}
	}
	check("d", 0o1777, 7, 8)
	check("d/su", 0o4755, 0, 5)
	check("d/ping", 0o755, 0, 0)
	check("old", 0o600, 0, 0)
	buf := make([]byte, 256)
	if n, err := unix.Lgetxattr(dir+"/d/ping", capability, buf); err != nil || string(buf[:n]) != capabilities {
		t.Errorf("capabilities: %q, %v", buf[:max(n, 0)], err)
	}
	n, err := unix.Llistxattr(dir+"/d/ping", buf)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range strings.Split(strings.TrimSuffix(string(buf[:n]), "\x00"), "\x00") {
		if strings.Contains(name, "overlay") {
			t.Errorf("the layer set %s", name)
		}
	}
}

// TestHostileLayers: nothing leads out of the folder, nothing is larger than allowed, and what is wrong is said.
func TestHostileLayers(t *testing.T) {
	needRoot(t)
	for name, c := range map[string]struct {
		data []byte
		want string
	}{
		"up":                     {tarOf(t, file("../evil", "x")), "leads out"},
		"up later":               {tarOf(t, file("a/../../evil", "x")), "leads out"},
		"up and back":            {tarOf(t, file("../layer/evil", "x")), "leads out"},
		"only up":                {tarOf(t, folder("..")), "leads out"},
		"hard link up":           {tarOf(t, hardlink("a", "../outside")), "leads out"},
		"hard link absolute":     {tarOf(t, hardlink("a", "/etc/shadow")), "no such file"},
		"hard link to a link":    {tarOf(t, symlink("l", "../.."), hardlink("a", "l/outside")), "no such file"},
		"hard link to itself":    {tarOf(t, hardlink("a", "a")), "itself"},
		"hard link to a folder":  {tarOf(t, folder("d"), hardlink("a", "d")), "no file"},
		"hard link to nothing":   {tarOf(t, file(".wh.d", ""), hardlink("a", "d")), "no file"},
		"link out, then through": {tarOf(t, symlink("a", "../.."), file("a/evil", "x")), ""},
		"absolute link, through": {tarOf(t, symlink("a", "/"), file("a/evil", "x")), ""},
		"links in a circle":      {tarOf(t, symlink("a", "b"), symlink("b", "a"), file("a/x", "x")), "too many symbolic links"},
		"file as folder":         {tarOf(t, file("a", "x"), file("a/b", "y")), "no folder"},
		"root as file":           {tarOf(t, file(".", "x")), "must be a folder"},
		"whiteout of nothing":    {tarOf(t, file(".wh.", "")), "hides nothing"},
		"whiteout of up":         {tarOf(t, file("a/.wh...", "")), "hides nothing"},
		"whiteout of here":       {tarOf(t, file(".wh..", "")), "hides nothing"},
		"too large":              {tarOf(t, file("a", strings.Repeat("x", 2<<20))), "--image-max-size"},
		"too large together":     {tarOf(t, file("a", strings.Repeat("x", 700_000)), file("b", strings.Repeat("x", 700_000))), "--image-max-size"},
		"says it is enormous":    {enormous(t), "--image-max-size"},
		"too many":               {tarOf(t, many(10_001)...), "files"},
		"a negative owner":       {tarOf(t, tar.Header{Name: "a", Uid: -1, Format: tar.FormatGNU}), "can't be"},
		"an unknown kind":        {tarOf(t, tar.Header{Name: "a", Typeflag: tar.TypeCont}), "kind"},
		"cut off":                {tarOf(t, file("a", strings.Repeat("x", 5000)))[:2048], "unexpected EOF"},
		"no archive":             {bytes.Repeat([]byte("portal"), 500), "read the layer"},
		"a long name":            {tarOf(t, file(strings.Repeat("n", 300), "x")), "name too long"},
		"deep":                   {tarOf(t, file(strings.Repeat("d/", 3000)+"x", "x")), "too long"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if err := os.WriteFile(dir+"/outside", []byte("secret"), 0o600); err != nil {
				t.Fatal(err)
			}
			_, err := unpackTo(t, dir+"/layer", c.data)
			switch {
			case c.want == "" && err != nil:
				t.Error(err)
			case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)):
				t.Errorf("%v, want %q", err, c.want)
			}
			untouched(t, dir)
		})
	}
}

// untouched checks that there is nothing beside the layer but what was there.
func untouched(t testing.TB, dir string) {
	t.Helper()
	list, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range list {
		if e.Name() != "layer" && e.Name() != "outside" && e.Name() != "below" {
			t.Errorf("%s was written outside of the layer", e.Name())
		}
	}
	var st unix.Stat_t
	if err := unix.Stat(dir+"/outside", &st); err == nil && (st.Nlink != 1 || st.Size != 6) {
		t.Errorf("the file outside was changed: %+v", st)
	}
}

func many(n int) (out []tar.Header) {
	for i := range n {
		out = append(out, file(fmt.Sprint(i), ""))
	}
	return out
}

// enormous has a header of a file of an exabyte, and none of it.
func enormous(t testing.TB) []byte {
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	if err := w.WriteHeader(&tar.Header{Name: "a", Typeflag: tar.TypeReg, Mode: 0o644, Size: 1 << 60, Format: tar.FormatGNU}); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func TestBounded(t *testing.T) {
	for _, n := range []int64{99, 100, 101} {
		_, err := io.Copy(io.Discard, &bounded{strings.NewReader(strings.Repeat("x", int(n))), 100})
		var large *TooLargeError
		if errors.As(err, &large) != (n > 100) {
			t.Errorf("%d of 100: %v", n, err)
		}
	}
}

// FuzzUnpack: whatever a stranger's layer has, nothing is written outside of its folder.
func FuzzUnpack(f *testing.F) {
	needRoot(f)
	for _, entries := range [][]tar.Header{
		{folder("a"), file("a/b", "x"), symlink("c", "a"), file("c/d", "y"), hardlink("e", "a/b"), file("a/.wh..wh..opq", ""), file(".wh.c", "")},
		{symlink("a", "../.."), file("a/evil", "x")},
		{file("../evil", "x"), hardlink("a", "../outside")},
	} {
		f.Add(tarOf(f, entries...))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		dir := t.TempDir()
		if err := os.WriteFile(dir+"/outside", []byte("secret"), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := unpackTo(t, dir+"/below", tarOf(t, folder("usr"), symlink("lib", "usr"), file("usr/x", "1"), symlink("up", "../.."))); err != nil {
			t.Fatal(err)
		}
		_, _ = unpackTo(t, dir+"/layer", data, dir+"/below")
		untouched(t, dir)
		if got := tree(t, dir+"/below"); got != "lib -> usr\nup -> ../..\nusr/\nusr/x=1" {
			t.Errorf("the layer below was changed:\n%s", got)
		}
	})
}

// atEnd calls back when all has been read.
type atEnd struct {
	io.Reader
	end func()
}

func (a *atEnd) Read(p []byte) (int, error) {
	n, err := a.Reader.Read(p)
	if errors.Is(err, io.EOF) && a.end != nil {
		a.end()
		a.end = nil
	}
	return n, err
}

// TestMemoryOfUnpacking: what is kept of a layer does not grow with its folders, which are all made, also those that take the place of files
// and the other way round.
func TestMemoryOfUnpacking(t *testing.T) {
	needRoot(t)
	long := strings.TrimSuffix(strings.Repeat(strings.Repeat("d", 200)+"/", 18), "/")
	const folders = 20_000
	r, w := io.Pipe()
	go func() {
		out := tar.NewWriter(w)
		write := func(h tar.Header) {
			h.Mode, h.ModTime = 0o755, time.Unix(1_000_000_000, 0)
			_ = out.WriteHeader(&h)
		}
		for i := range folders {
			write(tar.Header{Name: fmt.Sprintf("%s/%d", long, i), Typeflag: tar.TypeDir})
		}
		for i := range 1000 {
			write(tar.Header{Name: fmt.Sprintf("%s/%d", long, i), Typeflag: tar.TypeReg})
		}
		_ = out.Close()
		_ = w.Close()
	}()
	memory := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := memory()
	var after uint64
	dir := t.TempDir()
	if _, err := Unpack(t.Context(), &atEnd{r, func() { after = memory() }}, dir, nil, &Budget{Size: 1 << 20, Entries: 1 << 20}); err != nil {
		t.Fatal(err)
	}
	if grown := int64(after) - int64(before); grown > maxTimes+(8<<20) {
		t.Errorf("%d MiB are kept of %d folders", grown>>20, folders)
	}
	entries, err := os.ReadDir(filepath.Join(dir, long))
	if err != nil || len(entries) != folders {
		t.Errorf("%d folders and files are there, %v", len(entries), err)
	}
	if st, err := os.Lstat(filepath.Join(dir, long, "7")); err != nil || !st.Mode().IsRegular() {
		t.Errorf("a file in the place of a folder: %v, %v", st, err)
	}
	if st, err := os.Lstat(filepath.Join(dir, long, "1700")); err != nil || !st.ModTime().Equal(time.Unix(1_000_000_000, 0)) {
		t.Errorf("the time of a folder: %v, %v", st, err)
	}
}
