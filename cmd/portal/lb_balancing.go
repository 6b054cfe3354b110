package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"github.com/spf13/pflag"

	"portal/internal/lb"
	"portal/internal/lb/capture"
	"portal/internal/lb/compile"
	"portal/internal/lb/config"
	"portal/internal/lb/standin"
	"portal/internal/lb/tlspolicy"
	"portal/internal/lb/worker"
	"portal/internal/nodereport"
)

// balancingOptions are the flags about the balancing process.
type balancingOptions struct {
	balancing string
	logs      []string
	entry     string
	// dir is the folder of the balancing process. ephemeral: it ends with this one.
	dir       string
	ephemeral bool
	patience  time.Duration // that of worker.Options
	// running is the balancing process of this machine, once it is looked after here.
	running atomic.Pointer[outside]
}

const (
	balancingAuto = "auto"
	balancingOn   = "on"
	balancingOff  = "off"
)

func (o *balancingOptions) addFlags(f *pflag.FlagSet, prefix string) {
	f.StringVar(&o.balancing, prefix+"balancing", balancingAuto, "whether this machine ends connections where annotations and Ingresses ask for it (TLS, HTTP, the PROXY protocol, policies): on, off, or auto (unless --"+prefix+"announce is none)")
	f.StringArrayVar(&o.logs, prefix+"access-log-url", nil, "where access logs of a bucket go: BUCKET=URL, with a URL of the scheme s3 or file; default: s3://BUCKET; may be repeated")
	f.StringVar(&o.entry, prefix+"ingress-service", lb.DefaultEntry, "the Service whose addresses Ingresses share, NAMESPACE/NAME; it is made when there is an Ingress")
}

// validate checks the flags, naming the one that is wrong.
func (o *balancingOptions) validate(prefix string) error {
	if modes := []string{balancingAuto, balancingOn, balancingOff}; o.balancing != "" && !slices.Contains(modes, o.balancing) {
		return fmt.Errorf("--%sbalancing: %q is not one of %s", prefix, o.balancing, strings.Join(modes, ", "))
	}
	if _, err := o.buckets(); err != nil {
		return fmt.Errorf("--%saccess-log-url: %w", prefix, err)
	}
	if namespace, name, found := strings.Cut(o.entry, "/"); o.entry != "" && (!found || namespace == "" || name == "" || strings.Contains(name, "/")) {
		return fmt.Errorf("--%singress-service: %q is not NAMESPACE/NAME", prefix, o.entry)
	}
	return nil
}

func (o *balancingOptions) buckets() (map[string]string, error) {
	out := map[string]string{}
	for _, text := range o.logs {
		bucket, where, found := strings.Cut(text, "=")
		u, err := url.Parse(where)
		if !found || bucket == "" || err != nil || u.Scheme != "s3" && u.Scheme != "file" {
			return nil, fmt.Errorf("%q is not BUCKET=URL, with a URL like s3://my-logs or file:///var/log/balancers", text)
		}
		out[bucket] = where
	}
	return out, nil
}

// on says whether this machine balances, given that it announces addresses or not.
func (o *balancingOptions) on(announcing bool) bool {
	return o.balancing == balancingOn || o.balancing == balancingAuto && announcing
}

// folder is that of the balancing process.
func (o *balancingOptions) folder() string {
	if o.dir != "" {
		return o.dir
	}
	return "/run/portal/lb"
}

func (o *balancingOptions) worker(log *slog.Logger) worker.Options {
	return worker.Options{Dir: o.folder(), Identity: worker.Identity(version), Args: []string{"lb", "worker", "--dir", o.folder(), "--identity", worker.Identity(version)}, Patience: o.patience, Log: log}
}

// start makes what follows the API for the balancing process; stop lets go of that process.
func (o *balancingOptions) start(log *slog.Logger) (balancing *lb.Balancing, metrics prometheus.Gatherer, stop func(), err error) {
	buckets, err := o.buckets()
	if err != nil {
		return nil, nil, nil, err
	}
	e := &outside{options: o.worker(log)}
	o.running.Store(e)
	entry := o.entry
	if entry == "" {
		entry = lb.DefaultEntry
	}
	return &lb.Balancing{Engine: e, Buckets: buckets, Entry: entry, Policy: tlsPolicy}, e, func() { e.leave(o.ephemeral) }, nil
}

func tlsPolicy(name string) (compile.TLSPolicy, bool) {
	p, found := tlspolicy.Lookup(name)
	if !found {
		p, _ = tlspolicy.Lookup(tlspolicy.Default)
	}
	return compile.TLSPolicy{Min: p.MinVersion, Max: p.MaxVersion, Suites: p.CipherSuites, NotOffered: p.NotOffered}, found
}

// outside is the balancing process, as this one configures it.
type outside struct {
	options worker.Options

	mu      sync.Mutex
	client  *worker.Client // nil: not found yet
	applied []byte
}

// agentAbsence is how long the balancing process waits for another agent after this one has left in good order: long enough for a restart.
const agentAbsence = 2 * time.Minute

// Apply has the process carry out a configuration, and starts it if it does not run.
func (o *outside) Apply(ctx context.Context, c config.Config) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.client != nil {
		select {
		case <-o.client.Gone():
			o.options.Log.Warn("the balancing process has ended, starting another one")
			o.client.Close()
			o.client, o.applied = nil, nil
		default:
			// Other errors don't matter: if it has ended, Gone will say so.
			if err := o.client.Alive(ctx); worker.Unanswered(ctx, err) {
				o.letGo(err)
				return err
			}
		}
	}
	if o.client == nil {
		client, err := worker.Ensure(ctx, o.options)
		if err != nil {
			return err
		}
		o.client = client
	}
	digest := c.Digest()
	if bytes.Equal(digest, o.applied) {
		return nil
	}
	if err := o.client.Apply(ctx, c); err != nil {
		o.applied = nil
		if worker.Unanswered(ctx, err) {
			o.letGo(err)
		}
		return err
	}
	o.applied = digest
	return nil
}

// letGo lets go of a process that did not answer. The next attempt finds it, or replaces it if it still does not.
func (o *outside) letGo(err error) {
	o.options.Log.Warn("the balancing process does not answer", "err", err)
	o.client.Close()
	o.client, o.applied = nil, nil
}

// Gone is closed when the process has ended; nil while there is none.
func (o *outside) Gone() <-chan struct{} {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.client == nil {
		return nil
	}
	return o.client.Gone()
}

// unhealthy are the endpoints that the balancing process has taken out. What can't be asked is not said.
func (o *balancingOptions) unhealthy(ctx context.Context) (out []nodereport.Unhealthy) {
	e := o.running.Load()
	if e == nil {
		return nil
	}
	e.mu.Lock()
	client := e.client
	e.mu.Unlock()
	if client == nil {
		return nil
	}
	state, err := client.State(ctx)
	if err != nil {
		e.options.Log.Warn("the balancing process does not say which endpoints are healthy", "err", err)
		return nil
	}
	for i := range state.Pools {
		p := &state.Pools[i]
		for _, m := range p.Endpoints {
			if !m.Healthy || m.Ejected {
				out = append(out, nodereport.Unhealthy{Namespace: p.Owner.Namespace, Service: p.Owner.Name, Address: m.Address, Error: m.Error})
			}
		}
	}
	return out
}

// Gather are the process' metrics.
func (o *outside) Gather() ([]*dto.MetricFamily, error) {
	o.mu.Lock()
	client := o.client
	o.mu.Unlock()
	if client == nil {
		return nil, nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	data, err := client.Metrics(ctx)
	if err != nil {
		return nil, err
	}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(bytes.NewReader(data))
	if err != nil {
		return nil, err
	}
	var out []*dto.MetricFamily
	for name, f := range families {
		if !strings.HasPrefix(name, "go_") && !strings.HasPrefix(name, "process_") { // this process has its own of these
			out = append(out, f)
		}
	}
	return out, nil
}

// leave lets go of the process, which waits for another agent, or ends it.
func (o *outside) leave(ends bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.client == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	var err error
	if ends {
		err = errors.Join(o.client.Stop(ctx), capture.Remove())
	} else {
		err = o.client.Detach(ctx, agentAbsence)
	}
	if err != nil {
		o.options.Log.Warn("could not detach from the balancing process", "err", err)
	}
	o.client.Close()
	o.client = nil
}

// cleanUp ends the balancing process and removes what leads packets to it.
func (o *balancingOptions) cleanUp(ctx context.Context, log *slog.Logger) error {
	if err := standin.End(ctx, o.folder()); err != nil {
		return err
	}
	if _, err := os.Stat(filepath.Join(o.folder(), "control")); err == nil {
		client, err := worker.Ensure(ctx, o.worker(log))
		if err != nil {
			return err
		}
		defer client.Close()
		if err := client.Stop(ctx); err != nil {
			return err
		}
	}
	return capture.Remove()
}
