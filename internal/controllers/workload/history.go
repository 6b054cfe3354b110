package workload

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"reflect"
	"slices"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	utiljson "k8s.io/apimachinery/pkg/util/json"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"portal/internal/controllers/queue"
	"portal/internal/controllers/writes"
)

// HashLabel is on every ControllerRevision, and makes part of its name.
const HashLabel = "controller.kubernetes.io/hash"

// History keeps the ControllerRevisions of a workload: the templates that it has had.
type History struct {
	Client    kubernetes.Interface
	Revisions cache.SharedIndexInformer // indexed by controller
	Kind      schema.GroupVersionKind

	Owner    metav1.Object
	Selector labels.Selector
	Template *corev1.PodTemplateSpec
	Live     func(ctx context.Context) (metav1.Object, error)
	// Mark, if not "", is another label that has the hash.
	Mark string
	// Writes tracks what was written, for the key of the workload.
	Writes *writes.Tracker
}

func (h *History) wrote(r *appsv1.ControllerRevision) { h.Writes.Wrote(queue.KeyOf(h.Owner), r) }

// List are the revisions of the workload, the oldest first.
func (h *History) List(ctx context.Context) ([]*appsv1.ControllerRevision, error) {
	candidates, err := Candidates[*appsv1.ControllerRevision](h.Revisions.GetIndexer(), h.Owner)
	if err != nil {
		return nil, err
	}
	mine, err := Sort(ctx, &Claim{
		Owner: h.Owner, Kind: h.Kind, Selector: h.Selector, Live: h.Live,
		Patch: func(ctx context.Context, name string, patch []byte) error {
			written, err := h.Client.AppsV1().ControllerRevisions(h.Owner.GetNamespace()).Patch(ctx, name, types.StrategicMergePatchType, patch, metav1.PatchOptions{})
			if err == nil {
				h.wrote(written)
			}
			return err
		},
		// After the last number there is no next one.
		Fit: func(obj metav1.Object) bool { return obj.(*appsv1.ControllerRevision).Revision < math.MaxInt64/2 },
	}, candidates)
	slices.SortFunc(mine, func(a, b *appsv1.ControllerRevision) int {
		return cmp.Or(cmp.Compare(a.Revision, b.Revision), a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
	})
	return mine, err
}

// Current finds or makes the revision of the workload's template, and makes it the last one. collisions counts names that
// were taken by something else; the new count is given back.
func (h *History) Current(ctx context.Context, revisions []*appsv1.ControllerRevision, collisions *int32) (*appsv1.ControllerRevision, *int32, error) {
	data, err := RevisionData(h.Template)
	if err != nil {
		return nil, collisions, err
	}
	client := h.Client.AppsV1().ControllerRevisions(h.Owner.GetNamespace())
	next := int64(1)
	if len(revisions) > 0 {
		next = revisions[len(revisions)-1].Revision + 1
	}
	for i := len(revisions) - 1; i >= 0; i-- {
		known := revisions[i]
		switch {
		case !SameData(known.Data.Raw, data):
			continue
		case i == len(revisions)-1:
			return known, collisions, nil
		}
		known = known.DeepCopy() // it was gone back to
		known.Revision = next
		written, err := client.Update(ctx, known, metav1.UpdateOptions{})
		if err == nil {
			h.wrote(written)
		}
		return written, collisions, err
	}
	for {
		revision, err := h.make(data, next, collisions)
		if err != nil {
			return nil, collisions, err
		}
		written, err := client.Create(ctx, revision, metav1.CreateOptions{})
		if err == nil {
			h.wrote(written)
		}
		if !apierrors.IsAlreadyExists(err) {
			return written, collisions, err
		}
		taken, err := client.Get(ctx, revision.Name, metav1.GetOptions{})
		if err != nil {
			return nil, collisions, err
		}
		if ControllerUID(taken) == h.Owner.GetUID() && SameData(taken.Data.Raw, data) {
			h.wrote(taken)
			return taken, collisions, nil // the informer is behind
		}
		count := int32(1)
		if collisions != nil {
			count = *collisions + 1
		}
		collisions = &count
	}
}

func (h *History) make(data []byte, number int64, collisions *int32) (*appsv1.ControllerRevision, error) {
	hash, err := Hash(json.RawMessage(data), collisions)
	if err != nil {
		return nil, err
	}
	const longest = 223 // so that the hash fits behind it
	name := h.Owner.GetName()
	marks := maps.Clone(h.Template.Labels)
	if marks == nil {
		marks = map[string]string{}
	}
	marks[HashLabel] = hash
	if h.Mark != "" {
		marks[h.Mark] = hash
	}
	return &appsv1.ControllerRevision{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: h.Owner.GetNamespace(), Name: fmt.Sprintf("%s-%s", name[:min(len(name), longest)], hash), Labels: marks,
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(h.Owner, h.Kind)},
		},
		Data: runtime.RawExtension{Raw: data}, Revision: number,
	}, nil
}

// Trim deletes the oldest revisions that nothing uses, but for as many as the limit says. One below 0 keeps all.
func (h *History) Trim(ctx context.Context, revisions []*appsv1.ControllerRevision, limit *int32, used map[string]bool) error {
	if limit == nil || *limit < 0 {
		return nil
	}
	unused := slices.DeleteFunc(slices.Clone(revisions), func(r *appsv1.ControllerRevision) bool { return used[r.Name] })
	for _, r := range unused[:max(len(unused)-int(*limit), 0)] {
		err := h.Client.AppsV1().ControllerRevisions(r.Namespace).Delete(ctx, r.Name, metav1.DeleteOptions{})
		if err != nil && !apierrors.IsNotFound(err) {
			return err
		}
		h.Writes.Deleted(queue.KeyOf(h.Owner), r)
	}
	return nil
}

// RevisionData is what a revision holds: a patch that brings its template back. kubectl applies it.
func RevisionData(template *corev1.PodTemplateSpec) ([]byte, error) {
	data, err := json.Marshal(template)
	if err != nil {
		return nil, err
	}
	var fields map[string]any
	if err := utiljson.Unmarshal(data, &fields); err != nil { // it keeps whole numbers whole
		return nil, err
	}
	fields["$patch"] = "replace"
	return json.Marshal(map[string]any{"spec": map[string]any{"template": fields}})
}

// SameData says whether two revisions hold the same.
func SameData(a, b []byte) bool {
	if bytes.Equal(a, b) {
		return true
	}
	var x, y any
	if utiljson.Unmarshal(a, &x) != nil || utiljson.Unmarshal(b, &y) != nil {
		return false
	}
	if reflect.DeepEqual(x, y) {
		return true
	}
	// An older server wrote some things in another way: fields that are empty, for example.
	one, err := templateIn(a)
	other, err2 := templateIn(b)
	return err == nil && err2 == nil && equality.Semantic.DeepEqual(one, other)
}

// TemplateOf is the template that a revision holds.
func TemplateOf(revision *appsv1.ControllerRevision) (*corev1.PodTemplateSpec, error) {
	template, err := templateIn(revision.Data.Raw)
	if err != nil {
		return nil, fmt.Errorf("revision %s: %w", revision.Name, err)
	}
	return template, nil
}

func templateIn(data []byte) (*corev1.PodTemplateSpec, error) {
	var held struct {
		Spec struct {
			Template corev1.PodTemplateSpec `json:"template"`
		} `json:"spec"`
	}
	err := json.Unmarshal(data, &held)
	return &held.Spec.Template, err
}
