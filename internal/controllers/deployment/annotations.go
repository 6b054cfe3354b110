package deployment

import (
	"math"
	"strconv"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
)

// What is written on ReplicaSets, and read by kubectl.
const (
	// RevisionAnnotation counts the templates of a Deployment.
	RevisionAnnotation = "deployment.kubernetes.io/revision"
	// historyAnnotation are the revisions that a set was before, when it was rolled back to.
	historyAnnotation = "deployment.kubernetes.io/revision-history"
	// desiredAnnotation and maxAnnotation are the Deployment's size when the set was last scaled, without and with surge.
	desiredAnnotation = "deployment.kubernetes.io/desired-replicas"
	maxAnnotation     = "deployment.kubernetes.io/max-replicas"

	maxHistory = 2000 // characters
)

// private are the annotations of a Deployment that its sets don't get.
var private = map[string]bool{
	corev1.LastAppliedConfigAnnotation: true, RevisionAnnotation: true, historyAnnotation: true, desiredAnnotation: true,
	maxAnnotation: true, appsv1.DeprecatedRollbackTo: true,
}

func number(set *appsv1.ReplicaSet, key string) (int32, bool) {
	n, err := strconv.ParseInt(set.Annotations[key], 10, 32)
	return int32(n), err == nil && n >= 0
}

func setNumber(set *appsv1.ReplicaSet, key string, n int32) {
	if set.Annotations == nil {
		set.Annotations = map[string]string{}
	}
	set.Annotations[key] = strconv.Itoa(int(n))
}

// revision of a set; 0 if it has none, or one after which no next one fits.
func revision(set *appsv1.ReplicaSet) int64 {
	n, err := strconv.ParseInt(set.Annotations[RevisionAnnotation], 10, 64)
	if err != nil || n < 0 || n > math.MaxInt64/2 {
		return 0
	}
	return n
}

// annotated is the newest set with its size, the Deployment's annotations and a revision that is higher than all others.
func (p *planner) annotated() *appsv1.ReplicaSet {
	next := p.sized(p.newest)
	next.Spec.MinReadySeconds = p.Deployment.Spec.MinReadySeconds
	if next.Annotations == nil {
		next.Annotations = map[string]string{}
	}
	for key, value := range p.Deployment.Annotations {
		if !private[key] {
			next.Annotations[key] = value
		}
	}
	var highest int64
	for _, s := range p.old {
		highest = max(highest, revision(s.ReplicaSet))
	}
	before, known := next.Annotations[RevisionAnnotation]
	if revision(next) > highest {
		return next
	}
	next.Annotations[RevisionAnnotation] = strconv.FormatInt(highest+1, 10)
	if known {
		next.Annotations[historyAnnotation] = remember(next.Annotations[historyAnnotation], before)
	}
	return next
}

// remember adds a revision to a history, and forgets the oldest ones when it gets too long.
func remember(history, revision string) string {
	if history == "" {
		return revision
	}
	history += "," + revision
	for len(history) > maxHistory {
		_, rest, more := strings.Cut(history, ",")
		if !more {
			return revision
		}
		history = rest
	}
	return history
}
