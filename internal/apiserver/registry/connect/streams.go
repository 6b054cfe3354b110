package connect

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	genericrest "k8s.io/apiserver/pkg/registry/generic/rest"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/apiserver/pkg/util/proxy"
	"k8s.io/streaming/pkg/httpstream/wsstream"

	"portal/internal/disconnect"
)

// logREST reads the logs of a Pod's containers.
type logREST struct{ reach *Reach }

var (
	_ rest.GetterWithOptions = &logREST{}
	_ rest.StorageMetadata   = &logREST{}
)

// New returns an empty Pod: what the log belongs to.
func (*logREST) New() runtime.Object { return &corev1.Pod{} }

// Destroy does nothing: there is no store.
func (*logREST) Destroy() {}

// NewGetOptions returns what can be asked for.
func (*logREST) NewGetOptions() (runtime.Object, bool, string) {
	return &corev1.PodLogOptions{}, false, ""
}

// ProducesMIMETypes says that a log is text.
func (*logREST) ProducesMIMETypes(string) []string { return []string{"text/plain"} }

// ProducesObject says that a log is a string to clients' generators.
func (*logREST) ProducesObject(string) any { return "" }

// OverrideMetricsVerb counts logs with connections, as they may take as long.
func (*logREST) OverrideMetricsVerb(verb string) string {
	if verb == http.MethodGet {
		return "CONNECT"
	}
	return verb
}

// Get finds out where a log is read. A Pod without a node has none yet.
func (l *logREST) Get(ctx context.Context, name string, options runtime.Object) (runtime.Object, error) {
	opts, ok := options.(*corev1.PodLogOptions)
	if !ok {
		return nil, fmt.Errorf("options of a log are wanted, not %T", options)
	}
	if errs := validateLog(opts); len(errs) > 0 {
		return nil, apierrors.NewInvalid(corev1.SchemeGroupVersion.WithKind("PodLogOptions").GroupKind(), name, errs)
	}
	pod, err := l.reach.pod(ctx, name)
	if err != nil {
		return nil, err
	}
	which, err := container(pod, opts.Container)
	if err != nil {
		return nil, err
	}
	streamer := &logStreamer{genericrest.LocationStreamer{
		ContentType: "text/plain", Flush: opts.Follow, RedirectChecker: genericrest.PreventRedirects,
		ResponseChecker: genericrest.NewGenericHttpResponseChecker(corev1.Resource("pods/log"), name),
	}}
	if pod.Spec.NodeName == "" {
		return streamer, nil
	}
	node, host, err := l.reach.node(ctx, pod.Spec.NodeName)
	if err != nil {
		return nil, err
	}
	streamer.Transport = l.reach.Nodes.Transport(node.Name, host, opts.InsecureSkipTLSVerifyBackend)
	streamer.Location = &url.URL{
		Scheme: "https", Host: net.JoinHostPort(host, portOf(node)), Path: "/containerLogs/" + pod.Namespace + "/" + pod.Name + "/" + which,
		RawQuery: logQuery(opts).Encode(),
	}
	return streamer, nil
}

// logStreamer reads a log from a node. The end of the log comes alone, as what sends logs to WebSockets drops the bytes that come with it:
// those of a short answer with a length.
type logStreamer struct{ genericrest.LocationStreamer }

// InputStream opens the log.
func (s *logStreamer) InputStream(ctx context.Context, version, accept string) (io.ReadCloser, bool, string, error) {
	stream, flush, kind, err := s.LocationStreamer.InputStream(ctx, version, accept)
	if err != nil || stream == nil {
		return nil, flush, kind, err
	}
	return struct {
		io.Reader
		io.Closer
	}{bufio.NewReader(stream), stream}, flush, kind, nil
}

func validateLog(opts *corev1.PodLogOptions) (errs field.ErrorList) {
	positive := func(name string, n *int64, least int64, must string) {
		if n != nil && *n < least {
			errs = append(errs, field.Invalid(field.NewPath(name), *n, must))
		}
	}
	positive("tailLines", opts.TailLines, 0, "must be greater than or equal to 0")
	positive("limitBytes", opts.LimitBytes, 1, "must be greater than 0")
	positive("sinceSeconds", opts.SinceSeconds, 1, "must be greater than 0")
	if opts.SinceSeconds != nil && opts.SinceTime != nil {
		errs = append(errs, field.Forbidden(field.NewPath(""), "sinceTime and sinceSeconds: give one of them"))
	}
	if opts.Stream == nil {
		return errs
	}
	switch *opts.Stream {
	case corev1.LogStreamAll:
	case corev1.LogStreamStdout, corev1.LogStreamStderr:
		if opts.TailLines != nil {
			errs = append(errs, field.Forbidden(field.NewPath(""), "tailLines: can't be combined with one stream"))
		}
	default:
		errs = append(errs, field.NotSupported(field.NewPath("stream"), *opts.Stream, []string{corev1.LogStreamAll, corev1.LogStreamStdout, corev1.LogStreamStderr}))
	}
	return errs
}

func logQuery(opts *corev1.PodLogOptions) url.Values {
	out := url.Values{}
	for name, set := range map[string]bool{"follow": opts.Follow, "previous": opts.Previous, "timestamps": opts.Timestamps} {
		if set {
			out.Set(name, "true")
		}
	}
	for name, n := range map[string]*int64{"sinceSeconds": opts.SinceSeconds, "tailLines": opts.TailLines, "limitBytes": opts.LimitBytes} {
		if n != nil {
			out.Set(name, strconv.FormatInt(*n, 10))
		}
	}
	if opts.SinceTime != nil {
		out.Set("sinceTime", opts.SinceTime.Format(time.RFC3339))
	}
	if opts.Stream != nil {
		out.Set("stream", *opts.Stream)
	}
	return out
}

// stream is a kind of connection to a Pod.
type stream int

const (
	exec stream = iota
	attach
	portForward
)

// streamREST connects to processes and ports of a Pod, through its node.
type streamREST struct {
	reach *Reach
	kind  stream
}

var _ rest.Connecter = &streamREST{}

// New returns empty options.
func (s *streamREST) New() runtime.Object {
	switch s.kind {
	case exec:
		return &corev1.PodExecOptions{}
	case attach:
		return &corev1.PodAttachOptions{}
	}
	return &corev1.PodPortForwardOptions{}
}

// Destroy does nothing: there is no store.
func (*streamREST) Destroy() {}

// NewConnectOptions returns what can be asked for.
func (s *streamREST) NewConnectOptions() (runtime.Object, bool, string) { return s.New(), false, "" }

// ConnectMethods are POST, and GET, which WebSockets begin with.
func (*streamREST) ConnectMethods() []string { return []string{http.MethodGet, http.MethodPost} }

// Connect passes the connection on to the Pod's node. Nodes speak SPDY: what comes as WebSocket with the protocols that newer clients use
// is translated here.
func (s *streamREST) Connect(ctx context.Context, name string, options runtime.Object, responder rest.Responder) (http.Handler, error) {
	if err := s.reach.mayCreate(ctx); err != nil {
		return nil, err
	}
	pod, err := s.reach.pod(ctx, name)
	if err != nil {
		return nil, err
	}
	path, query, streams, err := s.where(pod, options)
	if err != nil {
		return nil, err
	}
	if pod.Spec.NodeName == "" {
		return nil, apierrors.NewBadRequest(fmt.Sprintf("pod %s does not have a host assigned", name))
	}
	node, host, err := s.reach.node(ctx, pod.Spec.NodeName)
	if err != nil {
		return nil, err
	}
	to := &url.URL{Scheme: "https", Host: net.JoinHostPort(host, portOf(node)), Path: path, RawQuery: query.Encode()}
	transport := s.reach.Nodes.Transport(node.Name, host, false)
	pass := handler(to, transport, false, true, responder)
	if s.kind == portForward {
		return proxy.NewTranslatingHandler(pass, proxy.NewTunnelingHandler(pass), wsstream.IsWebSocketRequestWithTunnelingProtocol), nil
	}
	// What translates waits for the node, and would not notice that the client is gone.
	translate := disconnect.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		proxy.NewStreamTranslatorHandler(to, until(r.Context(), transport), 0, *streams).ServeHTTP(w, r)
	}))
	return proxy.NewTranslatingHandler(pass, translate, wsstream.IsWebSocketRequestWithStreamCloseProtocol), nil
}

// where is the path at the node, with what kubelets understand.
func (s *streamREST) where(pod *corev1.Pod, options runtime.Object) (path string, query url.Values, streams *proxy.Options, err error) {
	query = url.Values{}
	var which string
	switch o := options.(type) {
	case *corev1.PodExecOptions:
		path, which = "/exec/", o.Container
		streams = &proxy.Options{Stdin: o.Stdin, Stdout: o.Stdout, Stderr: o.Stderr, Tty: o.TTY}
		query["command"] = o.Command
		if len(o.Command) == 0 {
			return "", nil, nil, apierrors.NewBadRequest("command: you must specify a command")
		}
	case *corev1.PodAttachOptions:
		path, which = "/attach/", o.Container
		streams = &proxy.Options{Stdin: o.Stdin, Stdout: o.Stdout, Stderr: o.Stderr, Tty: o.TTY}
	case *corev1.PodPortForwardOptions:
		var ports []string
		for _, p := range o.Ports {
			if p < 1 || p > 65535 {
				return "", nil, nil, apierrors.NewBadRequest(fmt.Sprintf("ports: %d must be from 1 to 65535", p))
			}
			ports = append(ports, strconv.Itoa(int(p)))
		}
		if len(ports) > 0 {
			query.Set("port", strings.Join(ports, ","))
		}
		return "/portForward/" + pod.Namespace + "/" + pod.Name, query, nil, nil
	default:
		return "", nil, nil, fmt.Errorf("options of a connection are wanted, not %T", options)
	}
	if which, err = container(pod, which); err != nil {
		return "", nil, nil, err
	}
	for name, set := range map[string]bool{"input": streams.Stdin, "output": streams.Stdout, "error": streams.Stderr, "tty": streams.Tty} {
		if set {
			query.Set(name, "1")
		}
	}
	return path + pod.Namespace + "/" + pod.Name + "/" + which, query, streams, nil
}
