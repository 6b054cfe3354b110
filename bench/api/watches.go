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

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientset "k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
)

// watches are how updates reach many watchers.
type watches struct {
	// AfterAnswer is the time from an update's answer until the last watcher has it; 0 if all had it before.
	AfterAnswer spread `json:"lastWatcherAfterAnswer"`
	// AfterRequest is the time from sending the update.
	AfterRequest spread `json:"lastWatcherAfterRequest"`
	// EventsPerSecond arrive, over all watchers, while several clients update as fast as they can.
	EventsPerSecond float64 `json:"eventsPerSecond"`
	// CPU is the server's for one update under that load, in milliseconds.
	CPU float64 `json:"serverCPUms"`
	// Reopened watches were ended by the server, which thought their clients too slow.
	Reopened int64 `json:"reopened"`
}

// writers update Services at once in the second part.
const writers = 16

// eventLimit is how long an event may take to be believed lost.
const eventLimit = 30 * time.Second

// measureWatches updates Services one after the other, for the latency, and then from many clients, for the throughput.
func measureWatches(ctx context.Context, s *subject, watchers, updates int, say *teller) (*watches, error) {
	ctx, stop := context.WithCancel(ctx)
	client, err := s.client()
	if err != nil {
		stop()
		return nil, err
	}
	services, err := client.CoreV1().Services(metav1.NamespaceAll).List(ctx, metav1.ListOptions{LabelSelector: ours})
	if err != nil {
		stop()
		return nil, err
	}
	const warm = 50
	f := newFanOut(watchers, warm+2*updates)
	defer f.ended.Wait()
	defer stop()
	say.progress("opening %d watches", watchers)
	for range watchers {
		if err := f.open(ctx, s, services.ResourceVersion); err != nil {
			return nil, err
		}
	}
	say.progress("updates to %d watchers", watchers)
	if _, _, err := f.oneByOne(ctx, client, services.Items, 0, warm); err != nil {
		return nil, err
	}
	out := &watches{}
	answered, sent, err := f.oneByOne(ctx, client, services.Items, warm, warm+updates)
	if err != nil {
		return nil, err
	}
	out.AfterAnswer, out.AfterRequest = answered.summary(), sent.summary()
	before, err := s.usage()
	if err != nil {
		return nil, err
	}
	took, err := f.atOnce(ctx, s, services.Items, updates)
	if err != nil {
		return nil, err
	}
	after, err := s.usage()
	if err != nil {
		return nil, err
	}
	out.EventsPerSecond = float64(watchers*updates) / took.Seconds()
	out.CPU = milliseconds(after.Server.CPU-before.Server.CPU) / float64(updates)
	out.Reopened = f.reopened.Load()
	return out, nil
}

// fanOut counts how many watchers have received each event. Events come in the same order to all, and nobody else
// writes Services, so an event is known by its number and need not be decoded: a hundred watchers that decode, in this
// one process, would measure themselves.
type fanOut struct {
	watchers int
	arrived  []atomic.Int32
	complete []chan struct{} // closed when all watchers have the event
	at       []time.Time     // when the last of them got it
	ended    sync.WaitGroup
	broken   chan error
	reopened atomic.Int64
}

func newFanOut(watchers, events int) *fanOut {
	f := &fanOut{
		watchers: watchers, arrived: make([]atomic.Int32, events),
		complete: make([]chan struct{}, events), at: make([]time.Time, events), broken: make(chan error, watchers),
	}
	for i := range f.complete {
		f.complete[i] = make(chan struct{})
	}
	return f
}

// open starts a watch on a connection of its own and follows it, through ends that the server puts to it, until ctx ends.
func (f *fanOut) open(ctx context.Context, s *subject, version string) error {
	config := s.config()
	config.Timeout = 0
	client, err := clientset.NewForConfig(config)
	if err != nil {
		return err
	}
	stream, err := watchServices(ctx, client, version)
	if err != nil {
		return err
	}
	f.ended.Go(func() {
		if err := f.follow(ctx, client, stream, version); err != nil && ctx.Err() == nil {
			f.broken <- err
		}
	})
	return nil
}

func watchServices(ctx context.Context, client *clientset.Clientset, version string) (io.ReadCloser, error) {
	opts := &metav1.ListOptions{Watch: true, ResourceVersion: version}
	stream, err := client.CoreV1().RESTClient().Get().Resource("services").VersionedParams(opts, scheme.ParameterCodec).Stream(ctx)
	if err != nil {
		return nil, fmt.Errorf("watch Services: %w", err)
	}
	return stream, nil
}

// follow goes on from the last event where the server ends the watch, as an informer would.
func (f *fanOut) follow(ctx context.Context, client *clientset.Clientset, stream io.ReadCloser, version string) error {
	event := 0
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
		if stream, err = watchServices(ctx, client, version); err != nil {
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

// versionOf is the resource version of the Service in a frame.
func versionOf(frame []byte) (string, error) {
	info, _ := runtime.SerializerInfoForMediaType(scheme.Codecs.SupportedMediaTypes(), runtime.ContentTypeProtobuf)
	var event metav1.WatchEvent
	if _, _, err := info.StreamSerializer.Decode(frame, nil, &event); err != nil {
		return "", fmt.Errorf("a watch event: %w", err)
	}
	var svc corev1.Service
	if _, _, err := scheme.Codecs.UniversalDeserializer().Decode(event.Object.Raw, nil, &svc); err != nil {
		return "", fmt.Errorf("a watch event of type %s: %w", event.Type, err)
	}
	return svc.ResourceVersion, nil
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

// oneByOne makes the updates of the numbers from first up to end, each after the last watcher has the one before.
func (f *fanOut) oneByOne(ctx context.Context, client *clientset.Clientset, services []corev1.Service, first, end int,
) (answered, sent samples, err error) {
	for i := first; i < end; i++ {
		start := time.Now()
		if err := update(ctx, client, &services[i%len(services)], fmt.Sprint(i)); err != nil {
			return nil, nil, err
		}
		answer := time.Now()
		last, err := f.wait(ctx, i)
		if err != nil {
			return nil, nil, err
		}
		answered = append(answered, sample{took: max(last.Sub(answer), 0)})
		sent = append(sent, sample{took: last.Sub(start)})
	}
	return answered, sent, nil
}

// atOnce makes the last updates from several clients and returns the time until the last watcher has the last event.
func (f *fanOut) atOnce(ctx context.Context, s *subject, services []corev1.Service, updates int) (time.Duration, error) {
	var clients []*clientset.Clientset
	for range writers {
		client, err := s.client()
		if err != nil {
			return 0, err
		}
		clients = append(clients, client)
	}
	errs := make([]error, writers)
	var working sync.WaitGroup
	own := len(services) - len(services)%writers // so that no two clients update the same Service
	start := time.Now()
	for w, client := range clients {
		working.Go(func() {
			for i := w; i < updates && errs[w] == nil; i += writers {
				errs[w] = update(ctx, client, &services[i%own], fmt.Sprint("at once ", i))
			}
		})
	}
	working.Wait()
	if err := errors.Join(errs...); err != nil {
		return 0, err
	}
	last, err := f.wait(ctx, len(f.complete)-1)
	return last.Sub(start), err
}

// update changes an annotation of a Service and keeps the answer, so that the next update knows its version.
func update(ctx context.Context, client *clientset.Clientset, svc *corev1.Service, value string) error {
	changed := svc.DeepCopy()
	changed.Annotations = map[string]string{"bench/update": value}
	stored, err := client.CoreV1().Services(svc.Namespace).Update(ctx, changed, metav1.UpdateOptions{})
	if err != nil {
		return fmt.Errorf("update of Service %s: %w", svc.Name, err)
	}
	*svc = *stored
	return nil
}
