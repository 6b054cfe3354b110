package node

import (
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	ktesting "k8s.io/client-go/testing"
	"k8s.io/utils/ptr"
)

// TestWriteFiles: files appear together, change together, and what an interrupted attempt left is cleared.
func TestWriteFiles(t *testing.T) {
	dir, pod := t.TempDir(), &corev1.Pod{}
	put := func(files map[string]file) {
		t.Helper()
		if err := writeFiles(dir, files, pod); err != nil {
			t.Fatal(err)
		}
		if !upToDate(dir, files, pod) {
			t.Error("what was just written is not up to date")
		}
	}
	read := func(name string) string {
		data, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			return "-"
		}
		return string(data)
	}
	first := map[string]file{"a": {[]byte("1"), 0o644}, "d/b": {[]byte("2"), 0o600}}
	if upToDate(dir, first, pod) {
		t.Error("an empty volume is up to date")
	}
	put(first)
	shown, _ := os.Readlink(filepath.Join(dir, dataLink))
	// An attempt that was interrupted.
	if err := os.Symlink("x", filepath.Join(dir, dataNext)); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(dir, "..123"), 0o755); err != nil {
		t.Fatal(err)
	}
	second := map[string]file{"a": {[]byte("3"), 0o644}, "c": {[]byte("4"), 0o644}}
	if upToDate(dir, second, pod) {
		t.Error("other files are up to date")
	}
	put(second)
	if read("a") != "3" || read("c") != "4" || read("d/b") != "-" {
		t.Errorf("%s %s %s", read("a"), read("c"), read("d/b"))
	}
	if next, _ := os.Readlink(filepath.Join(dir, dataLink)); next == shown {
		t.Error("the folder was not replaced as a whole")
	}
	list, _ := os.ReadDir(dir)
	if len(list) != 4 { // ..data, its folder, a, c
		t.Errorf("%v", list)
	}
	for _, changed := range []map[string]file{{"a": second["a"]}, {"a": {[]byte("3"), 0o600}, "c": second["c"]}, {"a": {[]byte("5"), 0o644}, "c": second["c"]}} {
		if upToDate(dir, changed, pod) {
			t.Errorf("%v is up to date", changed)
		}
	}
	for _, bad := range []string{"../x", "/x", "..data", ""} {
		if err := writeFiles(dir, map[string]file{bad: {}}, pod); err == nil {
			t.Errorf("%q is accepted", bad)
		}
	}
	if read("a") != "3" {
		t.Error("a failed attempt changed the volume")
	}
}

// TestTokens: a token is renewed after four fifths of its life or a day, and used to its end if it can't be.
func TestTokens(t *testing.T) {
	now := time.Unix(1_700_000_000, 0)
	client := fake.NewClientset()
	asked, fail := 0, false
	client.PrependReactor("create", "serviceaccounts", func(a ktesting.Action) (bool, runtime.Object, error) {
		if fail {
			return true, nil, errors.New("the server is away")
		}
		asked++
		r := a.(ktesting.CreateAction).GetObject().(*authenticationv1.TokenRequest).DeepCopy()
		r.Status.Token = fmt.Sprint("token-", asked)
		r.Status.ExpirationTimestamp = metav1.NewTime(now.Add(time.Duration(*r.Spec.ExpirationSeconds) * time.Second))
		return true, r, nil
	})
	p := newPodTokens(client)
	p.now = func() time.Time { return now }
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: "ns"}, Spec: corev1.PodSpec{ServiceAccountName: "a"}}
	hour := &corev1.ServiceAccountTokenProjection{Path: "token", ExpirationSeconds: ptr.To[int64](3600)}
	get := func(want string) {
		t.Helper()
		if got, err := p.get(t.Context(), pod, hour); err != nil || got != want {
			t.Errorf("%q, %v, want %q", got, err, want)
		}
	}
	begin := now
	get("token-1")
	now = begin.Add(47 * time.Minute)
	get("token-1")
	if due := p.due(); due.Before(begin.Add(47*time.Minute)) || due.After(begin.Add(48*time.Minute)) {
		t.Errorf("due after %s", due.Sub(begin))
	}
	now, fail = begin.Add(49*time.Minute), true
	get("token-1")
	if due := p.due(); !due.Equal(now.Add(renewRetry)) {
		t.Errorf("tried again after %s", due.Sub(now))
	}
	now = begin.Add(61 * time.Minute)
	if _, err := p.get(t.Context(), pod, hour); err == nil {
		t.Error("a token that has expired is used")
	}
	fail = false
	get("token-2")
	if at := renewal(begin, begin.Add(365*24*time.Hour), 0); !at.Equal(begin.Add(24 * time.Hour)) {
		t.Errorf("a token of a year is renewed after %s", at.Sub(begin))
	}
	// What an earlier agent wrote is taken over.
	claims := base64.RawURLEncoding.EncodeToString([]byte(fmt.Sprintf(`{"iat":%d,"exp":%d}`, now.Unix(), now.Unix()+3600)))
	other := newPodTokens(client)
	other.now = p.now
	if err := other.adopt(hour, "x."+claims+".y"); err != nil {
		t.Fatal(err)
	}
	if got, err := other.get(t.Context(), pod, hour); err != nil || got != "x."+claims+".y" {
		t.Errorf("%q, %v", got, err)
	}
	for claims, want := range map[string]time.Duration{
		`{"iat":%d,"exp":%d}`: 480 * time.Second, // one of 600 s
		`{"iat":%d,"exp":99999999999,"kubernetes.io":{"warnafter":%d}}`: 480 * time.Second,
	} {
		p := newPodTokens(client)
		if err := p.adopt(hour, "x."+base64.RawURLEncoding.EncodeToString(fmt.Appendf(nil, claims, begin.Unix(), begin.Unix()+600))+".y"); err != nil {
			t.Fatal(err)
		}
		if due := p.due().Sub(begin.Truncate(time.Second)); due > want || due < want-renewJitter {
			t.Errorf("%s is renewed after %s, want %s", claims, due, want)
		}
	}
	for _, bad := range []string{"", "opaque", "a.b.c", "a." + base64.RawURLEncoding.EncodeToString([]byte("{}")) + ".c"} {
		if other.adopt(hour, bad) == nil {
			t.Errorf("%q is taken over", bad)
		}
	}
}

func TestMemoryBound(t *testing.T) {
	pod := func(limits ...string) *corev1.Pod {
		p := &corev1.Pod{}
		for _, l := range limits {
			c := corev1.Container{}
			if l != "" {
				c.Resources.Limits = corev1.ResourceList{corev1.ResourceMemory: resource.MustParse(l)}
			}
			p.Spec.Containers = append(p.Spec.Containers, c)
		}
		return p
	}
	const node = 1 << 30
	for name, c := range map[string]struct {
		pod   *corev1.Pod
		limit string
		want  int64
	}{
		"nothing":        {pod(""), "", node},
		"the Pod's":      {pod("1Mi", "2Mi"), "", 3 << 20},
		"one without":    {pod("1Mi", ""), "", node},
		"its own":        {pod("1Mi"), "4Ki", 4 << 10},
		"the smaller":    {pod("1Mi"), "4Mi", 1 << 20},
		"more than node": {pod("4Gi"), "", node},
	} {
		v := &corev1.EmptyDirVolumeSource{}
		if c.limit != "" {
			v.SizeLimit = ptr.To(resource.MustParse(c.limit))
		}
		if got := memoryBound(c.pod, v, node); got != c.want {
			t.Errorf("%s: %d, want %d", name, got, c.want)
		}
	}
}

func TestSignalNamed(t *testing.T) {
	for text, want := range map[string]syscall.Signal{
		"": syscall.SIGTERM, "SIGQUIT": syscall.SIGQUIT, "quit": syscall.SIGQUIT, "9": syscall.SIGKILL, "SIGRTMIN+3": 37, "SIGRTMAX-1": 63, "SIGRTMIN": 34,
		"nonsense": syscall.SIGTERM, "99": syscall.SIGTERM, "-1": syscall.SIGTERM, "SIGRTMIN+99": syscall.SIGTERM,
	} {
		if got := signalNamed(text); got != want {
			t.Errorf("%q: %d, want %d", text, got, want)
		}
	}
}

// TestHostPath: a path without a type is not checked, and is made if there is nothing; with one, it is what the type says.
func TestHostPath(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		path string
		kind *corev1.HostPathType
		want string // part of an error
	}{
		{"new/deep", nil, ""}, {"file", nil, ""}, {"new", ptr.To(corev1.HostPathDirectory), ""}, {"other", ptr.To(corev1.HostPathUnset), ""},
		{"none", ptr.To(corev1.HostPathDirectory), "no such file"}, {"file", ptr.To(corev1.HostPathDirectory), "is not a Directory"},
		{"made", ptr.To(corev1.HostPathDirectoryOrCreate), ""}, {"made-file", ptr.To(corev1.HostPathFileOrCreate), ""}, {"made", ptr.To(corev1.HostPathFileOrCreate), "is not a FileOrCreate"},
	} {
		path := filepath.Join(dir, c.path)
		err := hostPath(&corev1.HostPathVolumeSource{Path: path, Type: c.kind})
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.path, err, c.want)
		}
		if _, statErr := os.Stat(path); err == nil && statErr != nil {
			t.Errorf("%s was not made: %v", c.path, statErr)
		}
	}
}

// TestNodeResolver: where the machine's resolver is a stub at loopback, Pods get the servers behind it.
func TestNodeResolver(t *testing.T) {
	const stub, real, other = "nameserver 127.0.0.53\noptions edns0\n", "nameserver 192.0.2.53\nsearch example.org\n", "nameserver 192.0.2.1\n"
	for name, c := range map[string]struct {
		first, second string
		want          []string
	}{
		"a stub": {stub, real, []string{"192.0.2.53"}}, "no stub": {other, real, []string{"192.0.2.1"}}, "a stub alone": {stub, "", []string{"127.0.0.53"}},
		"two stubs": {stub, "nameserver ::1\n", []string{"127.0.0.53"}}, "nothing": {"", real, nil}, "one of two": {stub + other, real, []string{"127.0.0.53", "192.0.2.1"}},
	} {
		dir := t.TempDir()
		paths := []string{filepath.Join(dir, "first"), filepath.Join(dir, "second")}
		for i, text := range []string{c.first, c.second} {
			if err := os.WriteFile(paths[i], []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if got := nodeResolver(paths...); !slices.Equal(got.Servers, c.want) {
			t.Errorf("%s: %v, want %v", name, got.Servers, c.want)
		}
	}
}

// TestTokenClock: a token's life counts by the node's own clock, however much that differs from the server's.
func TestTokenClock(t *testing.T) {
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	for _, ahead := range []time.Duration{-5 * time.Minute, 0, 5 * time.Minute, time.Hour} {
		client := fake.NewClientset()
		client.PrependReactor("create", "serviceaccounts", func(ktesting.Action) (bool, runtime.Object, error) {
			return true, &authenticationv1.TokenRequest{
				Spec:   authenticationv1.TokenRequestSpec{ExpirationSeconds: ptr.To[int64](600)},
				Status: authenticationv1.TokenRequestStatus{Token: "t", ExpirationTimestamp: metav1.NewTime(now.Add(ahead + 10*time.Minute))},
			}, nil
		})
		p := newPodTokens(client)
		p.now = func() time.Time { return now }
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: "ns"}, Spec: corev1.PodSpec{ServiceAccountName: "a"}}
		if _, err := p.get(t.Context(), pod, &corev1.ServiceAccountTokenProjection{Path: "token", ExpirationSeconds: ptr.To[int64](600)}); err != nil {
			t.Fatal(err)
		}
		if due := p.due().Sub(now); due > 8*time.Minute || due < 8*time.Minute-renewJitter {
			t.Errorf("with a server that is %s ahead, the token is renewed after %s", ahead, due)
		}
	}
}
