package main

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientset "k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"

	"portal/bench/report"
)

// eventLimit is how long an event may take to be believed lost.
const eventLimit = 30 * time.Second

// openWatch begins a watch of some kind from a resource version.
type openWatch func(ctx context.Context, client *clientset.Clientset, version string) (io.ReadCloser, error)

// fanOut counts how many watchers have received each event. Events come in the same order to all, and nobody else
// writes objects of that kind, so an event is known by its number and need not be decoded: watchers that decode, in this
// one process, would measure themselves.
type fanOut struct {
	watch    openWatch
	version  string // where the watches begin
	watchers int
	arrived  []atomic.Int32
	complete []chan struct{} // closed when all watchers have the event
	at       []time.Time     // when the last of them got it
	ended    sync.WaitGroup
	broken   chan error
	reopened atomic.Int64
}

func newFanOut(watch openWatch, version string, watchers, events int) *fanOut {
	f := &fanOut{
		watch: watch, version: version, watchers: watchers, arrived: make([]atomic.Int32, events),
		complete: make([]chan struct{}, events), at: make([]time.Time, events), broken: make(chan error, watchers),
	}
	for i := range f.complete {
		f.complete[i] = make(chan struct{})
	}
	return f
}

// openAll opens the watches, several at a time.
func (f *fanOut) openAll(ctx context.Context, s *subject) error {
	var opening errgroup.Group
	opening.SetLimit(16)
	for range f.watchers {
		opening.Go(func() error { return f.open(ctx, s) })
	}
	return opening.Wait()
}

// open starts a watch on a connection of its own and follows it until ctx ends, also where the server ends the watch.
func (f *fanOut) open(ctx context.Context, s *subject) error {
	config := s.config()
	config.Timeout = 0
	client, err := clientset.NewForConfig(config)
	if err != nil {
		return err
	}
	stream, err := f.watch(ctx, client, f.version)
	if err != nil {
		return fmt.Errorf("watch: %w", err)
	}
	f.ended.Go(func() {
		if err := f.follow(ctx, client, stream); ctx.Err() == nil {
			f.broken <- err
		}
	})
	return nil
}

// follow returns when the watch breaks. It goes on from the last event where the server ends the watch, as an informer would.
func (f *fanOut) follow(ctx context.Context, client *clientset.Clientset, stream io.ReadCloser) error {
	event, version := 0, f.version
	for {
		last, err := f.receive(stream, &event)
		_ = stream.Close()
		if !errors.Is(err, io.EOF) {
			return fmt.Errorf("a watch broke: %w", err)
		}
		if last != nil {
			if version, err = versionOf(last); err != nil {
				return err
			}
		}
		f.reopened.Add(1)
		if stream, err = f.watch(ctx, client, version); err != nil {
			return err
		}
	}
}

// receive counts the frames of a protobuf watch, which have four bytes of length before them, and returns the last.
func (f *fanOut) receive(stream io.Reader, event *int) ([]byte, error) {
	in := bufio.NewReaderSize(stream, 16<<10)
	var frame []byte
	for ; ; *event++ {
		var size [4]byte
		if _, err := io.ReadFull(in, size[:]); err != nil {
			return frame, err
		}
		length := int(binary.BigEndian.Uint32(size[:]))
		frame = slices.Grow(frame[:0], length)[:length]
		if _, err := io.ReadFull(in, frame); err != nil {
			return nil, err
		}
		if *event >= len(f.arrived) {
			return nil, errors.New("it brought more events than there were updates")
		}
		if int(f.arrived[*event].Add(1)) == f.watchers {
			f.at[*event] = time.Now()
			close(f.complete[*event])
		}
	}
}

// versionOf is the resource version of the object in a frame.
func versionOf(frame []byte) (string, error) {
	info, _ := runtime.SerializerInfoForMediaType(scheme.Codecs.SupportedMediaTypes(), runtime.ContentTypeProtobuf)
	var event metav1.WatchEvent
	if _, _, err := info.StreamSerializer.Decode(frame, nil, &event); err != nil {
		return "", fmt.Errorf("a watch event: %w", err)
	}
	object, _, err := scheme.Codecs.UniversalDeserializer().Decode(event.Object.Raw, nil, nil)
	if err != nil {
		return "", fmt.Errorf("a watch event of type %s: %w", event.Type, err)
	}
	about, err := meta.Accessor(object)
	if err != nil {
		return "", fmt.Errorf("a watch event of type %s: %w", event.Type, err)
	}
	return about.GetResourceVersion(), nil
}

// wait returns when every watcher has the event of a number.
func (f *fanOut) wait(ctx context.Context, event int) (time.Time, error) {
	select {
	case <-f.complete[event]:
		return f.at[event], nil
	case err := <-f.broken:
		return time.Time{}, err
	case <-time.After(eventLimit):
		return time.Time{}, fmt.Errorf("event %d has reached only %d of %d watchers in %s",
			event, f.arrived[event].Load(), f.watchers, eventLimit)
	case <-ctx.Done():
		return time.Time{}, ctx.Err()
	}
}

// oneByOne makes the changes of the numbers from first up to end, each after the last watcher has the one before. It
// returns the times until the last watcher had each: from its answer (0 if all had it before), and from its request.
func (f *fanOut) oneByOne(ctx context.Context, change func(int) error, first, end int) (answered, sent []time.Duration, err error) {
	for i := first; i < end; i++ {
		start := time.Now()
		if err := change(i); err != nil {
			return nil, nil, err
		}
		answer := time.Now()
		last, err := f.wait(ctx, i)
		if err != nil {
			return nil, nil, err
		}
		answered = append(answered, max(last.Sub(answer), 0))
		sent = append(sent, last.Sub(start))
	}
	return answered, sent, nil
}

// report adds what oneByOne returned.
func (f *fanOut) report(at report.At, subject string, answered, sent []time.Duration) {
	at.Lower(subject, lastWatchP50, report.Quantile(sent, 0.50), "ms")
	at.Lower(subject, lastWatchP99, report.Quantile(sent, 0.99), "ms")
	at.Lower(subject, "answer until the last watcher has it, p50", report.Quantile(answered, 0.50), "ms")
	at.Lower(subject, "answer until the last watcher has it, p99", report.Quantile(answered, 0.99), "ms")
}

// fanOutEndpoints are those of the slice that changes.
const fanOutEndpoints = 50

// measureFanOut changes one slice again and again that many nodes watch as kube-proxy does.
func measureFanOut(ctx context.Context, s *subject, at report.At, opts options) error {
	watchers, changes := opts.fanOut, opts.changes
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	client, err := s.client()
	if err != nil {
		return err
	}
	slices := client.DiscoveryV1().EndpointSlices(namespaceOf(0))
	changed, err := slices.Create(ctx, slice("fan-out", 0, fanOutEndpoints), metav1.CreateOptions{})
	if err != nil {
		return err
	}
	const warm = 20
	f := newFanOut(watchSlices, changed.ResourceVersion, watchers, warm+changes)
	defer f.ended.Wait()
	defer stop()
	report.Logf("opening %d watches, each on its own connection", watchers)
	if err := f.openAll(ctx, s); err != nil {
		return err
	}
	report.Logf("changing a slice of %d endpoints", fanOutEndpoints)
	change := func(i int) (err error) {
		*changed.Endpoints[i%fanOutEndpoints].Conditions.Ready = i/fanOutEndpoints%2 == 1
		changed, err = slices.Update(ctx, changed, metav1.UpdateOptions{})
		return err
	}
	if _, _, err := f.oneByOne(ctx, change, 0, warm); err != nil {
		return err
	}
	before, err := s.usage()
	if err != nil {
		return err
	}
	profile := s.startProfile(ctx, opts.profiles, "fan-out")
	answered, sent, err := f.oneByOne(ctx, change, warm, warm+changes)
	if err != nil {
		return err
	}
	after, err := s.usage()
	if err != nil {
		return err
	}
	f.report(at, s.name, answered, sent)
	at.Lower(s.name, "server CPU for each change", report.Milliseconds(after.Server.CPU-before.Server.CPU)/float64(changes), "ms")
	at.Lower(s.name, report.AnonymousSteady, after.Server.Anonymous, "MB")
	at.Lower(s.name, "watches ended by the server", float64(f.reopened.Load()), "")
	return profile()
}

// watchSlices watches what kube-proxy watches: all slices but those of headless Services and of other proxies.
func watchSlices(ctx context.Context, client *clientset.Clientset, version string) (io.ReadCloser, error) {
	opts := &metav1.ListOptions{
		Watch: true, ResourceVersion: version,
		LabelSelector: "!" + corev1.IsHeadlessService + ",!service.kubernetes.io/service-proxy-name",
	}
	return client.DiscoveryV1().RESTClient().Get().Resource("endpointslices").VersionedParams(opts, scheme.ParameterCodec).Stream(ctx)
}
