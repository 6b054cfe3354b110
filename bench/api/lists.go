package main

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clientset "k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
)

// lists are the medians of how long a list of all Services takes, in milliseconds.
type lists struct {
	Full   float64 `json:"fullMs"`
	Paged  float64 `json:"pagedMs"`
	Cached float64 `json:"resourceVersion0Ms"`
	Items  int     `json:"items"`
	// CPU is the server's for one of each.
	CPU float64 `json:"serverCPUms"`
}

const pageSize = 500

// measureLists takes each kind of list in turn, so that what disturbs one disturbs all.
func measureLists(ctx context.Context, s *subject, rounds int, say *teller) (*lists, error) {
	say.progress("lists")
	client, err := s.client()
	if err != nil {
		return nil, err
	}
	kinds := []metav1.ListOptions{{}, {Limit: pageSize}, {ResourceVersion: "0"}}
	times := make([]samples, len(kinds))
	out := &lists{}
	var before usage
	for round := range rounds + 1 {
		if round == 1 { // the first was for warming up
			if before, err = s.usage(); err != nil {
				return nil, err
			}
		}
		for i, opts := range kinds {
			took, items, err := list(ctx, client, opts)
			if err != nil {
				return nil, err
			}
			if out.Items != 0 && items != out.Items {
				return nil, fmt.Errorf("a list has %d Services, another %d", out.Items, items)
			}
			out.Items = items
			if round > 0 {
				times[i] = append(times[i], sample{took: took})
			}
		}
	}
	after, err := s.usage()
	if err != nil {
		return nil, err
	}
	out.CPU = milliseconds(after.Server.CPU-before.Server.CPU) / float64(rounds)
	out.Full, out.Paged, out.Cached = times[0].summary().P50, times[1].summary().P50, times[2].summary().P50
	return out, nil
}

// list returns how long all pages took to arrive. Decoding is the client's affair, and left out of it.
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
