package documents

import (
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// packed is compressed data.
type packed struct {
	data []byte
	// size is that of what was compressed.
	size int64
}

func pack(data []byte) (*packed, error) {
	var out bytes.Buffer
	w := gzip.NewWriter(&out)
	if _, err := w.Write(data); err != nil {
		return nil, err
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	// A buffer grows by doubling, and this stays.
	return &packed{bytes.Clone(out.Bytes()), int64(len(data))}, nil
}

func (p *packed) unpack() ([]byte, error) {
	out := make([]byte, p.size)
	_, err := io.ReadFull(&unpacking{packed: p}, out)
	return out, err
}

// serve answers with the data: compressed to clients that take that, and otherwise uncompressed on the way, so that many
// clients at once do not need memory for as many documents.
func (p *packed) serve(w http.ResponseWriter, r *http.Request, modified time.Time) {
	w.Header().Add("Vary", "Accept-Encoding")
	if takesGzip(r.Header) {
		w.Header().Set("Content-Encoding", "gzip")
		http.ServeContent(w, whole(r), "", modified, bytes.NewReader(p.data))
		return
	}
	if strings.Contains(r.Header.Get("Range"), ",") {
		r = whole(r) // each range would be looked for from the beginning
	}
	http.ServeContent(w, r, "", modified, &unpacking{packed: p})
}

// whole is a request for all of an answer.
func whole(r *http.Request) *http.Request {
	if r.Header.Get("Range") == "" {
		return r
	}
	out := *r
	out.Header = r.Header.Clone()
	out.Header.Del("Range")
	return &out
}

// takesGzip says whether a client accepts gzip.
func takesGzip(header http.Header) bool {
	for coding := range strings.SplitSeq(strings.Join(header.Values("Accept-Encoding"), ","), ",") {
		name, params, _ := strings.Cut(coding, ";")
		if !strings.EqualFold(strings.TrimSpace(name), "gzip") {
			continue
		}
		weight, ok := strings.CutPrefix(strings.ReplaceAll(strings.ToLower(params), " ", ""), "q=")
		if !ok {
			return true
		}
		q, err := strconv.ParseFloat(weight, 64)
		return err == nil && q > 0
	}
	return false
}

// unpacking reads what was packed.
type unpacking struct {
	*packed
	// at is where the next Read begins, from is what reads there, if anything does.
	at   int64
	from io.Reader
}

var _ io.ReadSeeker = &unpacking{}

// Seek sets where the next Read begins.
func (u *unpacking) Seek(offset int64, whence int) (int64, error) {
	switch whence {
	case io.SeekCurrent:
		offset += u.at
	case io.SeekEnd:
		offset += u.size
	}
	if offset < 0 {
		return 0, errors.New("seek before the beginning")
	}
	if offset != u.at {
		u.at, u.from = offset, nil
	}
	return offset, nil
}

// Read reads on.
func (u *unpacking) Read(to []byte) (int, error) {
	if u.at >= u.size {
		return 0, io.EOF
	}
	if u.from == nil {
		from, err := gzip.NewReader(bytes.NewReader(u.data))
		if err != nil {
			return 0, err
		}
		if _, err := io.CopyN(io.Discard, from, u.at); err != nil {
			return 0, err
		}
		u.from = from
	}
	n, err := u.from.Read(to)
	u.at += int64(n)
	return n, err
}
