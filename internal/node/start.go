package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/uuid"

	"portal/internal/node/image"
	"portal/internal/node/life"
	"portal/internal/node/network"
	"portal/internal/node/runtime"
	"portal/internal/node/runtime/shim"
	"portal/internal/node/spec"
	"portal/internal/serviceenv"
)

// Logs are replaced at this size, and this many are kept, as kubelets do.
const (
	logSize  = 10 << 20
	logFiles = 5
)

// createSandbox makes the Pod's namespaces, volumes and network.
func (w *worker) createSandbox(ctx context.Context, pod *corev1.Pod) {
	objects := once(w.agent.objects(ctx, pod.Namespace))
	var sandbox *runtime.Pod
	var addrs []netip.Addr
	err := w.attempt("create the sandbox", func() error {
		err := checkSources(pod, objects)
		if err == nil {
			err = w.agent.bundles.check(ctx, pod)
		}
		if err == nil {
			err = w.certificates.await(ctx, pod)
		}
		if err == nil {
			sandbox, addrs, err = w.agent.sandbox(ctx, pod, w.volumesFrom(objects))
		}
		return err
	})
	w.mu.Lock()
	defer w.mu.Unlock()
	if err != nil {
		if ctx.Err() == nil {
			w.sandboxFailed(ctx, pod, err)
		}
		return
	}
	w.sandbox = sandbox
	w.observed.Sandbox, w.observed.SandboxID, w.observed.SandboxFailure, w.observed.PodIPs = life.SandboxReady, sandbox.Sandbox.ID, nil, addrs
	w.follow(ctx, sandbox)
	w.keepVolumes(ctx, sandbox)
}

func (a *Agent) sandbox(ctx context.Context, pod *corev1.Pod, from func([]netip.Addr) fileSources) (*runtime.Pod, []netip.Addr, error) {
	uid := string(pod.UID)
	config := runtime.SandboxConfig{HostNetwork: pod.Spec.HostNetwork, HostIPC: pod.Spec.HostIPC}
	config.ID = string(uuid.NewUUID())
	config.SharedPID = pod.Spec.ShareProcessNamespace != nil && *pod.Spec.ShareProcessNamespace
	config.Meta, _ = json.Marshal(sandboxMeta{pod.Namespace, pod.Name})
	config.Tmpfs = append(a.tmpfs(pod), shim.Tmpfs{Path: a.shm(pod), Size: 64 << 20, Mode: "1777"})
	if !pod.Spec.HostNetwork {
		var err error
		if config.Hostname, err = spec.KernelHostname(pod, a.ClusterDomain); err != nil {
			return nil, nil, err
		}
		config.Sysctls = network.PodSysctls()
	}
	if s := pod.Spec.SecurityContext; s != nil {
		for _, sysctl := range s.Sysctls {
			name := shim.SysctlName(sysctl.Name)
			if err := shim.CheckSysctl(name, !pod.Spec.HostNetwork, !pod.Spec.HostIPC); err != nil {
				return nil, nil, err
			}
			if config.Sysctls == nil {
				config.Sysctls = map[string]string{}
			}
			config.Sysctls[name] = sysctl.Value
		}
	}
	sandbox, err := a.runtime.Create(ctx, uid, config)
	if err != nil {
		return nil, nil, err
	}
	var addrs []netip.Addr
	if !pod.Spec.HostNetwork {
		addrs, err = a.attach(ctx, pod, sandbox.NetworkNamespace())
	} else {
		addrs = a.NodeIPs
	}
	if err == nil {
		err = a.makeVolumes(ctx, pod, sandbox, from(addrs))
	}
	if err == nil {
		err = sandbox.Finish()
	}
	if err != nil {
		// The next try may be long after, or never come.
		ctx = context.WithoutCancel(ctx)
		return nil, nil, errors.Join(err, a.detach(ctx, uid), sandbox.Stop(ctx))
	}
	return sandbox, addrs, nil
}

// stopSandbox ends what is left of the Pod's processes, and gives its network back.
func (w *worker) stopSandbox(ctx context.Context) {
	w.mu.Lock()
	sandbox := w.sandbox
	if w.stopVolumes != nil {
		w.stopVolumes()
	}
	w.mu.Unlock()
	// Nothing runs there any more; CNI plugins want to see the network namespace.
	err := w.agent.detach(ctx, sandbox.UID)
	if err == nil {
		err = sandbox.Stop(ctx)
	}
	if err == nil {
		err = w.freeDisk(types.UID(sandbox.UID), sandbox)
	}
	if err != nil {
		w.retry(ctx, "the Pod's sandbox could not be stopped", err)
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.observed.Sandbox = life.SandboxStopped
}

// configError is a mistake in the Pod, or something that it refers to and that is missing.
type configError struct{ error }

// startContainer makes a container's next run.
func (w *worker) startContainer(ctx context.Context, pod *corev1.Pod, action life.StartContainer) {
	w.mu.Lock()
	sandbox, addrs := w.sandbox, w.observed.PodIPs
	w.mu.Unlock()
	c := containerOf(&pod.Spec, action.Container)
	err := w.attempt("start container "+action.Container, func() error {
		img, err := w.image(ctx, pod, c)
		if err != nil {
			return err
		}
		config, limits, err := w.agent.containerConfig(ctx, pod, c, img, sandbox, addrs, action)
		if err != nil {
			return err
		}
		return sandbox.Start(ctx, config, limits)
	})
	var failed *runtime.StartError
	began := err == nil || errors.As(err, &failed)
	var list []*shim.Status
	if began {
		list, _ = sandbox.Statuses() // so that nobody starts it a second time
	}
	var old []string
	w.locked(func() {
		switch {
		case ctx.Err() != nil, errors.Is(err, context.Canceled): // the agent or the Pod ends
		case err == nil:
			w.event(false, "Started", "Started container "+c.Name)
		case failed != nil:
			// It is recorded as a run that ended at once, and its restart policy says what follows.
			w.event(true, "Failed", fmt.Sprintf("Container %s could not be started: %s", c.Name, failed.Message))
		default:
			w.fail(c.Name, err)
		}
		if began {
			delete(w.observed.Failures, c.Name)
			for _, s := range list {
				w.note(s)
			}
			old = w.outdated(c.Name)
		}
	})
	for _, id := range old {
		if err := removeRun(ctx, sandbox, id); err != nil {
			w.agent.Log.Warn("an ended container could not be removed", "pod", pod.Name, "namespace", pod.Namespace, "container", c.Name, "err", err)
		}
	}
}

// fail notes why a container could not be started.
func (w *worker) fail(name string, err error) {
	reason := "CreateContainerError"
	var noImage *imageError
	var config configError
	switch {
	case errors.As(err, &noImage):
		reason = noImage.reason
	case errors.As(err, &config):
		reason = "CreateContainerConfigError"
	}
	f := &life.Failure{Reason: reason, Message: bounded(err.Error(), maxMessage), At: time.Now(), Count: 1}
	if before := w.observed.Failures[name]; before != nil && before.Reason == reason {
		f.Count = before.Count + 1
	}
	w.observed.Failures[name] = f
	w.event(true, "Failed", fmt.Sprintf("Container %s could not be started: %s: %s", name, reason, err))
}

// outdated forgets all runs of a container but the last two, and returns them.
func (w *worker) outdated(name string) (ids []string) {
	runs := w.runs()[name]
	for len(runs) > 2 {
		if old := runs[0]; !old.FinishedAt.IsZero() {
			delete(w.statuses, old.ID)
			ids = append(ids, old.ID)
		}
		runs = runs[1:]
	}
	return ids
}

// removeRun removes a run's records and logs.
func removeRun(ctx context.Context, sandbox *runtime.Pod, id string) error {
	logs, _ := filepath.Glob(filepath.Join(sandbox.LogDir(), id+".log*"))
	for _, path := range logs {
		_ = os.Remove(path)
	}
	return sandbox.RemoveContainer(ctx, id)
}

func terminationFile(sandbox *runtime.Pod, id string) string {
	return filepath.Join(sandbox.ContainerDir(id), "termination-log")
}

// containerConfig gathers all that a container needs.
func (a *Agent) containerConfig(ctx context.Context, pod *corev1.Pod, c *corev1.Container, img image.Image, sandbox *runtime.Pod, addrs []netip.Addr, action life.StartContainer) (shim.Container, runtime.Limits, error) {
	var out shim.Container
	links := pod.Spec.EnableServiceLinks == nil || *pod.Spec.EnableServiceLinks
	hostname, err := a.hostname(pod)
	if err != nil {
		return out, runtime.Limits{}, configError{err}
	}
	facts := spec.Facts{
		PodIPs: addrs, HostIPs: a.NodeIPs, Allocatable: a.host.capacity, Services: serviceenv.ForPod(a.intentServices(), pod.Namespace, links), Hostname: hostname,
		File: a.envFiles(pod, sandbox),
	}
	env, vars, err := spec.Env(pod, c, img.Config.Env, facts, a.objects(ctx, pod.Namespace))
	if err != nil {
		return out, runtime.Limits{}, configError{err}
	}
	from, err := imageOf(pod, c, img)
	if err != nil {
		return out, runtime.Limits{}, configError{err}
	}
	p, err := spec.ProcessOf(pod, c, from, vars, a.host.capacity.Memory().Value())
	if err != nil {
		return out, runtime.Limits{}, configError{err}
	}
	id := fmt.Sprintf("%s-%d-%s", c.Name, action.Attempt, strings.ReplaceAll(string(uuid.NewUUID()), "-", "")[:8])
	out = shim.Container{
		ID: id, HostPID: pod.Spec.HostPID, Privileged: p.Privileged, Shm: a.shm(pod),
		Root: shim.Root{Lower: img.Lower, Hide: img.Hide, ReadOnly: p.ReadOnlyRoot},
		Process: shim.Process{
			Args: p.Args, Env: env, Dir: p.Dir, UID: p.UID, GID: p.GID, Groups: p.Groups, Capabilities: p.Capabilities,
			NoNewPrivileges: p.NoNewPrivileges, Unconfined: p.Unconfined, OOMScoreAdj: p.OOMScoreAdj, TTY: c.TTY,
		},
		Log:   shim.Log{Path: filepath.Join(sandbox.LogDir(), id+".log"), MaxSize: logSize, MaxFiles: logFiles},
		Stdin: c.Stdin, StdinOnce: c.StdinOnce,
	}
	out.Meta, _ = json.Marshal(runMeta{Container: c.Name, Image: c.Image, ImageID: img.ID, StopSignal: stopSignal(c, img), Attempt: action.Attempt, Round: action.Round, Backoff: action.Backoff})
	if out.Mounts, err = a.mounts(pod, c, vars, hostname, sandbox, id, img, addrs); err != nil {
		return out, runtime.Limits{}, err
	}
	limits := runtime.Limits{Memory: c.Resources.Limits.Memory().Value(), CPU: c.Resources.Limits.Cpu().MilliValue(), Weight: max(c.Resources.Requests.Cpu().MilliValue(), 2)}
	return out, limits, nil
}

// hostname is what a Pod's processes see as the name of their machine.
func (a *Agent) hostname(pod *corev1.Pod) (string, error) {
	if pod.Spec.HostNetwork {
		return os.Hostname()
	}
	return spec.KernelHostname(pod, a.ClusterDomain)
}

// mounts are a container's volumes, and the files that each container has.
func (a *Agent) mounts(pod *corev1.Pod, c *corev1.Container, vars map[string]string, hostname string, sandbox *runtime.Pod, id string, img image.Image, addrs []netip.Addr) ([]shim.Mount, error) {
	dir := sandbox.ContainerDir(id)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	privileged := c.SecurityContext != nil && c.SecurityContext.Privileged != nil && *c.SecurityContext.Privileged
	var out []shim.Mount
	for i, path := range img.Scratch {
		source := filepath.Join(dir, "scratch", fmt.Sprint(i))
		if err := os.MkdirAll(source, 0o755); err != nil {
			return nil, err
		}
		mode := os.FileMode(0o755)
		if strings.HasSuffix(path, "tmp") {
			mode = 0o777 | os.ModeSticky
		}
		if err := os.Chmod(source, mode); err != nil {
			return nil, err
		}
		out = append(out, shim.Mount{Source: source, Target: path})
	}
	termination := c.TerminationMessagePath
	if termination == "" {
		termination = corev1.TerminationMessagePathDefault
	}
	nodes, _ := os.ReadFile("/etc/hosts")
	for _, f := range []struct {
		name, target, text string
		mode               os.FileMode
	}{
		{"hosts", "/etc/hosts", spec.Hosts(pod, addrs, a.ClusterDomain, string(nodes)), 0o644},
		{"resolv.conf", "/etc/resolv.conf", spec.Resolve(pod, a.clusterDNS(), a.ClusterDomain, nodeResolver(resolverFiles...)), 0o644},
		{"hostname", "/etc/hostname", hostname + "\n", 0o644},
		{"termination-log", termination, "", 0o666},
	} {
		path := filepath.Join(dir, f.name)
		if err := os.WriteFile(path, []byte(f.text), f.mode); err != nil {
			return nil, err
		}
		if err := os.Chmod(path, f.mode); err != nil {
			return nil, err
		}
		out = append(out, shim.Mount{Source: path, Target: f.target})
	}
	for _, m := range c.VolumeMounts {
		source, err := a.volumePath(pod, m.Name)
		if err != nil {
			return nil, configError{err}
		}
		sub, err := spec.SubPath(&m, vars)
		if err != nil {
			return nil, configError{err}
		}
		out = append(out, shim.Mount{
			Source: source, SubPath: sub, Target: m.MountPath, ReadOnly: m.ReadOnly || readOnlyVolume(pod, m.Name), Devices: privileged,
		})
	}
	return out, nil
}

// resolverFiles are where a machine says how names are resolved. systemd-resolved has its own servers in the second, and itself in the first.
var resolverFiles = []string{"/etc/resolv.conf", "/run/systemd/resolve/resolv.conf"}

// nodeResolver is what the first of the files says, or the first one by which Pods in networks of their own can resolve names, too.
func nodeResolver(paths ...string) spec.Resolver {
	var list []spec.Resolver
	for _, path := range paths {
		data, _ := os.ReadFile(path)
		r := spec.ParseResolver(string(data))
		if list = append(list, r); len(r.Servers) > 0 && !r.Local() {
			return r
		}
		if !list[0].Local() {
			break
		}
	}
	return list[0]
}

// objects reads what a Pod refers to from the API, at the time that it is needed.
func (a *Agent) objects(ctx context.Context, namespace string) spec.Objects {
	return &apiObjects{ctx: ctx, agent: a, namespace: namespace}
}

type apiObjects struct {
	ctx       context.Context
	agent     *Agent
	namespace string
}

func (o *apiObjects) ConfigMap(name string) (*corev1.ConfigMap, error) {
	var m *corev1.ConfigMap
	err := patiently(o.ctx, func() (err error) {
		m, err = o.agent.Client.CoreV1().ConfigMaps(o.namespace).Get(o.ctx, name, metav1.GetOptions{})
		return err
	})
	if apierrors.IsNotFound(err) {
		return nil, &spec.MissingError{Kind: "ConfigMap", Name: name}
	}
	return m, err
}

func (o *apiObjects) Secret(name string) (*corev1.Secret, error) {
	var s *corev1.Secret
	err := patiently(o.ctx, func() (err error) {
		s, err = o.agent.Client.CoreV1().Secrets(o.namespace).Get(o.ctx, name, metav1.GetOptions{})
		return err
	})
	if apierrors.IsNotFound(err) {
		return nil, &spec.MissingError{Kind: "Secret", Name: name}
	}
	return s, err
}

// patiently repeats what is forbidden for a moment: the API server allows a node what its Pods refer to, and may learn of a Pod a
// little later than the node does.
func patiently(ctx context.Context, f func() error) error {
	for end := time.Now().Add(time.Second); ; {
		err := f()
		if !apierrors.IsForbidden(err) || time.Now().After(end) {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// lastLines is the end of a log, without its times. What a program wrote of a line at several times is one.
func lastLines(path string, lines, most int) string {
	const tail = 64 << 10
	var out []string
	whole := true
	for line := range strings.Lines(readEnd(path, tail)) {
		parts := strings.SplitN(strings.TrimSuffix(line, "\n"), " ", 4)
		if len(parts) != 4 {
			continue
		}
		if !whole {
			out[len(out)-1] += parts[3]
		} else {
			out = append(out, parts[3])
		}
		whole = parts[2] != "P"
	}
	text := strings.Join(out[max(0, len(out)-lines):], "\n")
	return text[max(0, len(text)-most):]
}
