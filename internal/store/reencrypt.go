package store

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/storage/value"
)

// Reencryption is how far the rewriting of everything that is encrypted in another way than new values has come.
type Reencryption struct {
	// Total is how many values there were at the start, of which Seen have been looked at and Rewritten written again.
	Total     int64 `json:"total"`
	Seen      int64 `json:"seen"`
	Rewritten int64 `json:"rewritten"`
	// Unreadable are values that can't be decrypted, and stay as they are.
	Unreadable []string `json:"unreadable,omitempty"`
	// Done says that this is the end; Left are the kinds that are stale after it, and Error says why it ended early.
	Done  bool    `json:"done"`
	Left  []Usage `json:"left,omitempty"`
	Error string  `json:"error,omitempty"`
}

const (
	// rewritesAtOnce hides the time that etcd takes to write to its disk: it groups what comes together.
	rewritesAtOnce = 16
	// rewriteTries bounds how often a value that others change meanwhile is tried.
	rewriteTries = 20
)

// Reencrypt writes every object and claim again that is stored in another way than new ones are, without changing it. It
// tells of its progress after each page. Then it drops old revisions, in which what was replaced still is, and the registration
// of keys that were used before; resources are those that are encrypted now.
func (o *RESTOptions) Reencrypt(ctx context.Context, resources []schema.GroupResource, tell func(Reencryption)) (Reencryption, error) {
	var now Reencryption
	count, err := o.Store.client.KV.Get(ctx, Prefix+"/", clientv3.WithPrefix(), clientv3.WithCountOnly())
	if err != nil {
		return now, fmt.Errorf("count keys: %w", err)
	}
	now.Total = count.Count
	err = o.each(ctx, func(kvs []*mvccpb.KeyValue) error {
		err := o.rewritePage(ctx, kvs, &now)
		now.Seen += int64(len(kvs))
		tell(now)
		return err
	})
	if err != nil {
		return now, err
	}
	usage, err := o.Survey(ctx, false)
	if err != nil {
		return now, err
	}
	for _, u := range usage {
		if u.Stale {
			now.Left = append(now.Left, u)
		}
	}
	if err := o.ForgetKeys(ctx, usage, resources); err != nil {
		return now, err
	}
	if now.Rewritten > 0 {
		err = o.Store.forget(ctx)
	}
	now.Done = true
	return now, err
}

// forget drops old revisions, and what is left of them in the file of the embedded etcd. An external etcd is defragmented
// on command only, because it answers nothing meanwhile.
func (s *Store) forget(ctx context.Context) error {
	if s.embedded != nil {
		return s.space.onCommand(ctx)
	}
	return s.space.compact(ctx)
}

func (o *RESTOptions) rewritePage(ctx context.Context, kvs []*mvccpb.KeyValue, now *Reencryption) error {
	var mu sync.Mutex
	var errs []error
	var group sync.WaitGroup
	places := make(chan struct{}, rewritesAtOnce)
	for _, kv := range kvs {
		resource, ok := o.ResourceAt(string(kv.Key))
		if !ok {
			continue
		}
		into := o.writeHeader(ctx, resource)
		if into == nil {
			mu.Lock()
			errs = append(errs, fmt.Errorf("%s can't be encrypted: their key management service does not answer", resource))
			mu.Unlock()
			break
		}
		if headerOf(kv.Value) == *into {
			continue
		}
		places <- struct{}{}
		group.Go(func() {
			defer func() { <-places }()
			rewritten, err := o.rewrite(ctx, kv, *into)
			mu.Lock()
			defer mu.Unlock()
			var damaged *unreadableError
			switch {
			case errors.As(err, &damaged):
				now.Unreadable = append(now.Unreadable, damaged.key)
			case err != nil:
				errs = append(errs, err)
			case rewritten:
				now.Rewritten++
			}
		})
	}
	group.Wait()
	return errors.Join(errs...)
}

type unreadableError struct {
	key string
	err error
}

func (e *unreadableError) Error() string { return fmt.Sprintf("decrypt %s: %v", e.key, e.err) }

// rewrite stores a value with the header into, if nobody else does it or removes the value.
func (o *RESTOptions) rewrite(ctx context.Context, kv *mvccpb.KeyValue, into Header) (bool, error) {
	key := string(kv.Key)
	transformer, dataCtx := o.transformerAt(key), value.DefaultContext(key)
	for range rewriteTries {
		header := headerOf(kv.Value)
		if header == into {
			return false, nil
		}
		plain, _, err := transformer.TransformFromStorage(ctx, kv.Value, dataCtx)
		if err == nil && header.Provider == providerCBC && !plausible(plain) {
			err = errors.New("what is decrypted is no object")
		}
		switch {
		case err != nil && header.Provider == ProviderKMS:
			return false, fmt.Errorf("decrypt %s: %w", key, err) // the service may come back
		case err != nil:
			return false, &unreadableError{key, err}
		}
		sealed, err := transformer.TransformToStorage(ctx, plain, dataCtx)
		if err != nil {
			return false, fmt.Errorf("encrypt %s: %w", key, err)
		}
		if err := o.Store.space.admit(ctx, len(key)+len(sealed)); err != nil {
			return false, err
		}
		resp, err := o.Store.client.KV.Txn(ctx).If(clientv3.Compare(clientv3.ModRevision(key), "=", kv.ModRevision)).
			Then(clientv3.OpPut(key, string(sealed), clientv3.WithIgnoreLease())).Else(clientv3.OpGet(key)).Commit()
		if err != nil {
			return false, o.Store.space.explain(fmt.Errorf("write %s: %w", key, err))
		}
		if resp.Succeeded {
			return true, nil
		}
		current := resp.Responses[0].GetResponseRange().GetKvs()
		if len(current) == 0 {
			return false, nil
		}
		kv = current[0]
	}
	return false, fmt.Errorf("%s is changed all the time: run it again", key)
}
