package watch

import (
	"bytes"
	"fmt"
	"io"
	"reflect"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/json"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/client-go/kubernetes/scheme"
)

// services is a list of n Services, of which some are large.
func services(n int) *corev1.ServiceList {
	list := &corev1.ServiceList{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "ServiceList"},
		ListMeta: metav1.ListMeta{ResourceVersion: "42", Continue: "more"},
	}
	for i := range n {
		s := service(fmt.Sprint("s", i), "10.96.0.1")
		s.CreationTimestamp = metav1.Unix(1700000000, 0)
		s.Annotations = map[string]string{"size": strings.Repeat("x", i*i*10)}
		list.Items = append(list.Items, *s)
	}
	return list
}

// encodings are all ways in which API servers send a list.
func encodings(t testing.TB) map[string]runtime.Encoder {
	t.Helper()
	return map[string]runtime.Encoder{
		"protobuf":           protobuf.NewSerializer(scheme.Scheme, scheme.Scheme),
		"streaming protobuf": protobuf.NewSerializerWithOptions(scheme.Scheme, scheme.Scheme, protobuf.SerializerOptions{StreamingCollectionsEncoding: true}),
		"JSON":               json.NewSerializerWithOptions(json.DefaultMetaFactory, scheme.Scheme, scheme.Scheme, json.SerializerOptions{}),
	}
}

func encoded(t testing.TB, e runtime.Encoder, list runtime.Object) []byte {
	t.Helper()
	var out bytes.Buffer
	if err := e.Encode(list, &out); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// read returns what readItems hands over.
func read(r io.Reader) (metav1.ListMeta, []corev1.Service, error) {
	var out []corev1.Service
	about, err := readItems(r, func(s *corev1.Service) {
		one := *s
		one.TypeMeta = metav1.TypeMeta{} // some decoders set it
		out = append(out, one)
	})
	return about, out, err
}

func TestReadItems(t *testing.T) {
	for name, encoder := range encodings(t) {
		for _, n := range []int{0, 1, 100} {
			list := services(n)
			about, got, err := read(iotest.HalfReader(bytes.NewReader(encoded(t, encoder, list))))
			if err != nil || about.ResourceVersion != "42" || about.Continue != "more" {
				t.Errorf("%s, %d Services: %+v, %v", name, n, about, err)
			}
			if n > 0 && !reflect.DeepEqual(got, list.Items) || len(got) != n {
				t.Errorf("%s: %d Services came as %d others", name, n, len(got))
			}
		}
	}
}

// A list that was cut off is never taken for a shorter one.
func TestReadItemsCutOff(t *testing.T) {
	for name, encoder := range encodings(t) {
		data := encoded(t, encoder, services(5))
		whole := len(bytes.TrimRight(data, "\n"))
		if strings.HasSuffix(name, "protobuf") {
			whole -= 4 // the envelope ends with two empty fields, which nobody needs
		}
		for n := range whole {
			if _, _, err := read(bytes.NewReader(data[:n])); err == nil {
				t.Fatalf("%s: nothing is wrong with %d of %d bytes", name, n, len(data))
			}
		}
	}
}

func FuzzReadItems(f *testing.F) {
	for _, encoder := range encodings(f) {
		f.Add(encoded(f, encoder, services(3)))
	}
	f.Add([]byte("k8s\x00\x12\xff\xff\xff\xff\xff\xff\xff\xff\x7f\x12\xff\xff\xff\xff\xff\xff\xff\x7f"))
	f.Fuzz(func(t *testing.T, data []byte) {
		_, got, err := read(bytes.NewReader(data))
		if err != nil || !bytes.HasPrefix(data, []byte(protobufMagic)) {
			return
		}
		// What is read is what decoding it as a whole gives, if that can be done.
		var list corev1.ServiceList
		if _, _, err := protobuf.NewSerializer(scheme.Scheme, scheme.Scheme).Decode(data, nil, &list); err == nil && len(list.Items) != len(got) {
			t.Errorf("%d objects instead of %d", len(got), len(list.Items))
		}
	})
}

// Objects are handed over when they have come, not when the last one has.
func TestReadItemsAsTheyCome(t *testing.T) {
	for name, encoder := range encodings(t) {
		if name == "JSON" {
			continue
		}
		data := encoded(t, encoder, services(100))
		r, w := io.Pipe()
		first, done := make(chan struct{}, 100), make(chan error, 1)
		go func() {
			_, err := readItems(r, func(*corev1.Service) { first <- struct{}{} })
			done <- err
		}()
		go w.Write(data[:len(data)/2])
		select {
		case <-first:
		case <-time.After(10 * time.Second):
			t.Fatalf("%s: nothing of the half that has come is used", name)
		}
		w.CloseWithError(io.ErrUnexpectedEOF)
		if err := <-done; err == nil {
			t.Errorf("%s: nothing is wrong with a half", name)
		}
	}
}
