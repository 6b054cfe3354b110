package watch

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"google.golang.org/protobuf/encoding/protowire"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/scheme"
)

// protobufMagic is what the API's protobuf begins with; anything else is JSON.
const protobufMagic = "k8s\x00"

// The fields that matter of the messages that the API's protobuf consists of.
const (
	envelopeContent = 2 // of the envelope around everything
	listMetadata    = 1 // of every list
	listItem        = 2
)

// maxObject is far more than an API server stores of one object.
const maxObject = 64 << 20

// readItems reads a list while it arrives and hands over one object after the other: decoded as a whole it would be many times of what
// stays of it, and waited for twice, by the one who sends and the one who decodes. On an error some objects may have been handed over.
func readItems[T any, P object[T]](body io.Reader, do func(P)) (metav1.ListMeta, error) {
	r := bufio.NewReaderSize(body, 64<<10)
	if begin, _ := r.Peek(len(protobufMagic)); string(begin) != protobufMagic {
		return readJSONItems(r, do)
	}
	_, _ = r.Discard(len(protobufMagic))
	envelope := message{r: r, left: -1}
	for {
		field, size, err := envelope.next()
		switch {
		case err == io.EOF:
			return metav1.ListMeta{}, errors.New("it has no content")
		case err != nil:
			return metav1.ListMeta{}, err
		case field == envelopeContent:
			return readListItems(&message{r: r, left: int64(size)}, do)
		}
		if _, err := envelope.take(size); err != nil {
			return metav1.ListMeta{}, err
		}
	}
}

func readListItems[T any, P object[T]](list *message, do func(P)) (about metav1.ListMeta, err error) {
	for {
		field, size, err := list.next()
		if err == io.EOF {
			return about, nil
		}
		if err != nil {
			return about, err
		}
		data, err := list.take(size)
		if err != nil {
			return about, err
		}
		switch field {
		case listMetadata:
			err = about.Unmarshal(data)
		case listItem:
			obj := P(new(T))
			if err = obj.Unmarshal(data); err == nil {
				do(obj)
			}
		}
		if err != nil {
			return about, err
		}
	}
}

// message is a protobuf message that is read field by field. The messages here have no fields but such as begin with their size.
type message struct {
	r    *bufio.Reader
	left int64 // what of it has not been read; negative: it ends with the reader
	buf  []byte
}

// next returns a field's number and size, io.EOF after the last one.
func (m *message) next() (protowire.Number, uint64, error) {
	if m.left == 0 {
		return 0, 0, io.EOF
	}
	tag, err := binary.ReadUvarint(m)
	if err != nil {
		if m.left > 0 && err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return 0, 0, err
	}
	field, kind := protowire.DecodeTag(tag)
	if kind != protowire.BytesType || field < protowire.MinValidNumber {
		return 0, 0, fmt.Errorf("field %d of type %d is not what a list consists of", field, kind)
	}
	size, err := binary.ReadUvarint(m)
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	if err == nil && m.left >= 0 && size > uint64(m.left) {
		err = io.ErrUnexpectedEOF
	}
	return field, size, err
}

// ReadByte implements io.ByteReader.
func (m *message) ReadByte() (byte, error) {
	if m.left == 0 {
		return 0, io.ErrUnexpectedEOF
	}
	b, err := m.r.ReadByte()
	if err == nil && m.left > 0 {
		m.left--
	}
	return b, err
}

// take reads the next bytes. They are good until it is called again.
func (m *message) take(size uint64) ([]byte, error) {
	if size > maxObject {
		return nil, fmt.Errorf("an object of %d bytes is larger than any can be", size)
	}
	if int(size) > cap(m.buf) {
		m.buf = make([]byte, size, size+size/4)
	}
	m.buf = m.buf[:size]
	_, err := io.ReadFull(m.r, m.buf)
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	if m.left >= 0 {
		m.left -= int64(size)
	}
	return m.buf, err
}

func readJSONItems[T any, P object[T]](r io.Reader, do func(P)) (metav1.ListMeta, error) {
	data, err := io.ReadAll(r)
	if err != nil {
		return metav1.ListMeta{}, err
	}
	list, err := runtime.Decode(scheme.Codecs.UniversalDeserializer(), data)
	if err != nil {
		return metav1.ListMeta{}, err
	}
	about, err := meta.ListAccessor(list)
	if err != nil {
		return metav1.ListMeta{}, err
	}
	err = meta.EachListItem(list, func(obj runtime.Object) error {
		p, ok := obj.(P)
		if !ok {
			return fmt.Errorf("it has a %T, which was not asked for", obj)
		}
		do(p)
		return nil
	})
	return metav1.ListMeta{ResourceVersion: about.GetResourceVersion(), Continue: about.GetContinue()}, err
}
