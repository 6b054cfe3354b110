package connect

import (
	"fmt"
	"net/url"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/conversion"
	"k8s.io/apimachinery/pkg/runtime"
)

// AddConversions teaches the scheme to read options from a request's query.
func AddConversions(scheme *runtime.Scheme) error {
	for _, add := range []func() error{
		func() error {
			return register(scheme, func(q *query, o *corev1.PodLogOptions) {
				q.text("container", &o.Container)
				q.flag("follow", &o.Follow)
				q.flag("previous", &o.Previous)
				q.flag("timestamps", &o.Timestamps)
				q.flag("insecureSkipTLSVerifyBackend", &o.InsecureSkipTLSVerifyBackend)
				q.number("sinceSeconds", &o.SinceSeconds)
				q.number("tailLines", &o.TailLines)
				q.number("limitBytes", &o.LimitBytes)
				q.read("sinceTime", func(v *[]string) error { return metav1.Convert_Slice_string_To_Pointer_v1_Time(v, &o.SinceTime, nil) })
				if values := q.values["stream"]; len(values) > 0 {
					o.Stream = &values[0]
				}
			})
		},
		func() error {
			return register(scheme, func(q *query, o *corev1.PodExecOptions) {
				q.text("container", &o.Container)
				q.streams(&o.Stdin, &o.Stdout, &o.Stderr, &o.TTY)
				o.Command = q.values["command"]
			})
		},
		func() error {
			return register(scheme, func(q *query, o *corev1.PodAttachOptions) {
				q.text("container", &o.Container)
				q.streams(&o.Stdin, &o.Stdout, &o.Stderr, &o.TTY)
			})
		},
		func() error {
			return register(scheme, func(q *query, o *corev1.PodPortForwardOptions) {
				q.read("ports", func(v *[]string) error { return metav1.Convert_Slice_string_To_Slice_int32(v, &o.Ports, nil) })
			})
		},
		func() error {
			return register(scheme, func(q *query, o *corev1.PodProxyOptions) { q.text("path", &o.Path) })
		},
		func() error {
			return register(scheme, func(q *query, o *corev1.ServiceProxyOptions) { q.text("path", &o.Path) })
		},
		func() error {
			return register(scheme, func(q *query, o *corev1.NodeProxyOptions) { q.text("path", &o.Path) })
		},
	} {
		if err := add(); err != nil {
			return err
		}
	}
	return nil
}

func register[T any](scheme *runtime.Scheme, read func(*query, *T)) error {
	return scheme.AddConversionFunc((*url.Values)(nil), (*T)(nil), func(from, to any, _ conversion.Scope) error {
		q := &query{values: *from.(*url.Values)}
		read(q, to.(*T))
		return q.err
	})
}

// query reads parameters, and remembers the first that it can't.
type query struct {
	values url.Values
	err    error
}

func (q *query) read(name string, into func(*[]string) error) {
	values, ok := q.values[name]
	if !ok || len(values) == 0 || q.err != nil {
		return
	}
	if err := into(&values); err != nil {
		q.err = fmt.Errorf("%s: %w", name, err)
	}
}

func (q *query) text(name string, into *string) {
	q.read(name, func(v *[]string) error { *into = (*v)[0]; return nil })
}

func (q *query) flag(name string, into *bool) {
	q.read(name, func(v *[]string) error { return runtime.Convert_Slice_string_To_bool(v, into, nil) })
}

func (q *query) number(name string, into **int64) {
	q.read(name, func(v *[]string) error { return runtime.Convert_Slice_string_To_Pointer_int64(v, into, nil) })
}

func (q *query) streams(stdin, stdout, stderr, tty *bool) {
	q.flag("stdin", stdin)
	q.flag("stdout", stdout)
	q.flag("stderr", stderr)
	q.flag("tty", tty)
}
