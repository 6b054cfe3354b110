package watch

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/rest"

	"portal/internal/intent"
)

// ListServices reads every Service once, in the API's order: by namespace and name.
func ListServices(ctx context.Context, config *rest.Config) ([]*intent.Service, error) {
	c, err := newClients(config)
	if err != nil {
		return nil, err
	}
	var list corev1.ServiceList
	if err := c.core.Get().Resource("services").Do(ctx).Into(&list); err != nil {
		return nil, err
	}
	out := make([]*intent.Service, len(list.Items))
	for i := range list.Items {
		out[i] = Service(&list.Items[i])
	}
	return out, nil
}
