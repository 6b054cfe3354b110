package replicaset

import (
	"context"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
)

// replicationControllers reads and writes ReplicationControllers as ReplicaSets.
type replicationControllers struct {
	client typedcorev1.ReplicationControllerInterface
}

// Get reads one.
func (c replicationControllers) Get(ctx context.Context, name string, opts metav1.GetOptions) (*appsv1.ReplicaSet, error) {
	rc, err := c.client.Get(ctx, name, opts)
	if err != nil {
		return nil, err
	}
	return asSet(rc), nil
}

// UpdateStatus writes the status of one. The rest of it is not looked at.
func (c replicationControllers) UpdateStatus(ctx context.Context, set *appsv1.ReplicaSet, opts metav1.UpdateOptions) (*appsv1.ReplicaSet, error) {
	rc, err := c.client.UpdateStatus(ctx, &corev1.ReplicationController{ObjectMeta: set.ObjectMeta, Status: statusOf(set.Status)}, opts)
	if err != nil {
		return nil, err
	}
	return asSet(rc), nil
}

// asSet reads a ReplicationController as a ReplicaSet.
func asSet(rc *corev1.ReplicationController) *appsv1.ReplicaSet {
	out := &appsv1.ReplicaSet{
		ObjectMeta: rc.ObjectMeta,
		Spec: appsv1.ReplicaSetSpec{
			Replicas: rc.Spec.Replicas, MinReadySeconds: rc.Spec.MinReadySeconds,
			Selector: &metav1.LabelSelector{MatchLabels: rc.Spec.Selector},
		},
		Status: appsv1.ReplicaSetStatus{
			Replicas: rc.Status.Replicas, FullyLabeledReplicas: rc.Status.FullyLabeledReplicas, ReadyReplicas: rc.Status.ReadyReplicas,
			AvailableReplicas: rc.Status.AvailableReplicas, ObservedGeneration: rc.Status.ObservedGeneration,
		},
	}
	if rc.Spec.Template != nil {
		out.Spec.Template = *rc.Spec.Template
	}
	for _, c := range rc.Status.Conditions {
		out.Status.Conditions = append(out.Status.Conditions, appsv1.ReplicaSetCondition{
			Type: appsv1.ReplicaSetConditionType(c.Type), Status: c.Status, LastTransitionTime: c.LastTransitionTime, Reason: c.Reason, Message: c.Message,
		})
	}
	return out
}

func statusOf(status appsv1.ReplicaSetStatus) corev1.ReplicationControllerStatus {
	out := corev1.ReplicationControllerStatus{
		Replicas: status.Replicas, FullyLabeledReplicas: status.FullyLabeledReplicas, ReadyReplicas: status.ReadyReplicas,
		AvailableReplicas: status.AvailableReplicas, ObservedGeneration: status.ObservedGeneration,
	}
	for _, c := range status.Conditions {
		out.Conditions = append(out.Conditions, corev1.ReplicationControllerCondition{
			Type: corev1.ReplicationControllerConditionType(c.Type), Status: c.Status, LastTransitionTime: c.LastTransitionTime, Reason: c.Reason, Message: c.Message,
		})
	}
	return out
}
