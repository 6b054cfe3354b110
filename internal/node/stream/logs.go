package stream

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Log is where a container's log is: a file in the format of the CRI, that is moved aside when it is full. Files that were are beside it,
// with the time in their names.
type Log struct {
	Path string
	// Ended says that nothing more will be written.
	Ended func() bool
}

// logOptions are what of a log is wanted, and how.
type logOptions struct {
	follow, previous, timestamps bool
	since                        time.Time
	tail, limit                  int64  // -1: all
	stream                       string // "": all
}

func parseLogOptions(q url.Values, now time.Time) (o logOptions, err error) {
	o.tail, o.limit = -1, -1
	flag := func(name string) bool {
		text := q.Get(name)
		if text == "" || err != nil {
			return false
		}
		value, e := strconv.ParseBool(text)
		if e != nil {
			err = fmt.Errorf("%s: %q must be true or false", name, text)
		}
		return value
	}
	number := func(name string, least int64) (int64, bool) {
		text := q.Get(name)
		if text == "" || err != nil {
			return 0, false
		}
		value, e := strconv.ParseInt(text, 10, 64)
		if e != nil || value < least {
			err = fmt.Errorf("%s: %q must be a number of at least %d", name, text, least)
		}
		return value, true
	}
	o.follow, o.previous, o.timestamps = flag("follow"), flag("previous"), flag("timestamps")
	if n, ok := number("tailLines", 0); ok {
		o.tail = n
	}
	if n, ok := number("limitBytes", 1); ok {
		o.limit = n
	}
	if n, ok := number("sinceSeconds", 1); ok {
		o.since = now.Add(-time.Duration(min(n, int64(1<<62/time.Second))) * time.Second)
	}
	if text := q.Get("sinceTime"); text != "" && err == nil {
		if !o.since.IsZero() {
			return o, errors.New("sinceTime and sinceSeconds: give one of them")
		}
		var e error
		if o.since, e = time.Parse(time.RFC3339, text); e != nil {
			err = fmt.Errorf("sinceTime: %q must be a time like 2026-01-02T15:04:05Z", text)
		}
	}
	switch text := q.Get("stream"); text {
	case "", "All":
	case "Stdout", "Stderr":
		o.stream = strings.ToLower(text)
	default:
		err = fmt.Errorf("stream: %q must be All, Stdout or Stderr", text)
	}
	return o, err
}

// logs serves a container's log.
func (s *Server) logs(w http.ResponseWriter, r *http.Request) {
	options, err := parseLogOptions(r.URL.Query(), time.Now())
	if err != nil {
		http.Error(w, err.Error(), http.StatusUnprocessableEntity)
		return
	}
	pod := s.find(w, r)
	if pod == nil {
		return
	}
	log, err := pod.Log(r.PathValue("container"), options.previous)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	w.Header().Set("Content-Type", "text/plain")
	flush := func() error { return http.NewResponseController(w).Flush() }
	if options.follow {
		_ = flush() // so that the client knows that it is connected, however long nothing is said
	}
	reader := &logReader{Log: log, options: options, out: w, flush: flush}
	defer reader.close()
	if err := reader.run(r.Context()); err != nil && r.Context().Err() == nil && !errors.Is(err, errLimit) {
		s.Log.Warn("a log could not be read", "path", log.Path, "err", err)
	}
}

// logReader writes a log to a client.
type logReader struct {
	Log
	options logOptions
	out     io.Writer
	flush   func() error

	file    *os.File
	lines   *bufio.Reader
	rest    []byte // of a line that is not complete yet
	written int64
	middle  map[string]bool // streams whose line goes on
}

func (l *logReader) close() {
	if l.file != nil {
		_ = l.file.Close()
	}
}

// pollInterval is how often a log that is followed is looked at.
const pollInterval = 100 * time.Millisecond

var errLimit = errors.New("as much as was asked for was written")

func (l *logReader) run(ctx context.Context) error {
	l.middle = map[string]bool{}
	if err := l.begin(); err != nil {
		return err
	}
	for {
		ended := l.Ended() // before the end of the file is looked for: what was written last is there
		if err := l.drain(ctx); err != nil {
			return err
		}
		moved, err := l.next()
		if err != nil {
			return err
		}
		if moved {
			continue
		}
		if !l.options.follow || ended {
			return nil
		}
		if err := l.flush(); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pollInterval):
		}
	}
}

// drain writes what the file has.
func (l *logReader) drain(ctx context.Context) error {
	if l.file == nil {
		return nil
	}
	for ctx.Err() == nil {
		line, err := l.lines.ReadSlice('\n')
		if errors.Is(err, bufio.ErrBufferFull) || errors.Is(err, io.EOF) {
			l.rest = append(l.rest, line...)
			if errors.Is(err, io.EOF) {
				return nil
			}
			continue
		}
		if err != nil {
			return err
		}
		if len(l.rest) > 0 {
			line = append(l.rest, line...)
		}
		err = l.write(line)
		l.rest = l.rest[:0]
		if err != nil {
			return err
		}
	}
	return ctx.Err()
}

// write hands on a line of the log.
func (l *logReader) write(line []byte) error {
	at, rest, ok1 := bytes.Cut(line, []byte(" "))
	stream, rest, ok2 := bytes.Cut(rest, []byte(" "))
	tag, text, ok3 := bytes.Cut(rest, []byte(" "))
	if !ok1 || !ok2 || !ok3 {
		return nil // not a line of a log
	}
	if l.options.stream != "" && l.options.stream != string(stream) {
		return nil
	}
	if !l.options.since.IsZero() {
		when, err := time.Parse(time.RFC3339Nano, string(at))
		if err != nil || when.Before(l.options.since) {
			return nil
		}
	}
	if l.options.timestamps && !l.middle[string(stream)] {
		if err := l.put(append(append([]byte(nil), at...), ' ')); err != nil {
			return err
		}
	}
	// The newline is the file's. It is the container's only if it says so.
	if l.middle[string(stream)] = bytes.HasPrefix(tag, []byte("P")); l.middle[string(stream)] {
		text = bytes.TrimSuffix(text, []byte("\n"))
	}
	return l.put(text)
}

func (l *logReader) put(data []byte) error {
	limit := l.options.limit
	if limit >= 0 {
		data = data[:min(int64(len(data)), limit-l.written)]
	}
	n, err := l.out.Write(data)
	l.written += int64(n)
	if err == nil && limit >= 0 && l.written >= limit {
		err = errLimit
	}
	return err
}

// files are the log's, the oldest first. The name with the latest time is the one that was moved aside last.
func (l *logReader) files() ([]string, error) {
	old, err := filepath.Glob(globEscape(l.Path) + ".*")
	if err != nil {
		return nil, err
	}
	slices.Sort(old)
	return append(old, l.Path), nil
}

func globEscape(path string) string {
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`).Replace(path)
}

func openLog(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW, 0)
}

func (l *logReader) use(f *os.File) {
	l.close()
	l.file, l.lines, l.rest = f, bufio.NewReaderSize(f, 64<<10), nil
}

// begin opens the log where reading begins: at the oldest file, or the wanted number of lines before the end. A file that goes away
// meanwhile was the oldest; one that is moved aside is found by next.
func (l *logReader) begin() error {
	paths, err := l.files()
	if err != nil {
		return err
	}
	var files []*os.File
	for _, path := range paths {
		f, err := openLog(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			closeFiles(files)
			return err
		}
		// One that was moved aside between being listed and being opened is there twice.
		if n := len(files); n > 0 && sameFile(files[n-1], f) {
			_ = f.Close()
			continue
		}
		files = append(files, f)
	}
	if len(files) == 0 {
		return nil // nothing was written
	}
	start, offset := 0, int64(0)
	if left := l.options.tail; left >= 0 {
		for start = len(files) - 1; ; start-- {
			var found int64
			if offset, found, err = lastLines(files[start], left); err != nil {
				closeFiles(files)
				return err
			}
			if left -= found; left <= 0 || start == 0 {
				break
			}
		}
	}
	chosen := files[start]
	closeFiles(append(files[:start:start], files[start+1:]...))
	if _, err := chosen.Seek(offset, io.SeekStart); err != nil {
		_ = chosen.Close()
		return err
	}
	l.use(chosen)
	return nil
}

func closeFiles(files []*os.File) {
	for _, f := range files {
		_ = f.Close()
	}
}

func sameFile(a, b *os.File) bool {
	x, err := a.Stat()
	if err != nil {
		return false
	}
	y, err := b.Stat()
	return err == nil && os.SameFile(x, y)
}

// lastLines finds where the last lines of a file begin, and how many there are of them, at most so many.
func lastLines(f *os.File, most int64) (offset, found int64, err error) {
	end, err := f.Seek(0, io.SeekEnd)
	if err != nil || most == 0 {
		return end, 0, err
	}
	buf := make([]byte, 64<<10)
	for at := end; at > 0; {
		n := min(at, int64(len(buf)))
		at -= n
		if _, err := f.ReadAt(buf[:n], at); err != nil {
			return 0, 0, err
		}
		for i := n - 1; i >= 0; i-- {
			if buf[i] != '\n' {
				continue
			}
			if at+i != end-1 { // what follows this newline is a line
				if found++; found == most {
					return at + i + 1, found, nil
				}
			}
		}
	}
	if end > 0 {
		found++ // the first line has no newline before it
	}
	return 0, found, nil
}

// next goes on with the file after the one that was read, if there is one: then nothing more is written to that.
func (l *logReader) next() (bool, error) {
	if l.file == nil {
		f, err := openLog(l.Path)
		if errors.Is(err, fs.ErrNotExist) {
			return false, nil
		}
		if err != nil {
			return false, err
		}
		l.use(f)
		return true, nil
	}
	current, err := os.Stat(l.Path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil // it is being replaced, or the container is gone
	}
	if err != nil {
		return false, err
	}
	mine, err := l.file.Stat()
	if err != nil || os.SameFile(current, mine) {
		return false, err
	}
	// What was written between the last look and the move comes first.
	if err := l.drain(context.Background()); err != nil {
		return false, err
	}
	paths, err := l.files()
	if err != nil {
		return false, err
	}
	after := 0
	for i, path := range paths {
		if st, err := os.Stat(path); err == nil && os.SameFile(st, mine) {
			after = i + 1
		}
	}
	for _, path := range paths[min(after, len(paths)-1):] {
		f, err := openLog(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return false, err
		}
		l.use(f)
		return true, nil
	}
	return false, nil
}
