package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"portal/internal/node/image"
	"portal/internal/node/runtime/shim"
	"portal/internal/node/spec"
)

// ImageOptions are those of the images in a node's data directory, also for programs beside the agent.
func ImageOptions(dataDir string) image.Options {
	return image.Options{Dir: filepath.Join(dataDir, imagesDir), Hidden: []string{dataDir}, InUse: func() (map[string]bool, error) { return imagesInUse(dataDir) }}
}

// imagesInUse are the images that containers have, whether they run or have ended: they may be started again.
func imagesInUse(dataDir string) (map[string]bool, error) {
	files, err := filepath.Glob(filepath.Join(dataDir, "pods", "*", "containers", "*", shim.StatusFile))
	if err != nil {
		return nil, err
	}
	out := map[string]bool{}
	for _, path := range files {
		data, err := os.ReadFile(path)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		var s shim.Status
		var meta runMeta
		if json.Unmarshal(data, &s) == nil && json.Unmarshal(s.Meta, &meta) == nil {
			out[meta.ImageID] = true
		}
	}
	return out, nil
}

// imageError is why a container has no image, with the reason that the API shows.
type imageError struct {
	reason string
	err    error
}

func (e *imageError) Error() string { return e.err.Error() }
func (e *imageError) Unwrap() error { return e.err }

// image finds a container's image, and pulls it if its policy says so.
func (w *worker) image(ctx context.Context, pod *corev1.Pod, c *corev1.Container) (image.Image, error) {
	store := w.agent.images
	found, err := store.Find(c.Image)
	var invalid *image.InvalidNameError
	var unknown *image.UnknownError
	switch {
	case errors.As(err, &invalid):
		return found, &imageError{"InvalidImageName", err}
	case err != nil && !errors.As(err, &unknown):
		return found, &imageError{"ImageInspectError", err}
	case err == nil && (store.Local(c.Image) || c.ImagePullPolicy != corev1.PullAlways):
		if !store.Local(c.Image) {
			w.tell(false, "Pulled", fmt.Sprintf("Image %q of container %s is on this node", c.Image, c.Name))
		}
		return found, nil
	case err != nil && c.ImagePullPolicy == corev1.PullNever:
		return found, &imageError{"ErrImageNeverPull", fmt.Errorf("image %q is not on this node, and imagePullPolicy is Never", c.Image)}
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if !w.beginPull(c.Name, cancel) {
		return found, context.Canceled
	}
	defer w.endPull(c.Name)
	w.tell(false, "Pulling", fmt.Sprintf("Pulling image %q", c.Image))
	credentials := w.pullCredentials(ctx, pod)
	begin := time.Now()
	record, err := store.Pull(ctx, c.Image, credentials, nil)
	if err == nil {
		found, err = store.Find(c.Image)
	}
	if err != nil {
		return found, &imageError{"ErrImagePull", err}
	}
	w.tell(false, "Pulled", fmt.Sprintf("Pulled image %q in %s; it takes %d bytes", c.Image, time.Since(begin).Round(time.Millisecond), record.Size))
	if len(record.Config.Volumes) > 0 {
		w.agent.Log.Info("an image declares volumes, which get none of their own: what is written there ends with the container unless its Pod mounts one",
			"image", c.Image, "volumes", strings.Join(record.Config.Volumes, ","))
	}
	return found, nil
}

// tell is event, for helpers that don't hold the worker's lock.
func (w *worker) tell(warning bool, reason, message string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.event(warning, reason, message)
}

// beginPull notes a pull, so that it ends with its Pod. It says false if that is ending already.
func (w *worker) beginPull(container string, cancel context.CancelFunc) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.deleted || w.pod.DeletionTimestamp != nil {
		return false
	}
	if w.pulls == nil {
		w.pulls = map[string]context.CancelFunc{}
	}
	w.pulls[container] = cancel
	return true
}

func (w *worker) endPull(container string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.pulls, container)
}

// abandonPulls ends pulls for a Pod that is deleted. It is called with the worker's lock held.
func (w *worker) abandonPulls() {
	for _, cancel := range w.pulls {
		cancel()
	}
}

// pullCredentials are those of the Pod's imagePullSecrets. One that is missing is an Event, and not needed for what is public.
func (w *worker) pullCredentials(ctx context.Context, pod *corev1.Pod) (out image.Credentials) {
	objects := w.agent.objects(ctx, pod.Namespace)
	var failed []string
	for _, ref := range pod.Spec.ImagePullSecrets {
		if ref.Name == "" {
			continue
		}
		s, err := objects.Secret(ref.Name)
		if err != nil {
			failed = append(failed, fmt.Sprintf("%s (%v)", ref.Name, err))
			continue
		}
		data, old := s.Data[corev1.DockerConfigJsonKey], false
		if s.Type == corev1.SecretTypeDockercfg {
			data, old = s.Data[corev1.DockerConfigKey], true
		}
		c, err := image.ParseCredentials(data, old)
		if err != nil {
			failed = append(failed, fmt.Sprintf("%s (%v)", ref.Name, err))
			continue
		}
		out.Add(c)
	}
	if len(failed) > 0 {
		w.tell(true, "FailedToRetrieveImagePullSecret", "Secrets of spec.imagePullSecrets that can't be used: "+strings.Join(failed, ", "))
	}
	return out
}

// imageOf is what spec needs to know of an image: who it runs as depends on the container's security context, too.
func imageOf(pod *corev1.Pod, c *corev1.Container, img image.Image) (spec.Image, error) {
	out := spec.Image{
		Entrypoint: img.Config.Entrypoint, Cmd: img.Config.Cmd, WorkingDir: img.Config.WorkingDir, UID: img.Config.User, GID: img.Config.Group,
	}
	if !img.OCI {
		return out, nil
	}
	account := img.Config.Account
	for _, uid := range []*int64{runAsUser(c.SecurityContext), podRunAsUser(pod.Spec.SecurityContext)} {
		if uid != nil {
			account = fmt.Sprint(*uid)
			break
		}
	}
	user, err := img.Lookup(account)
	if err != nil {
		return out, err
	}
	out.UID, out.GID, out.Groups, out.Named = &user.UID, &user.GID, user.Groups, user.Named
	return out, nil
}

func runAsUser(s *corev1.SecurityContext) *int64 {
	if s == nil {
		return nil
	}
	return s.RunAsUser
}

func podRunAsUser(s *corev1.PodSecurityContext) *int64 {
	if s == nil {
		return nil
	}
	return s.RunAsUser
}

// stopSignal is what asks a container to end: what the Pod says, what its image says, SIGTERM.
func stopSignal(c *corev1.Container, img image.Image) string {
	if c.Lifecycle != nil && c.Lifecycle.StopSignal != nil {
		return string(*c.Lifecycle.StopSignal)
	}
	return img.Config.StopSignal
}

// signalNamed reads a signal's name or number. What can't be read is SIGTERM.
func signalNamed(text string) syscall.Signal {
	text = strings.ToUpper(strings.TrimSpace(text))
	var n int
	if _, err := fmt.Sscanf(text, "%d", &n); err == nil && n > 0 && n <= 64 {
		return syscall.Signal(n)
	}
	if !strings.HasPrefix(text, "SIG") {
		text = "SIG" + text
	}
	var offset int
	switch {
	case strings.HasPrefix(text, "SIGRTMIN"):
		if _, err := fmt.Sscanf(text, "SIGRTMIN+%d", &offset); (err == nil || text == "SIGRTMIN") && offset >= 0 && offset <= 30 {
			return syscall.Signal(34 + offset)
		}
	case strings.HasPrefix(text, "SIGRTMAX"):
		if _, err := fmt.Sscanf(text, "SIGRTMAX-%d", &offset); (err == nil || text == "SIGRTMAX") && offset >= 0 && offset <= 30 {
			return syscall.Signal(64 - offset)
		}
	}
	if s := unix.SignalNum(text); s != 0 {
		return s
	}
	return syscall.SIGTERM
}

// Images are collected this often.
const collectInterval = time.Minute

// collectImages removes unused images while the disk is too full.
func (a *Agent) collectImages(ctx context.Context) {
	if err := a.attempt("clean up after pulls", func() error { return a.images.Clean(ctx) }); err != nil && ctx.Err() == nil {
		a.Log.Warn("what is left of interrupted pulls could not be removed", "err", err)
	}
	for {
		var removed []*image.Record
		err := a.attempt("collect images", func() (err error) {
			removed, err = a.images.Collect(ctx, a.ImageCollection)
			return err
		})
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			a.Log.Warn("unused images could not be removed, retrying", "err", err)
		}
		for _, r := range removed {
			a.Log.Info("an unused image was removed: the disk is too full", "image", r.Title(), "bytes", r.Size)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(collectInterval):
		}
	}
}

// shownImages is how many images a Node lists, as kubelets do.
const shownImages = 50

// nodeImages are those that the Node lists: the largest.
func (a *Agent) nodeImages() []corev1.ContainerImage {
	list, err := a.images.List()
	if err != nil {
		a.Log.Warn("the images can't be listed", "err", err)
		return nil
	}
	slices.SortStableFunc(list, func(x, y *image.Record) int {
		switch {
		case x.Size != y.Size:
			return int(min(max(y.Size-x.Size, -1), 1))
		}
		return strings.Compare(x.ID, y.ID)
	})
	var out []corev1.ContainerImage
	for _, r := range list[:min(len(list), shownImages)] {
		names := slices.Concat(r.Digests, r.Names)
		out = append(out, corev1.ContainerImage{Names: names[:min(len(names), 5)], SizeBytes: r.Size})
	}
	return out
}
