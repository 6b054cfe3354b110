// Package publish writes what a part of a node says about itself to the API, when package reports says that it is due. Where the API has no
// NodeReports it installs their definition if it may, and does without otherwise: no part ever waits for its report.
package publish

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"log/slog"
	"math"
	"net/http"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"

	"portal/internal/reports"
)

// Options say whose reports to write.
type Options struct {
	Config *rest.Config
	// Node is the Node's name, Part one of reports.Parts.
	Node, Part string
	Version    string
	// Status is what to say. It is asked every second, and must be cheap.
	Status func() reports.Status
	Log    *slog.Logger

	Pacing reports.Pacing        // DefaultPacing if zero
	Clock  clock.WithTicker      // the wall clock if nil
	Wrote  func(*reports.Report) // is called after each write, if not nil
}

const (
	askInterval    = time.Second
	requestTimeout = 10 * time.Second
	// minBackoff and maxBackoff are about writes that fail; denied is how long to do without after the API said that it has no reports for
	// us, and nodeless after it had no Node.
	minBackoff, maxBackoff = 5 * time.Second, 5 * time.Minute
	denied                 = 10 * time.Minute
	nodeless               = 30 * time.Second
	// establishing is how long an API server takes to serve what a new definition defines.
	establishing = 3 * time.Second
)

var (
	errNoNode       = errors.New("the API has no Node of this name")
	errNoDefinition = errors.New("the API has no NodeReports")
	errInstalled    = errors.New("the definition of NodeReports was installed just now")
)

// Publisher writes one report, again and again.
type Publisher struct {
	Options
	api     *rest.RESTClient
	pace    reports.Pace
	started time.Time
	state   reports.State
	since   time.Time

	version  string    // resource version of what was last written; empty: not known
	owner    types.UID // of the Node
	notUntil time.Time
	backoff  time.Duration
	reported string // the last reason for doing without
}

// New makes a publisher. It starts nothing.
func New(o Options) (*Publisher, error) {
	if o.Clock == nil {
		o.Clock = clock.RealClock{}
	}
	if o.Pacing == (reports.Pacing{}) {
		o.Pacing = reports.DefaultPacing
	}
	api, err := client(o.Config)
	if err != nil {
		return nil, err
	}
	hash := fnv.New32a()
	_, _ = hash.Write([]byte(reports.Name(o.Node, o.Part))) // never fails
	return &Publisher{
		Options: o, api: api, started: o.Clock.Now(), backoff: minBackoff,
		pace: reports.Pace{Pacing: o.Pacing, Jitter: float64(hash.Sum32()) / math.MaxUint32},
	}, nil
}

// client speaks JSON, and is limited by nobody but the server.
func client(config *rest.Config) (*rest.RESTClient, error) {
	config = rest.CopyConfig(config)
	config.QPS, config.WarningHandler = -1, rest.NoWarnings{}
	config.ContentConfig = rest.ContentConfig{NegotiatedSerializer: scheme.Codecs.WithoutConversion(), ContentType: "application/json"}
	return rest.UnversionedRESTClientFor(config)
}

// Run writes until the context ends.
func (p *Publisher) Run(ctx context.Context) {
	ticker := p.Clock.NewTicker(askInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C():
			p.step(ctx)
		}
	}
}

// step asks for the status and writes it if it is due.
func (p *Publisher) step(ctx context.Context) {
	now := p.Clock.Now()
	s := p.Status()
	p.complete(now, &s)
	if now.Before(p.notUntil) || !p.pace.Due(now, &s) {
		return
	}
	err := p.write(ctx, &s)
	if ctx.Err() != nil {
		return
	}
	now = p.Clock.Now()
	if err == nil {
		p.pace.Wrote(now, &s)
		p.backoff, p.reported = minBackoff, ""
		return
	}
	p.failed(now, err)
}

func (p *Publisher) complete(now time.Time, s *reports.Status) {
	if s.State != p.state {
		p.state, p.since = s.State, now
	}
	// Times in the API have no fractions: what is compared must not have any either.
	s.Since, s.Started, s.Updated = second(p.since), second(p.started), second(now)
	s.Version = p.Version
	s.Trim()
}

func second(t time.Time) metav1.Time { return metav1.NewTime(t.UTC().Truncate(time.Second)) }

// failed decides when to try again, and logs what is new.
func (p *Publisher) failed(now time.Time, err error) {
	wait, log := p.backoff, p.Log.Debug
	switch {
	case errors.Is(err, errInstalled):
		p.Log.Info("the definition of NodeReports was installed")
		p.notUntil = now.Add(establishing)
		return
	case errors.Is(err, errNoNode):
		wait = nodeless
	case errors.Is(err, errNoDefinition) || apierrors.IsForbidden(err):
		wait, log = denied, p.Log.Info
	default:
		// Spread over nodes: those that failed together, because the server has too much to do, do not all come back together.
		wait = wait/2 + time.Duration(p.pace.Jitter*float64(wait))
		p.backoff = min(2*p.backoff, maxBackoff)
	}
	if reason := err.Error(); reason != p.reported {
		p.reported = reason
		log("this part does not report to the API", "part", p.Part, "node", p.Node, "why", err, "retryIn", wait)
	}
	p.notUntil = now.Add(wait)
}

// write creates or replaces the report.
func (p *Publisher) write(ctx context.Context, s *reports.Status) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	if p.version != "" {
		err := p.put(ctx, s)
		switch {
		case apierrors.IsConflict(err):
			if err = p.find(ctx); err == nil {
				err = p.put(ctx, s)
			}
		case apierrors.IsNotFound(err):
			p.version, p.owner = "", "" // with its Node, perhaps, which may be another one now
		}
		if p.version != "" {
			return err
		}
	}
	err := p.create(ctx, s)
	if apierrors.IsAlreadyExists(err) { // of an earlier process
		if err = p.find(ctx); err == nil {
			err = p.put(ctx, s)
		}
	}
	if apierrors.IsNotFound(err) {
		return p.install(ctx)
	}
	return err
}

// find reads the resource version of the report that is there.
func (p *Publisher) find(ctx context.Context) error {
	data, err := p.api.Get().AbsPath(reports.APIPath, reports.Name(p.Node, p.Part)).Do(ctx).Raw()
	if err != nil {
		return err
	}
	return p.wrote(data)
}

func (p *Publisher) put(ctx context.Context, s *reports.Status) error {
	return p.send(ctx, p.api.Put().AbsPath(reports.APIPath, reports.Name(p.Node, p.Part)), s)
}

func (p *Publisher) create(ctx context.Context, s *reports.Status) error {
	p.version = ""
	return p.send(ctx, p.api.Post().AbsPath(reports.APIPath), s)
}

func (p *Publisher) send(ctx context.Context, request *rest.Request, s *reports.Status) error {
	if err := p.findOwner(ctx); err != nil {
		return err
	}
	report := reports.Report{
		TypeMeta: metav1.TypeMeta{APIVersion: reports.Group + "/" + reports.Version, Kind: reports.Kind},
		ObjectMeta: metav1.ObjectMeta{
			Name: reports.Name(p.Node, p.Part), ResourceVersion: p.version, Labels: map[string]string{reports.PartLabel: p.Part}, ManagedFields: reports.NoManagers(),
			// The report goes when the Node goes.
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: p.Node, UID: p.owner}},
		},
		Node: p.Node, Part: p.Part, Status: *s,
	}
	body, err := json.Marshal(&report)
	if err != nil {
		return err
	}
	data, err := request.Body(body).SetHeader("Content-Type", "application/json").Do(ctx).Raw()
	if err != nil {
		return err
	}
	if err := p.wrote(data); err != nil {
		return err
	}
	if p.Wrote != nil {
		p.Wrote(&report)
	}
	return nil
}

func (p *Publisher) wrote(answer []byte) error {
	r, err := reports.Parse(answer)
	if err != nil {
		return fmt.Errorf("read the API's answer: %w", err)
	}
	p.version = r.ResourceVersion
	return nil
}

// findOwner looks for the Node: with a list, which all parts may.
func (p *Publisher) findOwner(ctx context.Context) error {
	if p.owner != "" {
		return nil
	}
	var list metav1.PartialObjectMetadataList
	data, err := p.api.Get().AbsPath("/api/v1/nodes").Param("fieldSelector", "metadata.name="+p.Node).
		SetHeader("Accept", "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json").Do(ctx).Raw()
	if err != nil {
		return err
	}
	if err := json.Unmarshal(data, &list); err != nil {
		return fmt.Errorf("read the API's answer: %w", err)
	}
	if len(list.Items) != 1 {
		return errNoNode
	}
	p.owner = list.Items[0].UID
	return nil
}

// install makes the definition.
func (p *Publisher) install(ctx context.Context) error {
	var code int
	err := p.api.Post().AbsPath(DefinitionsPath).Body(reports.Definition).SetHeader("Content-Type", "application/json").Do(ctx).StatusCode(&code).Error()
	switch {
	case err == nil || code == http.StatusConflict: // another part was faster
		return errInstalled
	case apierrors.IsForbidden(err) || apierrors.IsNotFound(err):
		return fmt.Errorf("%w, and this account may not install them: see portal explain's documentation", errNoDefinition)
	}
	return err
}

// DefinitionsPath is where definitions are made.
const DefinitionsPath = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
