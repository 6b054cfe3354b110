package disk

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	resourcehelper "k8s.io/component-helpers/resource"
)

// PodUsage is what one Pod takes.
type PodUsage struct {
	// Volumes are its emptyDirs on the disk.
	Volumes map[string]int64
	// Containers are their writable layers and logs.
	Containers map[string]int64
	Inodes     int64
	// TooDeep says that not all could be measured.
	TooDeep bool
}

// Total is all of it.
func (u PodUsage) Total() (sum int64) {
	for _, n := range u.Volumes {
		sum += n
	}
	for _, n := range u.Containers {
		sum += n
	}
	return sum
}

// Limited says whether a Pod has a limit that has to be measured.
func Limited(pod *corev1.Pod) bool {
	for _, v := range pod.Spec.Volumes {
		if onDisk(&v) && v.EmptyDir.SizeLimit != nil && v.EmptyDir.SizeLimit.Value() > 0 {
			return true
		}
	}
	return slices.ContainsFunc(slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers), func(c corev1.Container) bool {
		_, ok := c.Resources.Limits[corev1.ResourceEphemeralStorage]
		return ok
	})
}

func onDisk(v *corev1.Volume) bool {
	return v.EmptyDir != nil && v.EmptyDir.Medium != corev1.StorageMediumMemory
}

// OverLimit says which of its limits a Pod exceeds, if any: of a volume, of the Pod, of a container.
func OverLimit(pod *corev1.Pod, u PodUsage) (string, bool) {
	if u.TooDeep && Limited(pod) {
		return "its folders are nested too deeply to measure what they take, which its limits ask for", true
	}
	for _, v := range pod.Spec.Volumes {
		if !onDisk(&v) || v.EmptyDir.SizeLimit == nil || v.EmptyDir.SizeLimit.Value() <= 0 {
			continue
		}
		if used := u.Volumes[v.Name]; used > v.EmptyDir.SizeLimit.Value() {
			return fmt.Sprintf("emptyDir volume %q takes %s, more than its sizeLimit %s", v.Name, size(used), v.EmptyDir.SizeLimit), true
		}
	}
	limits := resourcehelper.PodLimits(pod, resourcehelper.PodResourcesOptions{})
	if most, ok := limits[corev1.ResourceEphemeralStorage]; ok && u.Total() > most.Value() {
		return fmt.Sprintf("the Pod's containers, logs and emptyDir volumes take %s of the disk, more than the limit of ephemeral-storage %s", size(u.Total()), &most), true
	}
	for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		if most, ok := c.Resources.Limits[corev1.ResourceEphemeralStorage]; ok && u.Containers[c.Name] > most.Value() {
			return fmt.Sprintf("container %s takes %s of the disk with what it wrote and logged, more than its limit of ephemeral-storage %s", c.Name, size(u.Containers[c.Name]), &most), true
		}
	}
	return "", false
}

func size(n int64) string { return resource.NewQuantity(n, resource.BinarySI).String() }

// Free is what a disk has left.
type Free struct {
	Bytes, Capacity        int64
	Inodes, InodesCapacity int64
}

// Amount is a number, or a part of the whole.
type Amount struct {
	Number  int64
	Percent float64 // if it is not 0
}

func (a Amount) of(whole int64) int64 {
	if a.Percent > 0 {
		return int64(float64(whole) * a.Percent / 100)
	}
	return a.Number
}

// Thresholds say from when on a disk counts as full.
type Thresholds struct{ Bytes, Inodes Amount }

// ParseThresholds reads what kubelets know as --eviction-hard, as far as it is about the disk.
func ParseThresholds(text string) (out Thresholds, err error) {
	if strings.TrimSpace(text) == "" {
		return out, nil
	}
	for _, part := range strings.Split(text, ",") {
		signal, value, ok := strings.Cut(strings.TrimSpace(part), "<")
		if !ok {
			return out, fmt.Errorf("%q must be of the form nodefs.available<5%%", part)
		}
		var a Amount
		if number, percent := strings.CutSuffix(value, "%"); percent {
			if a.Percent, err = strconv.ParseFloat(number, 64); err != nil || a.Percent < 0 || a.Percent > 100 {
				return out, fmt.Errorf("%q: %s is no percentage", part, value)
			}
		} else {
			q, err := resource.ParseQuantity(value)
			if err != nil || q.Value() < 0 {
				return out, fmt.Errorf("%q: %s is neither an amount nor a percentage", part, value)
			}
			a.Number = q.Value()
		}
		switch signal {
		case "nodefs.available":
			out.Bytes = a
		case "nodefs.inodesFree":
			out.Inodes = a
		default:
			return out, fmt.Errorf("%q: %s is none of nodefs.available and nodefs.inodesFree", part, signal)
		}
	}
	return out, nil
}

// Full says whether a disk has less left than it should, and of what.
func Full(f Free, t Thresholds) (string, bool) {
	if least := t.Bytes.of(f.Capacity); f.Bytes < least {
		return fmt.Sprintf("the disk has %s left, less than %s", size(f.Bytes), size(least)), true
	}
	// Some file systems count no inodes.
	if least := t.Inodes.of(f.InodesCapacity); f.InodesCapacity > 0 && f.Inodes < least {
		return fmt.Sprintf("the disk has %d inodes left, less than %d", f.Inodes, least), true
	}
	return "", false
}

// Pressure is whether a node's disk counts as full: from the moment that it is, and for a while after it was last.
type Pressure struct {
	On       bool
	Message  string
	lastFull time.Time
}

// Update notes what is observed now.
func (p *Pressure) Update(message string, full bool, now time.Time, transition time.Duration) {
	if full {
		p.On, p.Message, p.lastFull = true, message, now
		return
	}
	if p.On && now.Sub(p.lastFull) >= transition {
		p.On, p.Message = false, ""
	}
}

// Candidate is a Pod that could be evicted.
type Candidate struct {
	Pod   *corev1.Pod
	Usage PodUsage
}

// critical is the least priority of Pods that a node never evicts.
const critical = 2_000_000_000

// Victim is the Pod to evict from a full disk: of those that take more than they asked for the least important, and of these the one
// that exceeds it most. Critical Pods stay.
func Victim(list []Candidate) (Candidate, bool) {
	over := func(c Candidate) int64 {
		requests := resourcehelper.PodRequests(c.Pod, resourcehelper.PodResourcesOptions{})
		return c.Usage.Total() - requests.StorageEphemeral().Value()
	}
	list = slices.DeleteFunc(slices.Clone(list), func(c Candidate) bool { return Critical(c.Pod) || c.Usage.Total() == 0 && c.Usage.Inodes == 0 })
	if len(list) == 0 {
		return Candidate{}, false
	}
	slices.SortStableFunc(list, func(a, b Candidate) int {
		if x, y := over(a) > 0, over(b) > 0; x != y {
			if x {
				return -1
			}
			return 1
		}
		if c := cmp.Compare(priority(a.Pod), priority(b.Pod)); c != 0 {
			return c
		}
		return cmp.Compare(over(b), over(a))
	})
	return list[0], true
}

func priority(pod *corev1.Pod) int32 {
	if pod.Spec.Priority == nil {
		return 0
	}
	return *pod.Spec.Priority
}

// Critical says whether a node has to keep a Pod.
func Critical(pod *corev1.Pod) bool { return priority(pod) >= critical }

// Describe says what a Pod takes, the largest first.
func (u PodUsage) Describe() string {
	type part struct {
		name string
		n    int64
	}
	var parts []part
	for _, name := range slices.Sorted(maps.Keys(u.Containers)) {
		parts = append(parts, part{"container " + name, u.Containers[name]})
	}
	for _, name := range slices.Sorted(maps.Keys(u.Volumes)) {
		parts = append(parts, part{"volume " + name, u.Volumes[name]})
	}
	slices.SortStableFunc(parts, func(a, b part) int { return cmp.Compare(b.n, a.n) })
	var out []string
	for _, p := range parts[:min(len(parts), 3)] {
		out = append(out, p.name+" "+size(p.n))
	}
	return strings.Join(out, ", ")
}
