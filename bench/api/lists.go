package main

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clientset "k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"

	"portal/bench/report"
)

const pageSize = 500

// measureLists takes each kind of list in turn, so that a disturbance affects all of them.
func measureLists(ctx context.Context, s *subject, at report.At, rounds int) error {
	report.Logf("lists")
	client, err := s.client()
	if err != nil {
		return err
	}
	kinds := []metav1.ListOptions{{}, {Limit: pageSize}, {ResourceVersion: "0"}}
	times, count := make([][]time.Duration, len(kinds)), 0
	var before usage
	for round := range rounds + 1 {
		if round == 1 { // the first was for warming up
			if before, err = s.usage(); err != nil {
				return err
			}
		}
		for i, opts := range kinds {
			took, items, err := list(ctx, client, opts)
			if err != nil {
				return err
			}
			if count != 0 && items != count {
				return fmt.Errorf("a list has %d Services, another %d", count, items)
			}
			count = items
			if round > 0 {
				times[i] = append(times[i], took)
			}
		}
	}
	after, err := s.usage()
	if err != nil {
		return err
	}
	for i, name := range []string{listFull, listPaged, listCached} {
		at.Lower(s.name, name, report.Quantile(times[i], 0.5), "ms")
	}
	at.Lower(s.name, "server CPU for the three lists", report.Milliseconds(after.Server.CPU-before.Server.CPU)/float64(rounds), "ms")
	return nil
}

// list returns how long all pages took to arrive, without the time to decode them.
func list(ctx context.Context, client *clientset.Clientset, opts metav1.ListOptions) (time.Duration, int, error) {
	var took time.Duration
	items := 0
	for {
		start := time.Now()
		body, err := client.CoreV1().RESTClient().Get().Resource("services").
			VersionedParams(&opts, scheme.ParameterCodec).Do(ctx).Raw()
		took += time.Since(start)
		if err != nil {
			return 0, 0, fmt.Errorf("list Services: %w", err)
		}
		var page corev1.ServiceList
		if _, _, err := scheme.Codecs.UniversalDeserializer().Decode(body, nil, &page); err != nil {
			return 0, 0, fmt.Errorf("list Services: %w", err)
		}
		items += len(page.Items)
		if page.Continue == "" {
			return took, items, nil
		}
		opts.Continue = page.Continue
	}
}
