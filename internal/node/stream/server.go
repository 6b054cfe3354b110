// Package stream serves what kubelets serve about the Pods of their node: logs, commands, terminals, forwarded ports, and a few facts. It
// knows who may ask and how the protocols work; what a Pod is and where its processes are, it asks its Host.
package stream

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"portal/internal/disconnect"
)

// Host is the node's Pods.
type Host interface {
	// Pods are those that the node runs, with the status that it has decided.
	Pods() []*corev1.Pod
	// Find finds one; nil: there is none.
	Find(namespace, name string) Pod
}

// Pod is one of them.
type Pod interface {
	UID() string
	// Log is a container's log: of its last run, or of the one before. The error is for who asks.
	Log(container string, previous bool) (Log, error)
	// Exec runs a command in a container that runs, and returns its exit code.
	Exec(ctx context.Context, container string, command []string, s Streams) (int, error)
	// Attach connects to a container that runs.
	Attach(ctx context.Context, container string, s Streams) error
	// Running says why one can't connect to a container, if one can't.
	Running(container string) error
	// Dial connects to a port in the Pod's network.
	Dial(ctx context.Context, port uint16) (net.Conn, error)
}

// Streams are what a client has connected. What is nil is not wanted.
type Streams struct {
	In       io.Reader
	Out, Err io.Writer
	TTY      bool
	Resize   <-chan Size
}

// Size is that of a terminal.
type Size struct{ Columns, Rows uint16 }

// Options are a Server's.
type Options struct {
	// Node is the name of the Node.
	Node string
	// Listen are the addresses to serve at.
	Listen []netip.AddrPort
	Host   Host
	Client kubernetes.Interface
	// Authorities are the CAs of clients' certificates, in PEM. They may change.
	Authorities func() ([]byte, error)
	// Dir is where the certificate that it serves with is kept.
	Dir string
	// State answers what this node does for Services; nil: nobody does.
	State http.Handler
	// Traffic answers how much goes through Services on this node; nil: nobody does.
	Traffic http.Handler
	// Panics is how often the agent panicked while it did something for a Pod or the node.
	Panics func() int64
	Log    *slog.Logger
}

// Server serves a node's Pods.
type Server struct {
	Options
	certificate certificate
	access      access
	metrics     *prometheus.Registry
}

// New makes a Server; Run starts it.
func New(o Options) (*Server, error) {
	s := &Server{Options: o, metrics: prometheus.NewRegistry()}
	s.certificate.server = s
	if err := s.access.build(o); err != nil {
		return nil, err
	}
	s.metrics.MustRegister(
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "kubelet_running_pods", Help: "Number of Pods that have a running sandbox."}, func() float64 {
			n := 0
			for _, pod := range o.Host.Pods() {
				if pod.Status.Phase == corev1.PodRunning {
					n++
				}
			}
			return float64(n)
		}),
		prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "portal_node_panics_total", Help: "Number of panics of the agent while it did something for a Pod or the node: each is an error in the agent.",
		}, func() float64 { return float64(o.Panics()) }),
	)
	return s, nil
}

const (
	headerTimeout = 10 * time.Second
	retryDelay    = time.Second
	shutdownLimit = time.Second
)

// Run serves until ctx ends, and keeps the certificate valid.
func (s *Server) Run(ctx context.Context) {
	var running sync.WaitGroup
	defer running.Wait()
	running.Go(func() { s.certificate.run(ctx) })
	server := &http.Server{
		Handler: s.handler(), ReadHeaderTimeout: headerTimeout, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 64 << 10,
		BaseContext: func(net.Listener) context.Context { return ctx },
		ErrorLog:    slog.NewLogLogger(s.Log.Handler(), slog.LevelDebug),
		TLSConfig: &tls.Config{
			MinVersion: tls.VersionTLS12, GetCertificate: s.certificate.current,
			// Who has none may come with a token; who they are is decided for each request.
			ClientAuth: tls.RequestClientCert,
			// What takes connections over needs HTTP/1.1.
			NextProtos: []string{"http/1.1"},
		},
	}
	for _, at := range s.Listen {
		running.Go(func() { s.listen(ctx, server, at) })
	}
	<-ctx.Done()
	limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownLimit)
	defer cancel()
	if server.Shutdown(limited) != nil {
		_ = server.Close()
	}
}

// listen serves at an address, which the machine may not have yet.
func (s *Server) listen(ctx context.Context, server *http.Server, at netip.AddrPort) {
	told := ""
	for ctx.Err() == nil {
		l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", at.String())
		if err == nil {
			s.Log.Info("serving logs and commands of Pods", "address", at.String())
			told = ""
			err = server.ServeTLS(l, "", "")
			if errors.Is(err, http.ErrServerClosed) {
				return
			}
		}
		if ctx.Err() == nil && err.Error() != told {
			told = err.Error()
			s.Log.Error("logs and commands of Pods can't be served, retrying: choose another --stream-address or --stream-port", "address", at.String(), "err", err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(retryDelay):
		}
	}
}

// handler is all that is served, to those who may have it.
func (s *Server) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok") })
	mux.HandleFunc("GET /pods", s.pods)
	mux.HandleFunc("GET /runningpods/", s.pods)
	mux.Handle("GET /metrics", promhttp.HandlerFor(s.metrics, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /logs/", machineLogs)
	if s.State != nil {
		mux.Handle("GET /state", s.State)
	}
	if s.Traffic != nil {
		mux.Handle("GET /traffic", s.Traffic)
	}
	mux.HandleFunc("GET /containerLogs/{namespace}/{pod}/{container}", s.logs)
	for _, path := range []string{"/{namespace}/{pod}/{container}", "/{namespace}/{pod}/{uid}/{container}"} {
		for _, method := range []string{"GET ", "POST "} {
			mux.HandleFunc(method+"/exec"+path, s.exec)
			mux.HandleFunc(method+"/attach"+path, s.attach)
		}
		mux.HandleFunc("POST /run"+path, s.run)
	}
	for _, path := range []string{"/portForward/{namespace}/{pod}", "/portForward/{namespace}/{pod}/{uid}"} {
		mux.HandleFunc("GET "+path, s.forward)
		mux.HandleFunc("POST "+path, s.forward)
	}
	return disconnect.Handler(s.access.filter(s.Node, mux))
}

// logFolder has the machine's own logs.
const logFolder = "/var/log"

// machineLogs serves the machine's own logs, and nothing that links lead to elsewhere.
func machineLogs(w http.ResponseWriter, r *http.Request) {
	root, err := os.OpenRoot(logFolder)
	if err != nil {
		http.Error(w, err.Error(), http.StatusNotFound)
		return
	}
	defer root.Close()
	http.StripPrefix("/logs", http.FileServerFS(root.FS())).ServeHTTP(w, r)
}

// find is the Pod that a request names, or the answer is that there is none.
func (s *Server) find(w http.ResponseWriter, r *http.Request) Pod {
	name := r.PathValue("pod")
	pod := s.Host.Find(r.PathValue("namespace"), name)
	if uid := r.PathValue("uid"); pod == nil || uid != "" && uid != pod.UID() {
		http.Error(w, fmt.Sprintf("pod %q does not exist on this node", name), http.StatusNotFound)
		return nil
	}
	return pod
}

// pods lists the node's Pods.
func (s *Server) pods(w http.ResponseWriter, _ *http.Request) {
	list := corev1.PodList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "PodList"}, Items: []corev1.Pod{}}
	for _, pod := range s.Host.Pods() {
		list.Items = append(list.Items, *pod)
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(&list) // a client that has gone needs no answer
}

// run runs a command to its end and answers with its output.
func (s *Server) run(w http.ResponseWriter, r *http.Request) {
	pod := s.find(w, r)
	if pod == nil {
		return
	}
	command := strings.Fields(r.FormValue("cmd"))
	if len(command) == 0 {
		http.Error(w, "cmd: must be a command", http.StatusBadRequest)
		return
	}
	var out limited
	code, err := pod.Exec(r.Context(), r.PathValue("container"), command, Streams{Out: &out, Err: &out})
	if err == nil && code != 0 {
		err = fmt.Errorf("%s: exit code %d", out.text(), code)
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "text/plain")
	_, _ = io.WriteString(w, out.text())
}

// limited keeps the beginning of what is written to it.
type limited struct {
	mu   sync.Mutex
	data []byte
}

const maxOutput = 1 << 20

func (l *limited) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.data = append(l.data, p[:min(len(p), maxOutput-len(l.data))]...)
	return len(p), nil
}

func (l *limited) text() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return string(l.data)
}
