package apiserver

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"sync"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/sdk/resource"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/admission"
	apiserverapi "k8s.io/apiserver/pkg/apis/apiserver"
	apiserverinstall "k8s.io/apiserver/pkg/apis/apiserver/install"
	genericserver "k8s.io/apiserver/pkg/server"
	"k8s.io/component-base/tracing"
	tracingapi "k8s.io/component-base/tracing/api/v1"
	"k8s.io/klog/v2"

	"portal/internal/configfile"
)

// tracingFlag names the file in errors.
const tracingFlag = "--tracing-config-file"

// TracingOptions say whether requests are traced, and where their spans go.
type TracingOptions struct {
	// ConfigFile is a TracingConfiguration of apiserver.config.k8s.io; none traces nothing.
	ConfigFile string
}

func (o TracingOptions) validate() error {
	_, err := o.read()
	return err
}

// read reads the file and names the field and line of each mistake. It connects to nothing, and is nil without a file.
func (o TracingOptions) read() (*tracingapi.TracingConfiguration, error) {
	if o.ConfigFile == "" {
		return nil, nil
	}
	data, err := os.ReadFile(o.ConfigFile)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", tracingFlag, err)
	}
	wrong := func(err error) error { return configfile.Mistakes(tracingFlag+" "+o.ConfigFile, data, err) }
	scheme := runtime.NewScheme()
	apiserverinstall.Install(scheme)
	object, kind, err := serializer.NewCodecFactory(scheme, serializer.EnableStrict).UniversalDecoder().Decode(data, nil, nil)
	if err != nil {
		return nil, wrong(err)
	}
	config, ok := object.(*apiserverapi.TracingConfiguration)
	if !ok {
		return nil, wrong(fmt.Errorf("it is a %s, and must be a TracingConfiguration of %s", kind.Kind, apiserverapi.GroupName))
	}
	errs := tracingapi.ValidateTracingConfiguration(&config.TracingConfiguration, nil, nil)
	if config.Endpoint != nil && *config.Endpoint == "" {
		errs = append(errs, field.Invalid(field.NewPath("endpoint"), "", "must be the host:port of a collector; without this field it is localhost:4317"))
	}
	return &config.TracingConfiguration, wrong(errs.ToAggregate())
}

// tracerStop is how long the end of the server waits for a collector to take the last spans.
const tracerStop = 2 * time.Second

// tracer makes spans, and ends in time.
type tracer struct{ tracing.TracerProvider }

// Shutdown exports what is left. A collector that does not answer must not keep the server from ending.
func (t tracer) Shutdown(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, tracerStop)
	defer cancel()
	if err := t.TracerProvider.Shutdown(ctx); err != nil && !errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return nil
}

// open makes what the server records spans with; nil if it traces nothing. The collector need not be there yet.
func (o TracingOptions) open(ctx context.Context, port uint16) (tracing.TracerProvider, error) {
	config, err := o.read()
	if config == nil || err != nil {
		return nil, err
	}
	otel.SetErrorHandler(&exportErrors{})
	instance := fmt.Sprintf(":%d", port)
	if host, err := os.Hostname(); err == nil {
		instance = host + instance
	}
	provider, err := tracing.NewProvider(ctx, config, nil, []resource.Option{resource.WithAttributes(
		attribute.String("service.name", "apiserver"), attribute.String("service.instance.id", instance))})
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", tracingFlag, o.ConfigFile, err)
	}
	return tracer{provider}, nil
}

// exportErrorPeriod is how often it is logged that spans could not be exported: a collector that is away is so for every batch.
const exportErrorPeriod = time.Minute

// exportErrors logs what OpenTelemetry reports.
type exportErrors struct {
	mu   sync.Mutex
	last time.Time
}

// Handle logs an error unless another one has just been logged.
func (e *exportErrors) Handle(err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if time.Since(e.last) < exportErrorPeriod {
		return
	}
	e.last = time.Now()
	klog.ErrorS(err, "spans could not be exported", "next", exportErrorPeriod)
}

// openTracer makes what the server and its store record spans with, if they do.
func (s *Server) openTracer(ctx context.Context) (err error) {
	if s.tracer, err = s.opts.Tracing.open(ctx, s.opts.port); err == nil && s.tracer != nil {
		s.opts.Store.Tracer = s.tracer
	}
	return err
}

// trace has requests, and what the server asks of itself, recorded as spans.
func (s *Server) trace(config *genericserver.Config) {
	if s.tracer == nil {
		return
	}
	config.TracerProvider = s.tracer
	wrap := tracing.WrapperFor(s.tracer)
	config.LoopbackClientConfig.Wrap(func(below http.RoundTripper) http.RoundTripper { return tracedTransport{wrap(below), below} })
}

// tracedTransport lets those who close idle connections find them, which OpenTelemetry's transport hides.
type tracedTransport struct {
	http.RoundTripper
	below http.RoundTripper
}

var _ utilnet.RoundTripperWrapper = tracedTransport{}

// WrappedRoundTripper is what has the connections.
func (t tracedTransport) WrappedRoundTripper() http.RoundTripper { return t.below }

// traceAdmission has admission recorded as spans, once it is put together.
func (s *Server) traceAdmission(config *genericserver.Config) {
	if s.tracer != nil {
		config.AdmissionControl = tracedAdmission{config.AdmissionControl}
	}
}

// tracerOrNoop is for libraries that need one.
func (s *Server) tracerOrNoop() tracing.TracerProvider {
	if s.tracer == nil {
		return tracing.NewNoopTracerProvider()
	}
	return s.tracer
}

// slowAdmission is how long admission may take before the steps of a slow request in the log name it.
const slowAdmission = 500 * time.Millisecond

// tracedAdmission records both halves of admission as spans of their request. Webhooks have spans of their own within them.
type tracedAdmission struct{ admission.Interface }

var (
	_ admission.MutationInterface   = tracedAdmission{}
	_ admission.ValidationInterface = tracedAdmission{}
)

func (t tracedAdmission) span(ctx context.Context, name string, a admission.Attributes) (context.Context, func(error)) {
	ctx, span := tracing.Start(ctx, name, attribute.String("operation", string(a.GetOperation())),
		attribute.String("resource", a.GetResource().GroupResource().String()), attribute.String("subresource", a.GetSubresource()))
	return ctx, func(err error) {
		if err != nil {
			span.RecordError(err)
		}
		span.End(slowAdmission)
	}
}

// Admit lets plugins change the object.
func (t tracedAdmission) Admit(ctx context.Context, a admission.Attributes, o admission.ObjectInterfaces) (err error) {
	plugins, ok := t.Interface.(admission.MutationInterface)
	if !ok {
		return nil
	}
	ctx, end := t.span(ctx, "Mutating admission", a)
	defer func() { end(err) }()
	return plugins.Admit(ctx, a, o)
}

// Validate lets plugins refuse the request.
func (t tracedAdmission) Validate(ctx context.Context, a admission.Attributes, o admission.ObjectInterfaces) (err error) {
	plugins, ok := t.Interface.(admission.ValidationInterface)
	if !ok {
		return nil
	}
	ctx, end := t.span(ctx, "Validating admission", a)
	defer func() { end(err) }()
	return plugins.Validate(ctx, a, o)
}
