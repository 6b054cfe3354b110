// Package follow watches single ConfigMaps and Secrets by name, which is all that a node may read of them: one watch for each object,
// however many Pods refer to it, and for as long as one does. What is made of the objects it does not know.
package follow

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"
)

// Kind is one of the kinds that can be followed.
type Kind string

// The kinds.
const (
	ConfigMap Kind = "ConfigMap"
	Secret    Kind = "Secret"
)

// Key names an object.
type Key struct {
	Kind            Kind
	Namespace, Name string
}

// Follower follows objects while somebody holds them.
type Follower struct {
	client kubernetes.Interface
	log    *slog.Logger
	ctx    context.Context

	mu      sync.Mutex
	objects map[Key]*object
	running sync.WaitGroup
}

// object is one that is followed.
type object struct {
	key     Key
	ctx     context.Context
	cancel  context.CancelFunc
	holders map[*holder]bool

	// following says that it is listed and watched. One that is immutable is not any more once it was read.
	following bool

	known bool // it has been asked for; it may not exist
	value metav1.Object
	err   error // why it can't be read
}

type holder struct{ changed func() }

// New makes a Follower. It follows until ctx ends; Wait returns after that.
func New(ctx context.Context, client kubernetes.Interface, log *slog.Logger) *Follower {
	return &Follower{client: client, log: log, ctx: ctx, objects: map[Key]*object{}}
}

// Wait returns when all that was started has ended.
func (f *Follower) Wait() { f.running.Wait() }

// Hold follows an object until release is called. changed is called when it is another than it was; it must neither wait nor call back.
func (f *Follower) Hold(key Key, changed func()) (release func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	o := f.objects[key]
	if o == nil {
		ctx, cancel := context.WithCancel(f.ctx)
		o = &object{key: key, ctx: ctx, cancel: cancel, holders: map[*holder]bool{}}
		f.objects[key] = o
	}
	if !o.following {
		// One that is immutable may have been deleted and made anew since it was read: it is read again for whoever comes.
		o.following, o.known = true, false
		f.running.Go(func() { f.follow(o) })
	}
	h := &holder{changed}
	o.holders[h] = true
	if o.known {
		changed()
	}
	return sync.OnceFunc(func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		delete(o.holders, h)
		if len(o.holders) == 0 {
			o.cancel()
			if f.objects[key] == o {
				delete(f.objects, key)
			}
		}
	})
}

// Get is an object as it was last seen. known is false if it is not followed, or has not been asked for yet; a nil object does not exist.
func (f *Follower) Get(key Key) (value metav1.Object, known bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if o := f.objects[key]; o != nil {
		return o.value, o.known
	}
	return nil, false
}

// Err is why an object can't be read at present; nil if it can, or has not been asked for yet.
func (f *Follower) Err(key Key) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if o := f.objects[key]; o != nil {
		return o.err
	}
	return nil
}

// Watching is how many objects are followed.
func (f *Follower) Watching() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.objects)
}

// Delays between tries. The first come quickly: the API server may learn of a Pod a little later than its node does.
const (
	firstDelay = 20 * time.Millisecond
	mostDelay  = 30 * time.Second
)

// follow lists and watches an object until nobody holds it, or it is settled.
func (f *Follower) follow(o *object) {
	ctx, delay, logged := o.ctx, firstDelay, false
	for ctx.Err() == nil {
		settled, err := f.once(ctx, o)
		f.failed(o, err)
		switch {
		case ctx.Err() != nil:
			return
		case settled:
			f.mu.Lock()
			defer f.mu.Unlock()
			o.following = false
			return
		case err == nil:
			delay, logged = firstDelay, false
		default:
			if delay > time.Second && !logged {
				logged = true
				f.log.Warn("an object that Pods refer to can't be read, retrying", "kind", o.key.Kind, "namespace", o.key.Namespace, "name", o.key.Name, "err", err)
			}
			delay = min(2*delay, mostDelay)
		}
		select {
		case <-ctx.Done():
		case <-time.After(delay/2 + rand.N(delay)):
		}
	}
}

// failed notes why an object can't be read, and tells those who hold it of a new reason.
func (f *Follower) failed(o *object, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	same := (err == nil) == (o.err == nil) && (err == nil || err.Error() == o.err.Error())
	if o.err = err; same || err == nil {
		return
	}
	for h := range o.holders {
		h.changed()
	}
}

// once lists the object and watches it to the end of the watch. settled says that it will never change again.
func (f *Follower) once(ctx context.Context, o *object) (settled bool, err error) {
	options := metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("metadata.name", o.key.Name).String()}
	value, version, err := f.list(ctx, o.key, options)
	if err != nil {
		return false, err
	}
	f.set(o, value)
	if immutable(value) {
		return true, nil
	}
	options.ResourceVersion, options.AllowWatchBookmarks = version, true
	options.TimeoutSeconds = ptr.To(int64(300 + rand.N(300)))
	w, err := f.watch(ctx, o.key, options)
	if err != nil {
		return false, err
	}
	defer w.Stop()
	for {
		select {
		case <-ctx.Done():
			return false, ctx.Err()
		case e, ok := <-w.ResultChan():
			if !ok {
				return false, nil
			}
			switch e.Type {
			case watch.Added, watch.Modified:
				value, ok := e.Object.(metav1.Object)
				if !ok {
					return false, fmt.Errorf("a %T was sent", e.Object)
				}
				f.set(o, value)
				if immutable(value) {
					return true, nil
				}
			case watch.Deleted:
				f.set(o, nil)
			case watch.Error:
				if err := apierrors.FromObject(e.Object); !apierrors.IsResourceExpired(err) && !apierrors.IsGone(err) {
					return false, err
				}
				return false, nil
			}
		}
	}
}

func (f *Follower) list(ctx context.Context, key Key, o metav1.ListOptions) (metav1.Object, string, error) {
	if key.Kind == ConfigMap {
		list, err := f.client.CoreV1().ConfigMaps(key.Namespace).List(ctx, o)
		if err != nil {
			return nil, "", err
		}
		for i := range list.Items {
			if list.Items[i].Name == key.Name {
				return &list.Items[i], list.ResourceVersion, nil
			}
		}
		return nil, list.ResourceVersion, nil
	}
	list, err := f.client.CoreV1().Secrets(key.Namespace).List(ctx, o)
	if err != nil {
		return nil, "", err
	}
	for i := range list.Items {
		if list.Items[i].Name == key.Name {
			return &list.Items[i], list.ResourceVersion, nil
		}
	}
	return nil, list.ResourceVersion, nil
}

func (f *Follower) watch(ctx context.Context, key Key, o metav1.ListOptions) (watch.Interface, error) {
	if key.Kind == ConfigMap {
		return f.client.CoreV1().ConfigMaps(key.Namespace).Watch(ctx, o)
	}
	return f.client.CoreV1().Secrets(key.Namespace).Watch(ctx, o)
}

// set notes what an object is now, and tells those who hold it.
func (f *Follower) set(o *object, value metav1.Object) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if value != nil {
		value.SetManagedFields(nil)
	}
	same := o.known && (value == nil) == (o.value == nil) && (value == nil || sameContent(value, o.value))
	failed := o.err != nil
	o.known, o.value, o.err = true, value, nil
	if same && !failed {
		return
	}
	for h := range o.holders {
		h.changed()
	}
}

// sameContent compares what volumes and variables are made from.
func sameContent(a, b metav1.Object) bool {
	switch a := a.(type) {
	case *corev1.ConfigMap:
		b, ok := b.(*corev1.ConfigMap)
		return ok && equality.Semantic.DeepEqual(a.Data, b.Data) && equality.Semantic.DeepEqual(a.BinaryData, b.BinaryData)
	case *corev1.Secret:
		b, ok := b.(*corev1.Secret)
		return ok && equality.Semantic.DeepEqual(a.Data, b.Data)
	}
	return false
}

func immutable(value metav1.Object) bool {
	switch v := value.(type) {
	case *corev1.ConfigMap:
		return ptr.Deref(v.Immutable, false)
	case *corev1.Secret:
		return ptr.Deref(v.Immutable, false)
	}
	return false
}
