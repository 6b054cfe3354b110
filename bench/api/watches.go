package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clientset "k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"

	"portal/bench/report"
)

// writers update Services at once in the second part.
const writers = 16

// measureWatches updates Services one after the other, for the latency, and then from many clients, for the throughput.
func measureWatches(ctx context.Context, s *subject, at report.At, watchers, updates int) error {
	ctx, stop := context.WithCancel(ctx)
	client, err := s.client()
	if err != nil {
		stop()
		return err
	}
	services, err := client.CoreV1().Services(metav1.NamespaceAll).List(ctx, metav1.ListOptions{LabelSelector: ours})
	if err != nil {
		stop()
		return err
	}
	const warm = 50
	f := newFanOut(watchServices, services.ResourceVersion, watchers, warm+2*updates)
	defer f.ended.Wait()
	defer stop()
	report.Logf("opening %d watches", watchers)
	if err := f.openAll(ctx, s); err != nil {
		return err
	}
	report.Logf("updates to %d watchers", watchers)
	change := func(i int) error {
		return update(ctx, client, &services.Items[i%len(services.Items)], fmt.Sprint(i))
	}
	if _, _, err := f.oneByOne(ctx, change, 0, warm); err != nil {
		return err
	}
	answered, sent, err := f.oneByOne(ctx, change, warm, warm+updates)
	if err != nil {
		return err
	}
	before, err := s.usage()
	if err != nil {
		return err
	}
	took, err := f.atOnce(ctx, s, services.Items, updates)
	if err != nil {
		return err
	}
	after, err := s.usage()
	if err != nil {
		return err
	}
	f.report(at, s.name, answered, sent)
	at.Higher(s.name, eventRate, float64(watchers*updates)/took.Seconds(), "a second")
	at.Lower(s.name, "server CPU for each update with 16 writers", report.Milliseconds(after.Server.CPU-before.Server.CPU)/float64(updates), "ms")
	at.Lower(s.name, "watches ended by the server", float64(f.reopened.Load()), "")
	return nil
}

func watchServices(ctx context.Context, client *clientset.Clientset, version string) (io.ReadCloser, error) {
	return client.CoreV1().RESTClient().Get().Resource("services").
		VersionedParams(&metav1.ListOptions{Watch: true, ResourceVersion: version}, scheme.ParameterCodec).Stream(ctx)
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
