package web

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"portal/internal/lb/web/probes"
)

// witness is an endpoint that notes what it is asked for.
type witness struct {
	mu   sync.Mutex
	seen []string
}

func (w *witness) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	w.mu.Lock()
	w.seen = append(w.seen, r.Method+" "+r.RequestURI)
	w.mu.Unlock()
	fmt.Fprintf(rw, "%d", len(body))
}

func (w *witness) take() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	seen := w.seen
	w.seen = nil
	return seen
}

// probe sends a probe and returns the statuses of the answers; open is added to a refusal after which the connection could go on. The
// client closes its side when done says so, given the answers so far: who closes early may be taken for one who has gone.
func probe(t *testing.T, address netip.AddrPort, p probes.Probe, done func(answers int, c net.Conn, r *bufio.Reader) bool) string {
	t.Helper()
	nc, err := net.Dial("tcp", address.String())
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	c := nc.(*net.TCPConn)
	c.SetDeadline(time.Now().Add(patience))
	// A large probe is perhaps answered before it is sent.
	sent := make(chan struct{})
	go func() {
		io.WriteString(c, p.Send)
		close(sent)
	}()
	method, _, _ := strings.Cut(p.Send, " ")
	var statuses []string
	r := bufio.NewReader(c)
	closed := false
	for {
		if !closed && done(len(statuses), c, r) {
			closed = true
			go func() {
				<-sent
				c.CloseWrite()
			}()
		}
		res, err := http.ReadResponse(r, &http.Request{Method: method})
		if err != nil {
			break
		}
		if _, err := io.Copy(io.Discard, res.Body); err != nil {
			statuses = append(statuses, "cut")
			break
		}
		statuses = append(statuses, fmt.Sprint(res.StatusCode))
		if res.StatusCode >= 400 && !res.Close {
			statuses[len(statuses)-1] += "+open"
		}
	}
	if statuses == nil {
		return "closed"
	}
	return strings.Join(statuses, " ")
}

// judge compares what the endpoint saw with what was answered.
func judge(answers string, seen []string) error {
	passed := strings.Count(answers, "200")
	if len(seen) != passed {
		return fmt.Errorf("%d requests reached the endpoint, %d were answered: %q", len(seen), passed, seen)
	}
	for _, one := range seen {
		if strings.Contains(one, probes.Smuggled) {
			return fmt.Errorf("a request was smuggled: %q", seen)
		}
	}
	return nil
}

func TestProbes(t *testing.T) {
	all := probes.All()
	if len(all) < 200 {
		t.Errorf("only %d probes", len(all))
	}
	w := &witness{}
	s := start(t, pool(handler(t, w.ServeHTTP)))
	for _, p := range all {
		// A request that is refused is not waited for: it may be one that would go on.
		got := probe(t, s.address, p, func(answers int, _ net.Conn, _ *bufio.Reader) bool {
			return p.Want[0] != '2' || answers == len(strings.Fields(p.Want))
		})
		if got != p.Want && !(p.Want != "200" && strings.ReplaceAll(got, "+open", "") == p.Want && strings.Contains(p.Name, "path")) {
			t.Errorf("%s: answered %q; want %q", p.Name, got, p.Want)
		}
		if err := judge(got, w.take()); err != nil {
			t.Errorf("%s: %v", p.Name, err)
		}
	}
	t.Logf("%d probes", len(all))
}
