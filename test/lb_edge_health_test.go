package test

import (
	"context"
	"encoding/json"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// healthPath is what balancers ask for to see whether an endpoint is well.
const healthPath = "/healthz"

// visit is a request that came to an endpoint.
type visit struct {
	at    time.Time
	from  string // the node
	check bool
	ok    bool
}

// patient is an endpoint of the test's own, on the machine of the lab's server. It notes who came, and answers checks as it should.
type patient struct {
	name string
	port int32

	mu     sync.Mutex
	sick   bool
	visits []visit
	conns  map[string]int // connections, by the node that they came from
	close  func() error
}

func (e *edge) patient(t *testing.T, name string) *patient {
	t.Helper()
	p := &patient{name: name, conns: map[string]int{}}
	var l net.Listener
	if err := e.Server.Do(func() (err error) {
		l, err = net.Listen("tcp", "192.168.100.2:0")
		return err
	}); err != nil {
		t.Fatal(err)
	}
	p.port = int32(l.Addr().(*net.TCPAddr).Port)
	server := &http.Server{Handler: p, ReadHeaderTimeout: time.Minute, ConnState: func(c net.Conn, state http.ConnState) {
		if from, _, _ := net.SplitHostPort(c.RemoteAddr().String()); state == http.StateNew {
			p.mu.Lock()
			defer p.mu.Unlock()
			p.conns[from]++
		}
	}}
	p.close = server.Close
	go func() { _ = server.Serve(l) }()
	t.Cleanup(func() { server.Close() })
	return p
}

// ServeHTTP makes a patient an http.Handler. A sick one answers everything but checks as before.
func (p *patient) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	from, _, _ := net.SplitHostPort(r.RemoteAddr)
	p.mu.Lock()
	defer p.mu.Unlock()
	v := visit{at: time.Now(), from: from, check: r.URL.Path == healthPath, ok: r.URL.Path != healthPath || !p.sick}
	p.visits = append(p.visits, v)
	if !v.ok {
		w.WriteHeader(http.StatusInternalServerError)
	}
	fmt.Fprintln(w, p.name)
}

func (p *patient) be(sick bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.sick = sick
	p.visits = nil
}

// seen are the visits from a node since the state last changed.
func (p *patient) seen(from string) (out []visit) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, v := range p.visits {
		if v.from == from {
			out = append(out, v)
		}
	}
	return out
}

// checks counts those with a result.
func checks(visits []visit, ok bool) (n int) {
	for _, v := range visits {
		if v.check && v.ok == ok {
			n++
		}
	}
	return n
}

// external makes a Service whose endpoints are these, and returns its address.
func (e *edge) external(t *testing.T, name string, annotations map[string]string, patients ...*patient) netip.Addr {
	t.Helper()
	svc := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{}}, Spec: corev1.ServiceSpec{
		Type: corev1.ServiceTypeLoadBalancer, Ports: []corev1.ServicePort{{Port: 80, TargetPort: intstr.FromInt32(1)}},
	}}
	for key, value := range annotations {
		svc.Annotations[awsLB+key] = value
	}
	if _, err := e.API.CoreV1().Services("default").Create(t.Context(), svc, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, p := range patients {
		slice := &discoveryv1.EndpointSlice{
			ObjectMeta:  metav1.ObjectMeta{Name: name + "-" + p.name, Labels: map[string]string{discoveryv1.LabelServiceName: name, discoveryv1.LabelManagedBy: "test"}},
			AddressType: discoveryv1.AddressTypeIPv4, Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"192.168.100.2"}}}, Ports: []discoveryv1.EndpointPort{{Port: &p.port}},
		}
		if _, err := e.API.DiscoveryV1().EndpointSlices("default").Create(t.Context(), slice, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	return ingressOf(t, e.Lab, name, 1)[0]
}

// clients keeps asking for a page at an address, each time over a new connection, and counts the answers by who gave them, until the test ends.
func (e *edge) clients(t *testing.T, address string) func() map[string]int {
	ctx, cancel := context.WithCancel(t.Context())
	var mu sync.Mutex
	answers := map[string]int{}
	var wg sync.WaitGroup
	wg.Go(func() {
		for ctx.Err() == nil {
			out, err := e.Client.Exec(ctx, "curl", "-sS", "--max-time", "20", "http://"+address+"/")
			mu.Lock()
			if err != nil {
				answers["error"]++
			} else {
				answers[strings.TrimSpace(out)]++
			}
			mu.Unlock()
			select {
			case <-ctx.Done():
			case <-time.After(100 * time.Millisecond):
			}
		}
	})
	t.Cleanup(func() {
		cancel()
		wg.Wait()
	})
	return func() map[string]int {
		mu.Lock()
		defer mu.Unlock()
		out := answers
		answers = map[string]int{}
		return out
	}
}

// health: checks come to endpoints in the interval that was asked for; one that answers 500 gets no more requests after as many as the threshold says, and gets
// some again after as many good answers. The endpoints themselves are the witnesses.
func (e *edge) health(t *testing.T) {
	const interval, threshold = 5 * time.Second, 2
	well, sick := e.patient(t, "well"), e.patient(t, "sick")
	began := time.Now()
	a := e.external(t, "health", map[string]string{
		"backend-protocol": "http", "cross-zone-load-balancing-enabled": "true", "healthcheck-path": healthPath, "healthcheck-interval": "5", "healthcheck-timeout": "2",
		"healthcheck-unhealthy-threshold": "2", "healthcheck-healthy-threshold": "2",
	}, well, sick)
	answers := e.clients(t, a.String())
	entry := ""
	eventually(t, lbLimit, "requests at both endpoints, and a check", func() string {
		sick.mu.Lock()
		for _, v := range sick.visits {
			if !v.check {
				entry = v.from
			}
		}
		sick.mu.Unlock()
		if entry == "" || checks(sick.seen(entry), true) == 0 || checks(well.seen(entry), true) == 0 {
			return fmt.Sprint(answers(), well.seen(entry), sick.seen(entry))
		}
		return ""
	})
	counted := len(sick.seen(entry)) // with what is forgotten now

	sick.be(true)
	eventually(t, lbLimit, "a check more than the endpoint may fail", func() string {
		if n := checks(sick.seen(entry), false); n <= threshold {
			return fmt.Sprint(n, " failed")
		}
		return ""
	})
	failed, between := 0, 0
	for _, v := range sick.seen(entry) {
		switch {
		case v.check:
			failed++
		case failed > 0 && failed < threshold:
			between++
		case failed > threshold:
			t.Errorf("a request came after %d failed checks", failed)
		}
	}
	if between == 0 {
		t.Errorf("after the first failed check no request came, although it takes %d: %+v", threshold, sick.seen(entry))
	}
	answers()
	eventually(t, lbLimit, "further answers, of the other endpoint alone", func() string {
		got := answers()
		if got["sick"]+got["error"] > 0 {
			t.Fatalf("answers: %v", got)
		}
		if got["well"] == 0 {
			return "none"
		}
		return ""
	})

	sick.be(false)
	eventually(t, lbLimit, "requests at the endpoint that is well again", func() string {
		if all := sick.seen(entry); !slices.ContainsFunc(all, func(v visit) bool { return !v.check }) {
			return fmt.Sprint(all)
		}
		return ""
	})
	passed := 0
	for _, v := range sick.seen(entry) {
		if !v.check {
			break
		}
		passed++
	}
	if passed < threshold {
		t.Errorf("a request came after %d good checks, want %d at least", passed, threshold)
	}
	for _, node := range []string{"192.168.100.11", "192.168.100.12"} {
		if n, most := checks(well.seen(node), true), int(time.Since(began)/interval)+2; n < 2 || n > most {
			t.Errorf("%s: %d checks within %v; want 2 to %d", node, n, time.Since(began), most)
		}
	}
	t.Logf("the entry is %s; %d requests before, %d between the first and the last failed check", entry, counted, between)
	labKubectl(t, e.Lab, "", "delete", "service", "health", "--timeout=60s")
}

// taggedLog: JSON access logs have the tags.
func (e *edge) taggedLog(t *testing.T) {
	eventually(t, lbLimit, "a line of the access log with tags", func() string {
		var seen []string
		found := false
		_ = filepath.WalkDir(filepath.Join(e.logs, "tagged"), func(path string, entry fs.DirEntry, err error) error {
			if err != nil || entry.IsDir() {
				return nil
			}
			data, _ := os.ReadFile(path)
			for line := range strings.Lines(string(data)) {
				var record struct {
					Tags map[string]string `json:"tags"`
				}
				err := json.Unmarshal([]byte(line), &record)
				found = found || err == nil && record.Tags["environment"] == "prod" && record.Tags["owner"] == "devops"
				seen = append(seen, line)
			}
			return nil
		})
		if !found {
			return strings.Join(seen, "")
		}
		return ""
	})
}
