package registry

import (
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
)

// eachItem calls fn with every item of a list, in place.
func eachItem[T any, P Object[T]](list runtime.Object, fn func(P)) {
	_ = meta.EachListItem(list, func(obj runtime.Object) error {
		fn(obj.(P))
		return nil
	})
}
