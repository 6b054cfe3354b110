package shim

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
)

// logFile is a container's log in the format of the CRI: time, stream, whether the line is whole, text. It is replaced when it is full.
type logFile struct {
	Log
	mu   sync.Mutex
	file *os.File
	size int64
	buf  []byte
}

func openLog(l Log) (*logFile, error) {
	out := &logFile{Log: l}
	if err := os.MkdirAll(filepath.Dir(l.Path), 0o755); err != nil {
		return nil, err
	}
	return out, out.reopen()
}

func (l *logFile) reopen() error {
	f, err := os.OpenFile(l.Path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o640)
	if err != nil {
		return err
	}
	if st, err := f.Stat(); err == nil {
		l.size = st.Size()
	}
	l.file = f
	return nil
}

func (l *logFile) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.file != nil {
		_ = l.file.Close()
		l.file = nil
	}
}

// longest is the most of a line that is written at once.
const longest = 16 << 10

// copy writes a stream to the log, and to whoever is attached, until its end. Nothing stops it: a container whose log can't be written
// runs on.
func (l *logFile) copy(from *os.File, stream string, attached *tee) {
	defer from.Close()
	defer attached.end()
	buf := make([]byte, longest)
	n := 0
	for {
		read, err := from.Read(buf[n:])
		attached.write(buf[n : n+read])
		n += read
		rest := buf[:n]
		for {
			i := bytes.IndexByte(rest, '\n')
			if i < 0 {
				break
			}
			l.write(stream, rest[:i], true)
			rest = rest[i+1:]
		}
		if len(rest) == len(buf) || err != nil && len(rest) > 0 {
			l.write(stream, rest, false)
			rest = nil
		}
		n = copy(buf, rest)
		if err != nil {
			// EIO is how a terminal says that nobody has it open any more.
			return
		}
	}
}

func (l *logFile) write(stream string, line []byte, whole bool) {
	tag := "F"
	if !whole {
		tag = "P"
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.buf = time.Now().UTC().AppendFormat(l.buf[:0], time.RFC3339Nano)
	l.buf = fmt.Appendf(l.buf, " %s %s ", stream, tag)
	l.buf = append(append(l.buf, line...), '\n')
	if l.file == nil {
		return
	}
	if l.MaxSize > 0 && l.size+int64(len(l.buf)) > l.MaxSize {
		l.rotate()
	}
	written, _ := l.file.Write(l.buf)
	l.size += int64(written)
}

// rotate moves the full file aside and removes the oldest.
func (l *logFile) rotate() {
	_ = os.Rename(l.Path, l.Path+"."+time.Now().UTC().Format("20060102-150405.000000000"))
	old, _ := filepath.Glob(l.Path + ".*")
	slices.SortFunc(old, strings.Compare)
	for len(old) > 0 && len(old) >= max(l.MaxFiles, 1) {
		_ = os.Remove(old[0])
		old = old[1:]
	}
	file := l.file
	if err := l.reopen(); err != nil {
		return // the old one goes on
	}
	_ = file.Close()
}

// outputs makes pipes for n streams: the ends to read, and those to hand to a process.
func outputs(n int) (read, write []*os.File, err error) {
	for range n {
		r, w, err := os.Pipe()
		if err != nil {
			closeAll(append(read, write...))
			return nil, nil, err
		}
		read, write = append(read, r), append(write, w)
	}
	return read, write, nil
}

func closeAll(files []*os.File) {
	for _, f := range files {
		_ = f.Close()
	}
}
