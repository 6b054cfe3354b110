package test

import (
	"bufio"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/internal/lab"
	"portal/internal/lb/announce"
)

// reached is a Service as clients outside see it.
type reached struct {
	name, address string // of the first family
	encrypted     bool
}

// keptConn is a connection that asks something every now and then, for as long as the test lasts.
type keptConn struct {
	to     reached
	c      net.Conn
	in     *bufio.Reader
	pod    string // that answered last
	broken error  // nil: it lives
	at     time.Duration
}

// traffic is what clients outside do: some connect anew for each request, others stay connected.
type traffic struct {
	began time.Time
	stop  chan struct{}
	done  sync.WaitGroup
	dial  chan func() // on threads in the client's network

	mu      sync.Mutex
	sent    int
	failed  []failedRequest
	skipped int
	slowest time.Duration
	kept    []*keptConn
}

// trafficOf begins to send requests from outside: fresh ones a second, each on a connection of its own, and ten a second on each of some connections
// that stay, for each Service.
func trafficOf(t *testing.T, l *lab.Lab, services []reached, fresh, kept int) *traffic {
	t.Helper()
	x := &traffic{began: time.Now(), stop: make(chan struct{}), dial: make(chan func())}
	var threads sync.WaitGroup
	for range 32 {
		threads.Go(func() {
			err := l.Client.Do(func() error {
				for f := range x.dial {
					f()
				}
				return nil
			})
			if err != nil {
				t.Errorf("the client's network: %v", err)
			}
		})
	}
	for _, s := range services {
		for range kept {
			k := &keptConn{to: s}
			if err := x.connect(k); err != nil {
				t.Fatalf("%s: %v", s.name, err)
			}
			x.kept = append(x.kept, k)
		}
	}
	for i, k := range x.kept {
		x.done.Go(func() { x.keep(k, time.Duration(i)*time.Millisecond) })
	}
	for _, s := range services {
		x.done.Go(func() { x.renew(s, fresh) })
	}
	t.Cleanup(func() {
		x.end()
		close(x.dial)
		threads.Wait()
	})
	return x
}

// end stops sending, and waits for the last answers.
func (x *traffic) end() {
	select {
	case <-x.stop:
	default:
		close(x.stop)
	}
	x.done.Wait()
}

func (x *traffic) since() time.Duration { return time.Since(x.began) }

// connect opens a connection.
func (x *traffic) connect(k *keptConn) (err error) {
	dialled := make(chan struct{})
	x.dial <- func() {
		defer close(dialled)
		k.c, err = net.DialTimeout("tcp", k.to.address, requestLimit())
	}
	<-dialled
	if err != nil {
		return err
	}
	if err := k.begin(k.c, time.Now().Add(requestLimit())); err != nil {
		_ = k.c.Close()
		return err
	}
	return nil
}

// begin makes a connection ready for requests.
func (k *keptConn) begin(c net.Conn, deadline time.Time) error {
	_ = c.SetDeadline(deadline)
	if k.to.encrypted {
		encrypted := tls.Client(c, &tls.Config{InsecureSkipVerify: true}) // its certificate signs itself
		if err := encrypted.Handshake(); err != nil {
			return err
		}
		c = encrypted
	}
	k.c, k.in = c, bufio.NewReader(c)
	return nil
}

// ask sends a request over the connection, and notes which Pod answers.
func (k *keptConn) ask(last bool, deadline time.Time) error {
	_ = k.c.SetDeadline(deadline)
	end := ""
	if last {
		end = "Connection: close\r\n"
	}
	if _, err := io.WriteString(k.c, "GET / HTTP/1.1\r\nHost: web\r\n"+end+"\r\n"); err != nil {
		return err
	}
	answer, err := http.ReadResponse(k.in, nil)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	if err != nil {
		return err
	}
	pod := strings.TrimSpace(string(body))
	if answer.StatusCode != http.StatusOK || pod == "" {
		return fmt.Errorf("%s: %q", answer.Status, body)
	}
	if !last && answer.Close {
		return errors.New("the connection is to end after an answer")
	}
	k.pod = pod
	return nil
}

func (x *traffic) note(kind string, to reached, begin time.Time, err error) {
	took := time.Since(begin)
	x.mu.Lock()
	defer x.mu.Unlock()
	x.sent++
	if err != nil {
		x.failed = append(x.failed, failedRequest{at: begin.Sub(x.began), took: took, source: kind + " to " + to.name, address: to.address, err: err})
		return
	}
	x.slowest = max(x.slowest, took)
}

// keep asks over a connection until it breaks or the test ends.
func (x *traffic) keep(k *keptConn, late time.Duration) {
	defer k.c.Close()
	timer := time.NewTimer(late)
	defer timer.Stop()
	for {
		select {
		case <-x.stop:
			return
		case <-timer.C:
		}
		begin := time.Now()
		err := k.ask(false, begin.Add(requestLimit()))
		if x.note("a connection that stays", k.to, begin, err); err != nil {
			x.mu.Lock()
			k.broken, k.at = err, begin.Sub(x.began)
			x.mu.Unlock()
			return
		}
		timer.Reset(max(0, 100*time.Millisecond-time.Since(begin)))
	}
}

// renew asks over new connections, at a rate.
func (x *traffic) renew(to reached, rate int) {
	var asking sync.WaitGroup
	defer asking.Wait()
	free := make(chan struct{}, max(8, rate)) // so many at a time
	tick := time.NewTicker(time.Second / time.Duration(rate))
	defer tick.Stop()
	for {
		select {
		case <-x.stop:
			return
		case <-tick.C:
		}
		select {
		case free <- struct{}{}:
		default:
			x.mu.Lock()
			x.skipped++
			x.mu.Unlock()
			continue
		}
		asking.Go(func() {
			defer func() { <-free }()
			begin := time.Now()
			k := &keptConn{to: to}
			err := x.connect(k)
			if err == nil {
				err = k.ask(true, begin.Add(requestLimit()))
				_ = k.c.Close()
			}
			x.note("a new connection", to, begin, err)
		})
	}
}

// report ends the traffic and returns what failed but for what is expected.
func (x *traffic) report(t *testing.T, expected func(failedRequest) bool) (failed []failedRequest) {
	t.Helper()
	x.end()
	allowed := 0
	for _, f := range x.failed {
		if expected != nil && expected(f) {
			allowed++
			continue
		}
		failed = append(failed, f)
	}
	living := 0
	for _, k := range x.kept {
		if k.broken == nil {
			living++
		}
	}
	took := x.since()
	t.Logf("%d requests within %s, %.0f a second; %d failed as they must, %d otherwise; %d of %d connections live; %d requests were not sent in time; the slowest answer took %s",
		x.sent, took.Round(time.Millisecond), float64(x.sent)/took.Seconds(), allowed, len(failed), living, len(x.kept), x.skipped, x.slowest.Round(time.Millisecond))
	for i, f := range failed[:min(len(failed), 20)] {
		t.Errorf("failed, %d of %d: %v", i+1, len(failed), f)
	}
	// Where some are lost, those that wait for an answer keep others from being sent.
	if *strictRequests && expected == nil && x.skipped > x.sent/20 {
		t.Errorf("%d requests could not be sent in time, beside %d that were: that is too little load", x.skipped, x.sent)
	}
	return failed
}

// memberOf is the Lease of a node's balancer.
func memberOf(t *testing.T, l *lab.Lab, node string) *coordinationv1.Lease {
	t.Helper()
	lease, err := l.API.CoordinationV1().Leases("kube-system").Get(t.Context(), announce.LeasePrefix+node, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return lease
}

// restartAgent stops a node's agent as a service manager does, which starts it again, and waits until the next one has its place among the balancers.
// meanwhile is called again and again.
func restartAgent(t *testing.T, l *lab.Lab, node string, meanwhile func()) {
	t.Helper()
	before, starts := *memberOf(t, l, node).Spec.HolderIdentity, agentStarts(l, node)
	if err := syscall.Kill(program(t, node, l.Dir), syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	awaitMember(t, l, node, before, meanwhile)
	eventually(t, 2*time.Minute, node+" to look after Pods", func() string {
		if agentStarts(l, node) <= starts {
			return "its agent has not started"
		}
		return ""
	})
}

// awaitMember waits until another process than before is a node's balancer, and knows what it owns.
func awaitMember(t *testing.T, l *lab.Lab, node, before string, meanwhile func()) {
	t.Helper()
	eventually(t, 2*time.Minute, "another balancer of "+node, func() string {
		meanwhile()
		lease := memberOf(t, l, node)
		switch holder := *lease.Spec.HolderIdentity; {
		case holder == before || holder == "":
			return fmt.Sprintf("its Lease is that of %q", holder)
		case lease.Annotations["portal.dev/lb-addresses"] != "" && *lease.Spec.LeaseDurationSeconds > int32(announce.DefaultTimes.Lease/time.Second):
			return "it does not know what it owns yet"
		}
		return ""
	})
}
