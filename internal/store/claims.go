package store

import (
	"context"
	"errors"
	"fmt"
	"slices"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/kubernetes"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/storage"
)

// Claim is a key that at most one object may hold, written and freed in the transaction that writes its object.
type Claim struct {
	// Key below the store's prefix.
	Key string
	// Encode gives what is stored at the key, before encryption; it is called only when the claim is new.
	Encode func() ([]byte, error)
}

// Claimer derives from an object, as it is stored, every claim that it holds. It must be a pure function of the object.
type Claimer func(obj runtime.Object) []Claim

// ClaimedError says that a claim belongs to another object. Nothing was written.
type ClaimedError struct{ Key string }

func (e *ClaimedError) Error() string { return fmt.Sprintf("%s is claimed by another object", e.Key) }

// Claimed finds out whether err says that a claim is taken, and which.
func Claimed(err error) (key string, ok bool) {
	var claimed *ClaimedError
	if errors.As(err, &claimed) {
		return claimed.Key, true
	}
	return "", false
}

// TooManyClaimsError says that etcd allows fewer operations in a transaction than an object's new claims need. Nothing was
// written. It happens with an etcd outside only: the embedded one allows as many as there are ports.
type TooManyClaimsError struct {
	// Ops is how many operations the transaction has.
	Ops   int
	Cause error
}

func (e *TooManyClaimsError) Error() string {
	return fmt.Sprintf("etcd refuses a transaction of %d operations: start it with --max-txn-ops=%d (%v)", e.Ops, max(MaxTxnOps, e.Ops+2*groupSize), e.Cause)
}

// Unwrap is what etcd said.
func (e *TooManyClaimsError) Unwrap() error { return e.Cause }

// changes are the claims that come and go with one write. It travels in the context from the storage wrapper, which
// knows the objects, to the key-value wrapper, which issues the transaction.
type changes struct {
	take []Claim
	free []string
	seal sealer
}

// sealer encrypts a value for the key that it is stored at.
type sealer func(ctx context.Context, key string, plain []byte) ([]byte, error)

type changesKey struct{}

// between are the changes that lead from the claims of old to those of new; either may be nil.
func (c Claimer) between(old, new runtime.Object) changes {
	var out changes
	held := map[string]bool{}
	if old != nil {
		for _, claim := range c(old) {
			held[claim.Key] = true
		}
	}
	if new != nil {
		for _, claim := range c(new) {
			if held[claim.Key] {
				delete(held, claim.Key)
				continue
			}
			out.take = append(out.take, claim)
		}
	}
	for key := range held {
		out.free = append(out.free, key)
	}
	return out
}

// claiming is a storage.Interface that sits between the watch cache and etcd. Every write passes through it,
// including those of finalizers, deletions of collections and server-side apply, so that no path can forget the claims.
type claiming struct {
	storage.Interface
	claims Claimer
	// versioner tells whether an object handed to an update exists already.
	versioner storage.Versioner
	seal      sealer
}

func (s *claiming) between(old, new runtime.Object) changes {
	delta := s.claims.between(old, new)
	delta.seal = s.seal
	return delta
}

func (s *claiming) Create(ctx context.Context, key string, obj, out runtime.Object, ttl uint64) error {
	delta := s.between(nil, obj)
	return s.Interface.Create(context.WithValue(ctx, changesKey{}, &delta), key, obj, out, ttl)
}

func (s *claiming) Delete(ctx context.Context, key string, out runtime.Object, preconditions *storage.Preconditions,
	validate storage.ValidateObjectFunc, cached runtime.Object, opts storage.DeleteOptions,
) error {
	delta := &changes{}
	ctx = context.WithValue(ctx, changesKey{}, delta)
	// Validation runs on every try, with the object as it will be deleted.
	return s.Interface.Delete(ctx, key, out, preconditions, func(ctx context.Context, obj runtime.Object) error {
		*delta = s.between(obj, nil)
		return validate(ctx, obj)
	}, cached, opts)
}

func (s *claiming) GuaranteedUpdate(ctx context.Context, key string, out runtime.Object, ignoreNotFound bool,
	preconditions *storage.Preconditions, try storage.UpdateFunc, cached runtime.Object,
) error {
	delta := &changes{}
	ctx = context.WithValue(ctx, changesKey{}, delta)
	return s.Interface.GuaranteedUpdate(ctx, key, out, ignoreNotFound, preconditions,
		func(old runtime.Object, meta storage.ResponseMeta) (runtime.Object, *uint64, error) {
			before := old
			if rv, err := s.versioner.ObjectResourceVersion(old); err == nil && rv == 0 {
				before = nil // an update that creates
			} else {
				before = old.DeepCopyObject() // try may change old in place
			}
			updated, ttl, err := try(old, meta)
			if err == nil {
				*delta = s.between(before, updated)
			}
			return updated, ttl, err
		}, cached)
}

// claimingKV is etcd's client as the store uses it, with the claims of the context written in the same transaction.
type claimingKV struct {
	kubernetes.Interface
	kv     clientv3.KV
	prefix string
	space  *space
}

func (c *claimingKV) OptimisticPut(ctx context.Context, key string, value []byte, revision int64,
	opts kubernetes.PutOptions,
) (kubernetes.PutResponse, error) {
	if err := c.space.admit(ctx, len(key)+len(value)); err != nil {
		return kubernetes.PutResponse{}, err
	}
	delta, _ := ctx.Value(changesKey{}).(*changes)
	if delta.empty() {
		resp, err := c.Interface.OptimisticPut(ctx, key, value, revision, opts)
		return resp, c.space.explain(err)
	}
	put := clientv3.OpPut(key, string(value), clientv3.WithLease(opts.LeaseID))
	resp, kv, err := c.commit(ctx, key, revision, put, delta)
	if err != nil {
		return kubernetes.PutResponse{}, c.space.explain(err)
	}
	return kubernetes.PutResponse{KV: kv, Succeeded: resp.Succeeded, Revision: resp.Header.Revision}, nil
}

func (c *claimingKV) OptimisticDelete(ctx context.Context, key string, revision int64, opts kubernetes.DeleteOptions,
) (kubernetes.DeleteResponse, error) {
	delta, _ := ctx.Value(changesKey{}).(*changes)
	if delta.empty() {
		return c.Interface.OptimisticDelete(ctx, key, revision, opts)
	}
	resp, kv, err := c.commit(ctx, key, revision, clientv3.OpDelete(key), delta)
	if err != nil {
		return kubernetes.DeleteResponse{}, err
	}
	return kubernetes.DeleteResponse{KV: kv, Succeeded: resp.Succeeded, Revision: resp.Header.Revision}, nil
}

func (d *changes) empty() bool { return d == nil || len(d.take) == 0 && len(d.free) == 0 }

// groupSize is how many operations that free claims are grouped at most. Groups of groups of groups hold more of them than
// there are ports, and fit into the 128 operations that etcd allows by default: one for the object, and three levels.
const groupSize = 41

// frees are the operations that free claims. Many of them are grouped into transactions within the transaction: etcd limits
// the operations of a group together with those around it, and not the sum of all groups. So an object can always be
// deleted, however many claims it came to hold. New claims can't be grouped, since a group's conditions don't stop the rest.
func (c *claimingKV) frees(names []string) []clientv3.Op {
	ops := make([]clientv3.Op, len(names))
	for i, name := range names {
		ops[i] = clientv3.OpDelete(c.prefix + name)
	}
	for len(ops) > groupSize {
		var groups []clientv3.Op
		for group := range slices.Chunk(ops, groupSize) {
			groups = append(groups, clientv3.OpTxn(nil, group, nil))
		}
		ops = groups
	}
	return ops
}

// commit writes an object and its claims, all or nothing. If the object's revision moved, the response says so and
// carries the object, so that the store tries again; if a claim is taken, the error names it.
func (c *claimingKV) commit(ctx context.Context, key string, revision int64, op clientv3.Op, delta *changes,
) (*clientv3.TxnResponse, *keyValue, error) {
	conditions := []clientv3.Cmp{clientv3.Compare(clientv3.ModRevision(key), "=", revision)}
	then := []clientv3.Op{op}
	otherwise := []clientv3.Op{clientv3.OpGet(key)}
	for _, claim := range delta.take {
		value, err := claim.Encode()
		if err != nil {
			return nil, nil, fmt.Errorf("claim %s: %w", claim.Key, err)
		}
		full := c.prefix + claim.Key
		if value, err = delta.seal(ctx, full, value); err != nil {
			return nil, nil, fmt.Errorf("claim %s: %w", claim.Key, err)
		}
		conditions = append(conditions, clientv3.Compare(clientv3.CreateRevision(full), "=", 0))
		then = append(then, clientv3.OpPut(full, string(value)))
		otherwise = append(otherwise, clientv3.OpGet(full, clientv3.WithCountOnly()))
	}
	then = append(then, c.frees(delta.free)...)
	resp, err := c.kv.Txn(ctx).If(conditions...).Then(then...).Else(otherwise...).Commit()
	if err != nil {
		return nil, nil, explainTxn(err, len(then))
	}
	if resp.Succeeded {
		return resp, nil, nil
	}
	var current *keyValue
	if kvs := resp.Responses[0].GetResponseRange().Kvs; len(kvs) == 1 {
		current = kvs[0]
	}
	if current.GetModRevision() != revision {
		return resp, current, nil
	}
	for i, claim := range delta.take {
		if resp.Responses[i+1].GetResponseRange().Count > 0 {
			return nil, nil, &ClaimedError{Key: claim.Key}
		}
	}
	return nil, nil, fmt.Errorf("etcd refused the transaction on %s and gave no reason", key)
}
