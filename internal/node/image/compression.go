package image

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"errors"
	"io"

	"github.com/klauspost/compress/zstd"
)

// maxWindow bounds the memory that reading zstd takes.
const maxWindow = 128 << 20

// decompress reads gzip, zstd, or what is not compressed: by how it begins, whatever it is said to be.
func decompress(r io.Reader) (io.ReadCloser, error) {
	buffered := bufio.NewReaderSize(r, 64<<10)
	begin, err := buffered.Peek(4)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	switch {
	case bytes.HasPrefix(begin, []byte{0x1f, 0x8b}):
		return gzip.NewReader(buffered)
	case bytes.HasPrefix(begin, []byte{0x28, 0xb5, 0x2f, 0xfd}), len(begin) == 4 && begin[0]&0xf0 == 0x50 && bytes.Equal(begin[1:], []byte{0x2a, 0x4d, 0x18}):
		d, err := zstd.NewReader(buffered, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(maxWindow))
		if err != nil {
			return nil, err
		}
		return d.IOReadCloser(), nil
	}
	return io.NopCloser(buffered), nil
}

// bounded fails, rather than ends, when more is read than allowed: a small archive may become an enormous one.
type bounded struct {
	r    io.Reader
	left int64
}

func (b *bounded) Read(p []byte) (int, error) {
	if b.left <= 0 {
		// The end may be exactly here.
		if n, err := b.r.Read(make([]byte, 1)); n == 0 {
			return 0, err
		}
		return 0, &TooLargeError{"--image-max-size allows"}
	}
	n, err := b.r.Read(p[:min(int64(len(p)), b.left)])
	b.left -= int64(n)
	return n, err
}
