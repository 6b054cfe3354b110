package findings

import (
	"context"
	"encoding/json"
	"fmt"
	"hash/fnv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"portal/internal/explain"
)

// component is who Events are from.
const component = "portal-findings"

// maxMessage is what the API takes.
const maxMessage = 1024

// references are the objects that Events can be about.
func references(e *explain.Evidence) map[explain.Ref]corev1.ObjectReference {
	out := map[explain.Ref]corev1.ObjectReference{}
	add := func(kind, version string, o metav1.Object, uid types.UID) {
		out[explain.Ref{Kind: kind, Namespace: o.GetNamespace(), Name: o.GetName()}] = corev1.ObjectReference{
			Kind: kind, APIVersion: version, Namespace: o.GetNamespace(), Name: o.GetName(), UID: uid,
		}
	}
	for i := range e.Services {
		add("Service", "v1", &e.Services[i], e.Services[i].UID)
	}
	for i := range e.Ingresses {
		add("Ingress", "networking.k8s.io/v1", &e.Ingresses[i], e.Ingresses[i].UID)
	}
	for i := range e.Nodes {
		add("Node", "v1", &e.Nodes[i], types.UID(e.Nodes[i].Name)) // as all Events about Nodes have it
	}
	return out
}

// event is what people read. Its name is the same whichever process writes it: one that follows another as the leader writes nothing twice.
func event(f *Found, now metav1.Time) *corev1.Event {
	namespace := f.About.Namespace
	if namespace == "" {
		namespace = metav1.NamespaceDefault
	}
	hash := fnv.New64a()
	fmt.Fprint(hash, f.About.Kind, "/", f.About.UID, "/", f.Code, "/", f.Node)
	return &corev1.Event{
		ObjectMeta:     metav1.ObjectMeta{Name: fmt.Sprintf("%s.%016x", f.About.Name, hash.Sum64()), Namespace: namespace},
		InvolvedObject: f.About, Type: corev1.EventTypeWarning, Reason: reason(f.Code), Message: message(f),
		Source: corev1.EventSource{Component: component}, ReportingController: component, FirstTimestamp: now, LastTimestamp: now, Count: 1,
	}
}

// reason is a finding's code, as reasons are written.
func reason(code string) string {
	var out strings.Builder
	for word := range strings.SplitSeq(code, "-") {
		if word != "" {
			out.WriteString(strings.ToUpper(word[:1]) + word[1:])
		}
	}
	return out.String()
}

func message(f *Found) string {
	hint := "; see: portal explain"
	switch f.Object.Kind {
	case "Service", "Ingress":
		hint = fmt.Sprintf("; see: portal explain %s %s -n %s", strings.ToLower(f.Object.Kind), f.Object.Name, f.Object.Namespace)
	}
	verdict := f.Verdict
	if len(verdict)+len(hint) > maxMessage {
		verdict = strings.ToValidUTF8(verdict[:maxMessage-len(hint)-3], "") + "…"
	}
	return verdict + hint
}

// write creates the Event, or renews one that is there.
func (c *Controller) write(ctx context.Context, f Found) error {
	e := event(&f, metav1.NewTime(c.Clock.Now()))
	events := c.Client.CoreV1().Events(e.Namespace)
	_, err := events.Create(ctx, e, metav1.CreateOptions{})
	switch {
	case apierrors.IsAlreadyExists(err):
		patch, err := json.Marshal(map[string]any{"message": e.Message, "lastTimestamp": e.LastTimestamp})
		if err != nil {
			return err
		}
		_, err = events.Patch(ctx, e.Name, types.MergePatchType, patch, metav1.PatchOptions{})
		return err
	case apierrors.IsNotFound(err) || apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause):
		return nil // its namespace is going
	}
	return err
}
