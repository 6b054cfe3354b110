package store

import (
	"context"
	"fmt"
	"strings"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/storage/value"
	"k8s.io/apiserver/pkg/storage/value/encrypt/identity"
)

// path is where a resource is kept below Prefix. Resources of the groups in Unqualified are kept under their name
// alone, as Kubernetes keeps its own; all others under their group's name too, as it keeps custom resources: two groups
// may have resources of the same name.
func (o *RESTOptions) path(resource schema.GroupResource) string {
	if path, ok := o.Paths[resource]; ok {
		return path
	}
	if resource.Group == "" || o.Unqualified[resource.Group] {
		return resource.Resource
	}
	return resource.Group + "/" + resource.Resource
}

// register refuses a path that is another resource's, or within it.
func (o *RESTOptions) register(resource schema.GroupResource) (string, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	path := o.path(resource)
	for other, theirs := range o.registered {
		if other != resource && (strings.HasPrefix(path+"/", theirs+"/") || strings.HasPrefix(theirs+"/", path+"/")) {
			return "", fmt.Errorf("%s and %s would both be kept below %s/%s", resource, other, Prefix, path)
		}
	}
	if o.registered == nil {
		o.registered = map[schema.GroupResource]string{}
	}
	o.registered[resource] = path
	return path, nil
}

// transformer is that of a resource: what stands between its objects and the bytes in etcd.
func (o *RESTOptions) transformer(resource schema.GroupResource) value.Transformer {
	if o.Transformers == nil {
		return identity.NewEncryptCheckTransformer()
	}
	return o.Transformers.TransformerForResource(resource)
}

// ResourceAt is the resource whose transformer a key's value goes through: that of the object, or the one that a claim is
// kept with. What Portal keeps for itself (servers, authorities) has none.
func (o *RESTOptions) ResourceAt(key string) (schema.GroupResource, bool) {
	rest, ok := strings.CutPrefix(key, Prefix+"/")
	if !ok {
		return schema.GroupResource{}, false
	}
	for path, resource := range o.ClaimPaths {
		if strings.HasPrefix("/"+rest, path) {
			return resource, true
		}
	}
	first, rest, _ := strings.Cut(rest, "/")
	second, _, _ := strings.Cut(rest, "/")
	if resource, ok := o.Places[first+"/"+second]; ok {
		return resource, true
	}
	if resource, ok := o.Places[first]; ok {
		return resource, true
	}
	// A group that is not one of Places has its own name in front, which has a dot.
	if strings.Contains(first, ".") && second != "" {
		return schema.GroupResource{Group: first, Resource: second}, true
	}
	return schema.GroupResource{}, false
}

// transformerAt is the transformer of what is kept at a key.
func (o *RESTOptions) transformerAt(key string) value.Transformer {
	if resource, ok := o.ResourceAt(key); ok {
		return o.transformer(resource)
	}
	return identity.NewEncryptCheckTransformer()
}

// seal makes of a plain value what is stored at the key. The key is authenticated with it, so that nobody can move a
// value to another key.
func (o *RESTOptions) seal(ctx context.Context, key string, plain []byte) ([]byte, error) {
	return o.transformerAt(key).TransformToStorage(ctx, plain, value.DefaultContext(key))
}

// KV reads and writes plain values, whatever the transformers make of them in etcd. It is for what reads etcd beside the
// API: Get, and Put in transactions.
func (o *RESTOptions) KV() clientv3.KV {
	if o.Transformers == nil {
		return o.Store.client.KV
	}
	return plainKV{o.Store.client.KV, o}
}

type plainKV struct {
	clientv3.KV
	options *RESTOptions
}

func (p plainKV) Get(ctx context.Context, key string, opts ...clientv3.OpOption) (*clientv3.GetResponse, error) {
	resp, err := p.KV.Get(ctx, key, opts...)
	if err != nil {
		return nil, err
	}
	for _, kv := range resp.Kvs {
		if err := p.open(ctx, kv); err != nil {
			return nil, err
		}
	}
	return resp, nil
}

// open makes a stored value plain. One that is damaged stays as it is, for the reader to complain about; one whose key
// management service does not answer is an error, because it may be sound.
func (p plainKV) open(ctx context.Context, kv *mvccpb.KeyValue) error {
	if len(kv.Value) == 0 {
		return nil // only keys were asked for
	}
	plain, _, err := p.options.transformerAt(string(kv.Key)).TransformFromStorage(ctx, kv.Value, value.DefaultContext(kv.Key))
	if err == nil {
		kv.Value = plain
	} else if headerOf(kv.Value).Provider == ProviderKMS {
		return fmt.Errorf("decrypt %s: %w", kv.Key, err)
	}
	return nil
}

func (p plainKV) Txn(ctx context.Context) clientv3.Txn {
	return &plainTxn{Txn: p.KV.Txn(ctx), ctx: ctx, options: p.options}
}

// plainTxn seals what Then puts.
type plainTxn struct {
	clientv3.Txn
	ctx     context.Context
	options *RESTOptions
	err     error
}

func (t *plainTxn) If(conditions ...clientv3.Cmp) clientv3.Txn {
	t.Txn = t.Txn.If(conditions...)
	return t
}

func (t *plainTxn) Then(ops ...clientv3.Op) clientv3.Txn {
	sealed := make([]clientv3.Op, len(ops))
	for i, op := range ops {
		sealed[i] = op
		if !op.IsPut() {
			continue
		}
		data, err := t.options.seal(t.ctx, string(op.KeyBytes()), op.ValueBytes())
		if err != nil {
			t.err = err
		}
		sealed[i].WithValueBytes(data)
	}
	t.Txn = t.Txn.Then(sealed...)
	return t
}

func (t *plainTxn) Commit() (*clientv3.TxnResponse, error) {
	if t.err != nil {
		return nil, t.err
	}
	return t.Txn.Commit()
}
