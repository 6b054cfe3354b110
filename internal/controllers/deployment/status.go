package deployment

import (
	"fmt"
	"math"
	"slices"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Reasons of conditions, which kubectl and others read.
const (
	reasonCreated   = "NewReplicaSetCreated"
	reasonFound     = "FoundNewReplicaSet"
	reasonUpdated   = "ReplicaSetUpdated"
	reasonAvailable = "NewReplicaSetAvailable"
	reasonFailed    = "ReplicaSetCreateError"
	reasonTimedOut  = "ProgressDeadlineExceeded"
	reasonPaused    = "DeploymentPaused"
	reasonResumed   = "DeploymentResumed"

	reasonEnough  = "MinimumReplicasAvailable"
	reasonTooFew  = "MinimumReplicasUnavailable"
	deadlineSlack = time.Second // times in conditions have no fractions
)

// status counts, and says whether enough Pods are available.
func (p *planner) status(conditions []appsv1.DeploymentCondition) appsv1.DeploymentStatus {
	d := p.Deployment
	status := appsv1.DeploymentStatus{
		ObservedGeneration: d.Generation, CollisionCount: d.Status.CollisionCount, Conditions: slices.Clone(conditions),
		TerminatingReplicas: new(int32),
	}
	for _, s := range p.all() {
		status.Replicas += s.Status.Replicas
		status.ReadyReplicas += s.Status.ReadyReplicas
		status.AvailableReplicas += s.Status.AvailableReplicas
		if s.Status.TerminatingReplicas == nil {
			continue
		}
		*status.TerminatingReplicas += *s.Status.TerminatingReplicas
	}
	if p.newest != nil {
		status.UpdatedReplicas = p.newest.Status.Replicas
	}
	status.UnavailableReplicas = max(total(p.all())-status.AvailableReplicas, 0)
	enough := appsv1.DeploymentCondition{
		Type: appsv1.DeploymentAvailable, Status: corev1.ConditionTrue, Reason: reasonEnough, Message: "Enough Pods are available.",
	}
	if status.AvailableReplicas < p.limits.replicas-p.limits.unavailable {
		enough.Status, enough.Reason, enough.Message = corev1.ConditionFalse, reasonTooFew, "Too few Pods are available."
	}
	setCondition(&status, enough, p.Now)
	return status
}

func hasDeadline(d *appsv1.Deployment) bool {
	return d.Spec.ProgressDeadlineSeconds != nil && *d.Spec.ProgressDeadlineSeconds != math.MaxInt32
}

// pauses are the conditions with what pausing and resuming mean for progress: the clock starts again.
func (p *planner) pauses() []appsv1.DeploymentCondition {
	d := p.Deployment
	status := appsv1.DeploymentStatus{Conditions: slices.Clone(d.Status.Conditions)}
	known := condition(&status, appsv1.DeploymentProgressing)
	if !hasDeadline(d) || known != nil && known.Reason == reasonTimedOut {
		return status.Conditions
	}
	wasPaused := known != nil && known.Reason == reasonPaused
	switch {
	case d.Spec.Paused && !wasPaused:
		setCondition(&status, progressing(corev1.ConditionUnknown, reasonPaused, "The rollout is paused."), p.Now)
	case !d.Spec.Paused && wasPaused:
		setCondition(&status, progressing(corev1.ConditionUnknown, reasonResumed, "The rollout is resumed."), p.Now)
	}
	return status.Conditions
}

func progressing(status corev1.ConditionStatus, reason, message string) appsv1.DeploymentCondition {
	return appsv1.DeploymentCondition{Type: appsv1.DeploymentProgressing, Status: status, Reason: reason, Message: message}
}

// complete says that all Pods have the newest template and are available.
func complete(d *appsv1.Deployment, status *appsv1.DeploymentStatus) bool {
	wanted := *d.Spec.Replicas
	return status.UpdatedReplicas == wanted && status.Replicas == wanted && status.AvailableReplicas == wanted &&
		status.ObservedGeneration >= d.Generation
}

// progress says how a rollout goes, and when to look again whether it has stopped.
func (p *planner) progress(status *appsv1.DeploymentStatus) time.Duration {
	d := p.Deployment
	p.failures(status)
	if !hasDeadline(d) {
		dropCondition(status, appsv1.DeploymentProgressing)
		return 0
	}
	name := "The Deployment"
	if p.newest != nil {
		name = "ReplicaSet " + p.newest.Name
	}
	known := condition(status, appsv1.DeploymentProgressing)
	deadline := time.Duration(*d.Spec.ProgressDeadlineSeconds) * time.Second
	switch {
	case p.created:
		setCondition(status, progressing(corev1.ConditionTrue, reasonCreated, name+" was created."), p.Now)
	case known == nil && p.newest != nil && !complete(d, status):
		setCondition(status, progressing(corev1.ConditionTrue, reasonFound, name+" has the template."), p.Now)
	case known != nil && known.Reason == reasonAvailable && status.Replicas == status.UpdatedReplicas:
		return 0 // it ended well, and what happens to Pods since is no rollout
	case complete(d, status):
		setCondition(status, progressing(corev1.ConditionTrue, reasonAvailable, name+" has all its Pods available."), p.Now)
		return 0
	case moved(&d.Status, status):
		next := progressing(corev1.ConditionTrue, reasonUpdated, name+" is being rolled out.")
		next.LastUpdateTime, next.LastTransitionTime = metav1.NewTime(p.Now), metav1.NewTime(p.Now)
		if known != nil && known.Status == next.Status {
			next.LastTransitionTime = known.LastTransitionTime
		}
		dropCondition(status, next.Type)
		status.Conditions = append(status.Conditions, next)
	case known != nil && known.Reason != reasonAvailable && known.Reason != reasonTimedOut && known.LastUpdateTime.Add(deadline).Before(p.Now):
		setCondition(status, progressing(corev1.ConditionFalse, reasonTimedOut,
			fmt.Sprintf("%s has made no progress for %s.", name, deadline)), p.Now)
		return 0
	}
	known = condition(status, appsv1.DeploymentProgressing)
	if known == nil || known.Reason == reasonTimedOut || known.Reason == reasonAvailable {
		return 0
	}
	return max(known.LastUpdateTime.Add(deadline).Sub(p.Now)+deadlineSlack, deadlineSlack)
}

// moved says whether something got better since the last status.
func moved(before, now *appsv1.DeploymentStatus) bool {
	return now.UpdatedReplicas > before.UpdatedReplicas ||
		now.Replicas-now.UpdatedReplicas < before.Replicas-before.UpdatedReplicas ||
		now.ReadyReplicas > before.ReadyReplicas || now.AvailableReplicas > before.AvailableReplicas
}

// failures shows why a set could not create its Pods: the newest one's reason first.
func (p *planner) failures(status *appsv1.DeploymentStatus) {
	slots := slices.Clone(p.old)
	if p.newest != nil {
		slots = slices.Insert(slots, 0, p.newest)
	}
	for _, s := range slots {
		for _, c := range s.Status.Conditions {
			if c.Type != appsv1.ReplicaSetReplicaFailure {
				continue
			}
			setCondition(status, appsv1.DeploymentCondition{
				Type: appsv1.DeploymentReplicaFailure, Status: c.Status, Reason: c.Reason, Message: c.Message,
			}, c.LastTransitionTime.Time)
			return
		}
	}
	dropCondition(status, appsv1.DeploymentReplicaFailure)
}

func condition(status *appsv1.DeploymentStatus, kind appsv1.DeploymentConditionType) *appsv1.DeploymentCondition {
	for i := range status.Conditions {
		if status.Conditions[i].Type == kind {
			found := status.Conditions[i]
			return &found
		}
	}
	return nil
}

func dropCondition(status *appsv1.DeploymentStatus, kind appsv1.DeploymentConditionType) {
	status.Conditions = slices.DeleteFunc(status.Conditions, func(c appsv1.DeploymentCondition) bool { return c.Type == kind })
}

// setCondition adds a condition, or changes it. One with the same status and reason is left as it is.
func setCondition(status *appsv1.DeploymentStatus, next appsv1.DeploymentCondition, now time.Time) {
	known := condition(status, next.Type)
	if known != nil && known.Status == next.Status && known.Reason == next.Reason {
		return
	}
	next.LastUpdateTime, next.LastTransitionTime = metav1.NewTime(now), metav1.NewTime(now)
	if known != nil && known.Status == next.Status {
		next.LastTransitionTime = known.LastTransitionTime
	}
	dropCondition(status, next.Type)
	status.Conditions = append(status.Conditions, next)
}
