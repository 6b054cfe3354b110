package shim

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"
	"time"
)

const (
	// maxBehind is how much output waits for one who is attached. Whoever is further behind is cut off: the log has everything. Only for
	// those who give a container its input does it wait: it is theirs, and `kubectl run -i … > file` must lose nothing.
	maxBehind = 1 << 20
	// patience is how long a container waits for its input's owner altogether, and slowest what they read in a second to be waited for longer.
	patience = 5 * time.Second
	slowest  = 64 << 10
	// maxReaders is how many can be attached to a container at once.
	maxReaders = 64
)

// tee hands a stream's output to those who are attached.
type tee struct {
	mu       sync.Mutex
	readers  map[*reader]bool
	finished bool
}

func newTee() *tee { return &tee{readers: map[*reader]bool{}} }

// attach returns what can be read of the output from now on. Late is called if it is not read fast enough, and stops it.
func (t *tee) attach(owner bool, late func()) (*os.File, *reader, error) {
	read, write, err := os.Pipe()
	if err != nil {
		return nil, nil, err
	}
	r := &reader{file: write, owner: owner, late: late, work: make(chan struct{}, 1), room: make(chan struct{}, 1)}
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case len(t.readers) >= maxReaders:
		closeAll([]*os.File{read, write})
		return nil, nil, fmt.Errorf("%d clients are attached already", maxReaders)
	case t.finished:
		r.ended = true
	default:
		t.readers[r] = true
	}
	go r.run()
	return read, r, nil
}

// detach has a reader get what is left, and no more.
func (t *tee) detach(r *reader) {
	t.mu.Lock()
	delete(t.readers, r)
	t.mu.Unlock()
	r.end()
}

// write hands on a piece of output.
func (t *tee) write(data []byte) {
	if len(data) == 0 {
		return
	}
	t.mu.Lock()
	list := slices.Collect(maps.Keys(t.readers))
	t.mu.Unlock()
	for _, r := range list { // without the lock, which the shim's other business needs
		if !r.offer(data) {
			t.mu.Lock()
			delete(t.readers, r)
			t.mu.Unlock()
		}
	}
}

// end says that there will be no more output.
func (t *tee) end() {
	t.mu.Lock()
	t.finished = true
	list := slices.Collect(maps.Keys(t.readers))
	clear(t.readers)
	t.mu.Unlock()
	for _, r := range list {
		r.end()
	}
}

// reader is one who is attached to a stream.
type reader struct {
	file  *os.File
	owner bool // of the container's input
	late  func()

	mu        sync.Mutex
	pending   []byte
	delivered int64
	ended     bool // there is nothing to come after what is pending
	gone      bool // it doesn't read any more
	// work says that there is something to write or that it has ended, and room that something was written.
	work, room chan struct{}
	waited     time.Duration // only write uses it
}

func notify(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// run writes what is pending.
func (r *reader) run() {
	defer r.file.Close()
	var buf []byte
	for {
		r.mu.Lock()
		buf = append(buf[:0], r.pending[:min(len(r.pending), longest)]...)
		ended := r.ended
		r.mu.Unlock()
		if len(buf) == 0 {
			if ended {
				return
			}
			<-r.work
			continue
		}
		_, err := r.file.Write(buf)
		r.mu.Lock()
		if r.gone = r.gone || err != nil; r.gone {
			r.pending = nil
			r.mu.Unlock()
			notify(r.room)
			return
		}
		r.delivered += int64(len(buf))
		if r.pending = r.pending[len(buf):]; len(r.pending) == 0 {
			r.pending = nil
		}
		r.mu.Unlock()
		notify(r.room)
	}
}

// offer has a reader get a piece of output, or says false: it is too far behind, or has gone.
func (r *reader) offer(data []byte) bool {
	for {
		r.mu.Lock()
		if r.gone || r.ended {
			r.mu.Unlock()
			return false
		}
		if len(r.pending)+len(data) <= maxBehind {
			r.pending = append(r.pending, data...)
			r.mu.Unlock()
			notify(r.work)
			return true
		}
		left := patience + time.Duration(r.delivered)*time.Second/slowest - r.waited
		r.mu.Unlock()
		if !r.owner || left <= 0 {
			r.late()
			return false
		}
		begin := time.Now()
		timer := time.NewTimer(left)
		select {
		case <-r.room:
		case <-timer.C:
		}
		timer.Stop()
		r.waited += time.Since(begin)
	}
}

// stop ends a reader at once.
func (r *reader) stop() {
	r.mu.Lock()
	r.gone, r.ended, r.pending = true, true, nil
	r.mu.Unlock()
	notify(r.work)
	notify(r.room)
	_ = r.file.Close()
}

// end has a reader get what is left.
func (r *reader) end() {
	r.mu.Lock()
	r.ended = true
	r.mu.Unlock()
	notify(r.work)
	notify(r.room)
}

// tooSlow is the error of a client that was cut off.
const tooSlow = "the container's output was not read fast enough, and the connection to it was ended: the log has all of it"

// serveAttach connects to a container's streams until the connection is closed.
func (s *shim) serveAttach(c *conn, r *Request) error {
	s.mu.Lock()
	k := s.containers[r.ID]
	if k == nil || k.status.PID == 0 {
		s.mu.Unlock()
		return fmt.Errorf("container %s does not run", r.ID)
	}
	a := Answer{TTY: k.config.Process.TTY}
	var files []*os.File
	if r.Stdin && k.stdin != nil {
		a.Stdin, files = true, append(files, k.stdin)
	}
	tees := []*tee{k.output}
	if !a.TTY {
		tees = append(tees, k.errors)
	}
	var readers []*reader
	late := func() {
		s.mu.Lock()
		list := readers
		s.mu.Unlock()
		c.answer(Answer{Error: tooSlow}) // before the end can be seen
		for _, r := range list {
			r.stop()
		}
	}
	var err error
	for _, t := range tees {
		var file *os.File
		var reads *reader
		if file, reads, err = t.attach(a.Stdin, late); err != nil {
			break
		}
		defer file.Close()
		defer t.detach(reads)
		readers = append(readers, reads)
		files = append(files, file)
	}
	if err == nil {
		c.answer(a, files...) // under the lock: the standard input is not closed meanwhile
	}
	s.mu.Unlock()
	if err != nil {
		return err
	}
	for _, f := range files[len(files)-len(tees):] {
		_ = f.Close()
	}
	// All that is said on this connection is that the input has ended; its end says so, too.
	for {
		var said Request
		_, err := receive(c.fd, &said)
		if err != nil || said.Op == OpEndInput {
			s.endInput(k, a)
		}
		if err != nil {
			return nil
		}
	}
}

// endInput closes the standard input of a container that reads it once.
func (s *shim) endInput(c *container, a Answer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if a.Stdin && !a.TTY && c.config.StdinOnce && c.stdin != nil {
		_ = c.stdin.Close()
		c.stdin = nil
	}
}
