package service

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"portal/internal/alloc"
	"portal/internal/store"
)

// An etcd that takes fewer claims at once is no fault of the server's: the answer names the field, and the flag of etcd.
func TestTooManyPortsAtOnce(t *testing.T) {
	a := &Allocation{Allocator: alloc.New(30000, 32767, rand.New(rand.NewPCG(1, 1)), time.Now)}
	err := a.attempt(t.Context(), "", false, func(ctx context.Context) error {
		svc := &corev1.Service{Spec: corev1.ServiceSpec{Ports: make([]corev1.ServicePort, 200)}}
		svc.Name = "many"
		ctx.Value(choiceKey{}).(*choice).last = svc
		return fmt.Errorf("create: %w", &store.TooManyClaimsError{Ops: 202, Cause: errors.New("too many operations")})
	})
	var status apierrors.APIStatus
	if !apierrors.IsInvalid(err) || !errors.As(err, &status) || status.Status().Details.Name != "many" ||
		status.Status().Details.Causes[0].Field != "spec.ports" || !strings.Contains(err.Error(), "--max-txn-ops=1024") {
		t.Errorf("got %v", err)
	}
}
