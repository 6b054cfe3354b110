package store

import (
	"context"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"k8s.io/component-base/tracing"
)

// traceCalls records the calls to an etcd outside as spans, which that etcd continues if it traces too.
func traceCalls(provider trace.TracerProvider) grpc.DialOption {
	return grpc.WithStatsHandler(otelgrpc.NewClientHandler(otelgrpc.WithPropagators(tracing.Propagators()), otelgrpc.WithTracerProvider(provider)))
}

// tracedKV records the calls to the embedded etcd, which are none of gRPC, as spans with the names that they have there.
type tracedKV struct{ clientv3.KV }

const kvService = "etcdserverpb.KV"

// span is part of the context's; without one that is recorded, nothing is.
func span(ctx context.Context, method string) (context.Context, func(error)) {
	parent := trace.SpanFromContext(ctx)
	if !parent.IsRecording() {
		return ctx, func(error) {}
	}
	ctx, s := parent.TracerProvider().Tracer("portal/internal/store").Start(ctx, kvService+"/"+method, trace.WithAttributes(
		attribute.String("rpc.service", kvService), attribute.String("rpc.method", method)))
	return ctx, func(err error) {
		if err != nil {
			s.RecordError(err)
			s.SetStatus(codes.Error, err.Error())
		}
		s.End()
	}
}

func (t tracedKV) Get(ctx context.Context, key string, opts ...clientv3.OpOption) (*clientv3.GetResponse, error) {
	ctx, end := span(ctx, "Range")
	resp, err := t.KV.Get(ctx, key, opts...)
	end(err)
	return resp, err
}

func (t tracedKV) Put(ctx context.Context, key, value string, opts ...clientv3.OpOption) (*clientv3.PutResponse, error) {
	ctx, end := span(ctx, "Put")
	resp, err := t.KV.Put(ctx, key, value, opts...)
	end(err)
	return resp, err
}

func (t tracedKV) Delete(ctx context.Context, key string, opts ...clientv3.OpOption) (*clientv3.DeleteResponse, error) {
	ctx, end := span(ctx, "DeleteRange")
	resp, err := t.KV.Delete(ctx, key, opts...)
	end(err)
	return resp, err
}

func (t tracedKV) Txn(ctx context.Context) clientv3.Txn {
	return &committing{t.KV.Txn(ctx), func(txn clientv3.Txn) (*clientv3.TxnResponse, error) {
		_, end := span(ctx, "Txn")
		resp, err := txn.Commit()
		end(err)
		return resp, err
	}}
}
