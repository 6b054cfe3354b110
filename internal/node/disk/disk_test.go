package disk

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

func TestMeasure(t *testing.T) {
	dir := t.TempDir()
	write := func(name string, n int) {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, make([]byte, n), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("in/a", 1<<20)
	write("in/b/c", 1<<20)
	write("out", 8<<20)
	if err := os.Link(dir+"/in/a", dir+"/in/again"); err != nil {
		t.Fatal(err)
	}
	for name, to := range map[string]string{"in/link": dir + "/out", "in/up": dir} {
		if err := os.Symlink(to, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	f, err := os.Create(dir + "/in/sparse")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(1 << 40); err != nil {
		t.Fatal(err)
	}
	u, err := Measure(t.Context(), dir+"/in", dir+"/none")
	if err != nil || u.Bytes < 2<<20 || u.Bytes > 2<<20+100<<10 || u.Inodes != 7 || u.TooDeep {
		t.Errorf("%+v, %v", u, err)
	}
	deep := dir + "/deep"
	if err := os.MkdirAll(deep+strings.Repeat("/d", maxDepth+10), 0o755); err != nil {
		t.Fatal(err)
	}
	if u, err := Measure(t.Context(), deep); err != nil || !u.TooDeep {
		t.Errorf("%+v, %v", u, err)
	}
}

func limited(name, limit string, container string) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}}
	v := corev1.Volume{Name: "v", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}
	if limit != "" {
		v.EmptyDir.SizeLimit = ptr.To(resource.MustParse(limit))
	}
	c := corev1.Container{Name: "c"}
	if container != "" {
		c.Resources.Limits = corev1.ResourceList{corev1.ResourceEphemeralStorage: resource.MustParse(container)}
	}
	p.Spec.Volumes, p.Spec.Containers = []corev1.Volume{v}, []corev1.Container{c}
	return p
}

func TestOverLimit(t *testing.T) {
	use := func(volume, container int64) PodUsage {
		return PodUsage{Volumes: map[string]int64{"v": volume}, Containers: map[string]int64{"c": container}}
	}
	memory := limited("memory", "1Ki", "")
	memory.Spec.Volumes[0].EmptyDir.Medium = corev1.StorageMediumMemory
	for name, c := range map[string]struct {
		pod  *corev1.Pod
		use  PodUsage
		want string
	}{
		"no limit":      {limited("", "", ""), use(1<<40, 1<<40), ""},
		"below":         {limited("", "1Ki", "2Ki"), use(1024, 1024), ""},
		"volume":        {limited("", "1Ki", ""), use(1025, 0), `"v"`},
		"Pod":           {limited("", "", "1Ki"), use(1000, 100), "the Pod's containers"},
		"too deep":      {limited("", "1Ki", ""), PodUsage{TooDeep: true}, "nested"},
		"deep, no care": {limited("", "", ""), PodUsage{TooDeep: true}, ""},
		"in memory":     {memory, use(1<<40, 0), ""},
	} {
		got, over := OverLimit(c.pod, c.use)
		if over != (c.want != "") || !strings.Contains(got, c.want) {
			t.Errorf("%s: %q, %v", name, got, over)
		}
	}
	// Two containers: each has its own limit, and the Pod has their sum.
	two := limited("", "", "1Ki")
	two.Spec.Containers = append(two.Spec.Containers, corev1.Container{Name: "d", Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{corev1.ResourceEphemeralStorage: resource.MustParse("4Ki")}}})
	if got, over := OverLimit(two, use(0, 2048)); !over || !strings.Contains(got, "container c") {
		t.Errorf("%q", got)
	}
	if !Limited(two) || Limited(limited("", "", "")) || Limited(memory) {
		t.Error("who is measured is wrong")
	}
}

func TestThresholds(t *testing.T) {
	th, err := ParseThresholds("nodefs.available<10%, nodefs.inodesFree<100")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		free Free
		full bool
	}{
		{Free{100, 1000, 100, 1000}, false}, {Free{99, 1000, 100, 1000}, true}, {Free{500, 1000, 99, 1000}, true}, {Free{500, 1000, 0, 0}, false},
	} {
		if _, full := Full(c.free, th); full != c.full {
			t.Errorf("%+v: %v", c.free, full)
		}
	}
	if th, err := ParseThresholds("nodefs.available<1Gi"); err != nil || th.Bytes.of(1<<50) != 1<<30 {
		t.Errorf("%+v, %v", th, err)
	}
	if th, err := ParseThresholds(""); err != nil {
		t.Error(err)
	} else if _, full := Full(Free{0, 1000, 0, 1000}, th); full {
		t.Error("without a threshold nothing is full")
	}
	for _, text := range []string{"nodefs.available", "memory.available<1Gi", "nodefs.available<x", "nodefs.available<101%", "nodefs.available<-1"} {
		if _, err := ParseThresholds(text); err == nil {
			t.Errorf("%q is accepted", text)
		}
	}
	var p Pressure
	now := time.Unix(1000, 0)
	for i, c := range []struct {
		after time.Duration
		full  bool
		want  bool
	}{{0, false, false}, {1, true, true}, {2, false, true}, {100, true, true}, {101, false, true}, {399, false, true}, {400, false, false}} {
		p.Update("why", c.full, now.Add(c.after*time.Second), 300*time.Second)
		if p.On != c.want || p.On != (p.Message != "") {
			t.Errorf("step %d: %+v", i, p)
		}
	}
}

func TestVictim(t *testing.T) {
	make := func(name string, use int64, request string, priority int32) Candidate {
		p := limited(name, "", "")
		p.Spec.Priority = &priority
		if request != "" {
			p.Spec.Containers[0].Resources.Requests = corev1.ResourceList{corev1.ResourceEphemeralStorage: resource.MustParse(request)}
		}
		return Candidate{Pod: p, Usage: PodUsage{Volumes: map[string]int64{"v": use}}}
	}
	for name, c := range map[string]struct {
		list []Candidate
		want string
	}{
		"nobody":        {nil, ""},
		"idle":          {[]Candidate{make("a", 0, "", 0)}, ""},
		"the largest":   {[]Candidate{make("a", 10, "", 0), make("b", 30, "", 0), make("c", 20, "", 0)}, "b"},
		"asked for it":  {[]Candidate{make("a", 10, "", 0), make("b", 1000, "1Ki", 0)}, "a"},
		"over it":       {[]Candidate{make("a", 10, "", 0), make("b", 2000, "1Ki", 0)}, "b"},
		"less priority": {[]Candidate{make("a", 10, "", 0), make("b", 30, "", 5)}, "a"},
		"critical":      {[]Candidate{make("a", 10, "", 0), make("b", 30, "", 2_000_000_000)}, "a"},
		"only critical": {[]Candidate{make("b", 30, "", 2_000_001_000)}, ""},
	} {
		got, ok := Victim(c.list)
		if ok != (c.want != "") || ok && got.Pod.Name != c.want {
			t.Errorf("%s: %+v", name, got)
		}
	}
	if got := (PodUsage{Volumes: map[string]int64{"v": 1 << 20}, Containers: map[string]int64{"c": 2 << 20}}).Describe(); got != "container c 2Mi, volume v 1Mi" {
		t.Error(got)
	}
}
