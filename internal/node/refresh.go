package node

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/utils/ptr"

	"portal/internal/node/follow"
	"portal/internal/node/life"
	"portal/internal/node/runtime"
	"portal/internal/node/spec"
)

// source is an object that a volume's files come from.
type source struct {
	key      follow.Key
	volume   string
	optional bool
}

// sourcesOf are the objects that a Pod's volumes are made from.
func sourcesOf(pod *corev1.Pod) (out []source) {
	add := func(v *corev1.Volume, kind follow.Kind, name string, optional *bool) {
		out = append(out, source{follow.Key{Kind: kind, Namespace: pod.Namespace, Name: name}, v.Name, ptr.Deref(optional, false)})
	}
	for i := range pod.Spec.Volumes {
		v := &pod.Spec.Volumes[i]
		switch {
		case v.ConfigMap != nil:
			add(v, follow.ConfigMap, v.ConfigMap.Name, v.ConfigMap.Optional)
		case v.Secret != nil:
			add(v, follow.Secret, v.Secret.SecretName, v.Secret.Optional)
		case v.Projected != nil:
			for _, s := range v.Projected.Sources {
				switch {
				case s.ConfigMap != nil:
					add(v, follow.ConfigMap, s.ConfigMap.Name, s.ConfigMap.Optional)
				case s.Secret != nil:
					add(v, follow.Secret, s.Secret.Name, s.Secret.Optional)
				}
			}
		}
	}
	return out
}

// checkSources fails early if a Pod's volumes can't be made: namespaces and network are then not even begun.
func checkSources(pod *corev1.Pod, objects spec.Objects) error {
	for _, s := range sourcesOf(pod) {
		var err error
		if s.key.Kind == follow.ConfigMap {
			_, err = objects.ConfigMap(s.key.Name)
		} else {
			_, err = objects.Secret(s.key.Name)
		}
		var missing *spec.MissingError
		if err != nil && !(s.optional && errors.As(err, &missing)) {
			return &volumeError{s.volume, err}
		}
	}
	return nil
}

// onceObjects asks for each object once.
type onceObjects struct {
	spec.Objects
	configMaps map[string]*corev1.ConfigMap
	secrets    map[string]*corev1.Secret
}

func once(objects spec.Objects) *onceObjects {
	return &onceObjects{Objects: objects, configMaps: map[string]*corev1.ConfigMap{}, secrets: map[string]*corev1.Secret{}}
}

func (o *onceObjects) ConfigMap(name string) (*corev1.ConfigMap, error) {
	if have := o.configMaps[name]; have != nil {
		return have, nil
	}
	got, err := o.Objects.ConfigMap(name)
	if err == nil {
		o.configMaps[name] = got
	}
	return got, err
}

func (o *onceObjects) Secret(name string) (*corev1.Secret, error) {
	if have := o.secrets[name]; have != nil {
		return have, nil
	}
	got, err := o.Objects.Secret(name)
	if err == nil {
		o.secrets[name] = got
	}
	return got, err
}

// errNotYet says that an object has not been asked for yet.
var errNotYet = errors.New("it is not known yet")

// followedObjects are objects as they were last seen.
type followedObjects struct {
	follower  *follow.Follower
	namespace string
}

func (o followedObjects) ConfigMap(name string) (*corev1.ConfigMap, error) {
	value, known := o.follower.Get(follow.Key{Kind: follow.ConfigMap, Namespace: o.namespace, Name: name})
	switch {
	case !known:
		return nil, errNotYet
	case value == nil:
		return nil, &spec.MissingError{Kind: "ConfigMap", Name: name}
	}
	return value.(*corev1.ConfigMap), nil
}

func (o followedObjects) Secret(name string) (*corev1.Secret, error) {
	value, known := o.follower.Get(follow.Key{Kind: follow.Secret, Namespace: o.namespace, Name: name})
	switch {
	case !known:
		return nil, errNotYet
	case value == nil:
		return nil, &spec.MissingError{Kind: "Secret", Name: name}
	}
	return value.(*corev1.Secret), nil
}

// refreshDelay lets changes that come together be one.
const refreshDelay = 50 * time.Millisecond

// keepVolumes has the files of a Pod's volumes follow what they come from, until its sandbox ends. It is called with the worker's lock.
func (w *worker) keepVolumes(ctx context.Context, sandbox *runtime.Pod) {
	if !slices.ContainsFunc(w.pod.Spec.Volumes, func(v corev1.Volume) bool { return written(&v) }) {
		return
	}
	if w.stopVolumes != nil {
		w.stopVolumes()
	}
	ctx, w.stopVolumes = context.WithCancel(ctx)
	changed := make(chan struct{}, 1)
	wake := func() {
		select {
		case changed <- struct{}{}:
		default:
		}
	}
	w.volumesChanged = wake
	pod := w.pod
	w.beside(ctx, "refresh volumes", func() {
		defer w.agent.holdSources(pod, wake)()
		w.adoptTokens(pod, sandbox)
		w.adoptCertificates(pod, sandbox)
		failed := map[string]string{}
		for {
			var timer <-chan time.Time
			due := w.tokens.due()
			if at := w.certificates.due(); due.IsZero() || !at.IsZero() && at.Before(due) {
				due = at
			}
			if !due.IsZero() {
				timer = time.After(max(time.Until(due), time.Second))
			}
			select {
			case <-ctx.Done():
				return
			case <-timer:
			case <-changed:
				select {
				case <-ctx.Done():
					return
				case <-time.After(refreshDelay):
				}
			}
			if !sandbox.Alive() {
				return
			}
			w.refresh(ctx, sandbox, failed)
		}
	})
}

// refresh writes the volumes whose content has changed. What can't be made now stays as it was.
func (w *worker) refresh(ctx context.Context, sandbox *runtime.Pod, failed map[string]string) {
	w.mu.Lock()
	pod, addrs := w.pod, w.observed.PodIPs
	w.mu.Unlock()
	from := fileSources{objects: followedObjects{w.agent.follower, pod.Namespace}, tokens: w.tokens, certificates: w.certificates, addrs: addrs}
	say := func(about, message string, err error) {
		if err == nil {
			delete(failed, about)
		} else if failed[about] != err.Error() {
			failed[about] = err.Error()
			w.tell(true, "FailedMount", message+err.Error())
		}
	}
	defer func() { say("certificates", "Not renewed: ", w.certificates.problem()) }()
	for i := range pod.Spec.Volumes {
		v := &pod.Spec.Volumes[i]
		if !written(v) {
			continue
		}
		dir := sandbox.Inside(w.agent.volume(pod, v.Name))
		files, err := w.agent.files(ctx, pod, v, from)
		if err == nil && !upToDate(dir, files, pod) {
			err = writeFiles(dir, files, pod)
		}
		if ctx.Err() != nil {
			return
		}
		if errors.Is(err, errNotYet) {
			err = nil
		}
		say("volume "+v.Name, "Volume "+v.Name+" stays as it is: ", err)
	}
}

// adoptTokens takes over the tokens that are in a Pod's volumes, which an earlier agent wrote.
func (w *worker) adoptTokens(pod *corev1.Pod, sandbox *runtime.Pod) {
	for i := range pod.Spec.Volumes {
		v := &pod.Spec.Volumes[i]
		if v.Projected == nil {
			continue
		}
		for _, s := range v.Projected.Sources {
			t := s.ServiceAccountToken
			if t == nil || w.tokens.known(t) {
				continue
			}
			if path, err := filePath(t.Path); err == nil {
				if text, err := os.ReadFile(filepath.Join(sandbox.Inside(w.agent.volume(pod, v.Name)), dataLink, path)); err == nil {
					_ = w.tokens.adopt(t, string(text))
				}
			}
		}
	}
}

// sandboxFailed notes why there is no sandbox. A Pod whose volumes need something that does not exist starts when it does. It is called
// with the worker's lock.
func (w *worker) sandboxFailed(ctx context.Context, pod *corev1.Pod, err error) {
	reason, message := "FailedCreatePodSandBox", "The Pod's namespaces and network could not be made: "+err.Error()
	var volume *volumeError
	if errors.As(err, &volume) {
		reason, message = "FailedMount", "The Pod waits for its volumes: "+err.Error()
	}
	count := 1
	if before := w.observed.SandboxFailure; before != nil {
		count = before.Count + 1
	}
	w.observed.SandboxFailure = &life.Failure{Reason: reason, Message: err.Error(), At: time.Now(), Count: count}
	w.event(true, reason, message)
	var missing *spec.MissingError
	var certificate *certificateError
	if errors.As(err, &missing) || errors.As(err, &certificate) || apierrors.IsForbidden(err) {
		w.do(ctx, "await", func() { w.awaitSources(ctx, pod, err) })
	}
}

// holdSources has changed called whenever an object that a Pod's volumes are made from is another than it was, until release is called.
func (a *Agent) holdSources(pod *corev1.Pod, changed func()) (release func()) {
	var all []func()
	for _, s := range sourcesOf(pod) {
		all = append(all, a.follower.Hold(s.key, changed))
	}
	bundles := false
	bundlesOf(pod, func(string, *corev1.ClusterTrustBundleProjection) { bundles = true })
	if bundles {
		all = append(all, a.bundles.hold(changed))
	}
	return func() {
		for _, release := range all {
			release()
		}
	}
}

// awaitSources lets a Pod try again as soon as what was missing is there, or something else is wrong with its certificates.
func (w *worker) awaitSources(ctx context.Context, pod *corev1.Pod, why error) {
	changed := make(chan struct{}, 1)
	list := sourcesOf(pod)
	defer w.agent.holdSources(pod, func() {
		select {
		case changed <- struct{}{}:
		default:
		}
	})()
	check := time.NewTicker(time.Second)
	defer check.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-changed:
		case <-check.C:
		}
		w.mu.Lock()
		over := w.deleted || w.pod.DeletionTimestamp != nil || w.observed.Sandbox == life.SandboxReady || w.observed.SandboxFailure == nil
		w.mu.Unlock()
		if over {
			return
		}
		missing := slices.ContainsFunc(list, func(s source) bool {
			value, known := w.agent.follower.Get(s.key)
			return !s.optional && (!known || value == nil)
		})
		if missing || w.agent.bundles.check(ctx, pod) != nil {
			continue
		}
		if err := w.certificates.ready(ctx, pod); err == nil || err.Error() != why.Error() {
			w.mu.Lock()
			w.observed.SandboxFailure = nil
			w.mu.Unlock()
			return // do wakes the worker
		}
	}
}

func (p *podTokens) known(t *corev1.ServiceAccountTokenProjection) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	_, ok := p.have[keyOf(t)]
	return ok
}

// volumesFrom is where a new Pod's volumes come from: what the API has now.
func (w *worker) volumesFrom(objects spec.Objects) func([]netip.Addr) fileSources {
	return func(addrs []netip.Addr) fileSources {
		return fileSources{objects: objects, tokens: w.tokens, certificates: w.certificates, addrs: addrs}
	}
}
