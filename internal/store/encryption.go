package store

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/protobuf/proto"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/storage/value"
	kmsv2 "k8s.io/apiserver/pkg/storage/value/encrypt/envelope/kmsv2/v2"
)

// Providers whose values are treated in a way of their own.
const (
	// ProviderIdentity stores values as they are.
	ProviderIdentity = "identity"
	// ProviderKMS encrypts with keys that only a key management service can decrypt.
	ProviderKMS = "kms"
	// providerCBC does not authenticate: a wrong key may give garbage instead of an error.
	providerCBC = "aescbc"
)

// Header is what a stored value says about how it is encrypted.
type Header struct {
	// Provider is secretbox, aesgcm, aescbc, kms or identity, as in the configuration.
	Provider string `json:"provider"`
	// Key is the name of the key, or of the key management service, whose own key has the KeyID.
	Key   string `json:"key,omitempty"`
	KeyID string `json:"keyID,omitempty"`
}

func (h Header) String() string {
	switch {
	case h.Provider == ProviderIdentity:
		return "plain"
	case h.KeyID != "":
		return fmt.Sprintf("%s %q (key ID %q)", h.Provider, h.Key, h.KeyID)
	case h.Provider == ProviderKMS:
		return fmt.Sprintf("%s %q", h.Provider, h.Key)
	}
	return fmt.Sprintf("%s key %q", h.Provider, h.Key)
}

var encryptedPrefix = []byte("k8s:enc:")

// headerOf reads the header of a stored value.
func headerOf(stored []byte) Header {
	rest, ok := bytes.CutPrefix(stored, encryptedPrefix)
	if !ok {
		return Header{Provider: ProviderIdentity}
	}
	parts := bytes.SplitN(rest, []byte(":"), 4) // provider, version, key, ciphertext
	out := Header{Provider: strings.ToValidUTF8(string(parts[0]), "?")}
	if len(parts) < 4 {
		return out
	}
	out.Key = strings.ToValidUTF8(string(parts[2]), "?")
	if out.Provider == ProviderKMS {
		var envelope kmsv2.EncryptedObject
		if proto.Unmarshal(parts[3], &envelope) == nil {
			out.KeyID = envelope.GetKeyID()
		}
	}
	return out
}

// Encryption is how the storage is encrypted.
type Encryption struct {
	// Config is the server's configuration file.
	Config string  `json:"config,omitempty"`
	Usage  []Usage `json:"usage"`
	// Problems say what is wrong beside values that can't be read.
	Problems []string `json:"problems,omitempty"`
}

// Usage says how values of a resource are stored: those with the same header.
type Usage struct {
	Resource string `json:"resource"`
	Header
	// Count is how many values there are, of which Claims are no objects but claims that are kept with them.
	Count  int `json:"count"`
	Claims int `json:"claims,omitempty"`
	// Stale says that new values are stored in another way, Into.
	Stale bool    `json:"stale,omitempty"`
	Into  *Header `json:"into,omitempty"`
	// Unreadable values can't be decrypted; Example is the key of one, and Reason says why.
	Unreadable int    `json:"unreadable,omitempty"`
	Example    string `json:"example,omitempty"`
	Reason     string `json:"reason,omitempty"`
	// read says that one could be decrypted.
	read bool
}

// Lost says that none of the values can be decrypted: the key is wrong or missing.
func (u *Usage) Lost() bool { return !u.read }

// fewTries is how many values are tried one after the other before a key looks wrong. Of the others every second, fourth,
// eighth ... is tried, in case that the first were damaged; of those of a key management service none, because one that does
// not answer costs its time-out for each.
const fewTries = 3

func (u *Usage) worthTrying(all bool) bool {
	switch {
	case u.Unreadable < fewTries:
		return all || !u.read
	case u.read:
		return all
	case u.Provider == ProviderKMS:
		return false
	}
	return all || u.Count&(u.Count-1) == 0
}

// pageSize is how many values are read at once.
const pageSize = 200

// each reads every value that goes through a transformer.
func (o *RESTOptions) each(ctx context.Context, page func([]*mvccpb.KeyValue) error) error {
	end := clientv3.GetPrefixRangeEnd(Prefix + "/")
	for from := Prefix + "/"; ; {
		resp, err := o.Store.client.KV.Get(ctx, from, clientv3.WithRange(end), clientv3.WithLimit(pageSize))
		if err != nil {
			return fmt.Errorf("read %s from etcd: %w", Prefix, err)
		}
		if err := page(resp.Kvs); err != nil {
			return err
		}
		if !resp.More || len(resp.Kvs) == 0 {
			return nil
		}
		from = string(resp.Kvs[len(resp.Kvs)-1].Key) + "\x00"
	}
}

// Survey says how everything is stored, sorted by resource. With all it decrypts every value; without, only until one of
// each kind could be: enough to know that the key is there and right.
func (o *RESTOptions) Survey(ctx context.Context, all bool) ([]Usage, error) {
	type kind struct {
		resource schema.GroupResource
		header   Header
	}
	found := map[kind]*Usage{}
	writes := map[schema.GroupResource]*Header{}
	err := o.each(ctx, func(kvs []*mvccpb.KeyValue) error {
		for _, kv := range kvs {
			resource, ok := o.ResourceAt(string(kv.Key))
			if !ok {
				continue
			}
			into, ok := writes[resource]
			if !ok {
				into = o.writeHeader(ctx, resource)
				writes[resource] = into
			}
			header := headerOf(kv.Value)
			usage := found[kind{resource, header}]
			if usage == nil {
				usage = &Usage{Resource: resource.String(), Header: header}
				if into != nil && *into != header {
					usage.Stale, usage.Into = true, into
				}
				found[kind{resource, header}] = usage
			}
			usage.Count++
			if o.isClaim(string(kv.Key)) {
				usage.Claims++
			}
			if !usage.worthTrying(all) {
				continue
			}
			if err := o.readable(ctx, resource, header, kv); err == nil {
				usage.read = true
			} else if usage.Unreadable++; usage.Unreadable == 1 {
				usage.Example, usage.Reason = string(kv.Key), err.Error()
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	out := make([]Usage, 0, len(found))
	for k, usage := range found {
		// All of a few may be damaged, although the key is right.
		usage.read = usage.read || usage.Unreadable > 0 && o.hasKey(ctx, k.resource, k.header)
		out = append(out, *usage)
	}
	slices.SortFunc(out, func(a, b Usage) int {
		return cmp.Or(cmp.Compare(a.Resource, b.Resource), cmp.Compare(a.Provider, b.Provider), cmp.Compare(a.Key, b.Key), cmp.Compare(a.KeyID, b.KeyID))
	})
	return out, nil
}

// isClaim says that a key is that of a claim which is no object.
func (o *RESTOptions) isClaim(key string) bool {
	for path := range o.ClaimPaths {
		if strings.HasPrefix(key, Prefix+path) {
			return true
		}
	}
	return false
}

// writeHeader is the header that new values of a resource get; nil if that is not known because its key management service
// does not answer.
func (o *RESTOptions) writeHeader(ctx context.Context, resource schema.GroupResource) *Header {
	sealed, err := o.transformer(resource).TransformToStorage(ctx, []byte("k8s\x00"), value.DefaultContext(Prefix))
	if err != nil {
		return nil
	}
	header := headerOf(sealed)
	return &header
}

func (o *RESTOptions) readable(ctx context.Context, resource schema.GroupResource, header Header, kv *mvccpb.KeyValue) error {
	plain, _, err := o.transformer(resource).TransformFromStorage(ctx, kv.Value, value.DefaultContext(kv.Key))
	if err == nil && header.Provider == providerCBC && !plausible(plain) {
		err = fmt.Errorf("what is decrypted is no object")
	}
	return err
}

// plausible says that a plain value begins as objects and claims do: protobuf with its mark, or JSON.
func plausible(plain []byte) bool {
	return bytes.HasPrefix(plain, []byte("k8s\x00")) || bytes.HasPrefix(plain, []byte("{"))
}

// keyPrefix is below what every key that servers encrypt with is registered: one value for each, encrypted with it. Whoever
// can decrypt it has the key.
const keyPrefix = Prefix + "/portal/encryption/"

// registrationText is what is encrypted there.
const registrationText = "portal"

func registrationOf(h Header) string { return keyPrefix + h.Provider + "/" + h.Key }

// hasKey says that a resource's transformer has the registered key of a header.
func (o *RESTOptions) hasKey(ctx context.Context, resource schema.GroupResource, header Header) bool {
	if header.Provider == ProviderIdentity {
		return false
	}
	resp, err := o.Store.client.KV.Get(ctx, registrationOf(header))
	return err == nil && len(resp.Kvs) == 1 && o.opens(ctx, resource, resp.Kvs[0])
}

// opens says that a resource's transformer can decrypt a registration.
func (o *RESTOptions) opens(ctx context.Context, resource schema.GroupResource, kv *mvccpb.KeyValue) bool {
	plain, _, err := o.transformer(resource).TransformFromStorage(ctx, kv.Value, value.DefaultContext(kv.Key))
	return err == nil && string(plain) == registrationText
}

// RegisterKeys registers the keys that new values of the resources are encrypted with. It must be called before any is.
func (o *RESTOptions) RegisterKeys(ctx context.Context, resources []schema.GroupResource) error {
	for _, resource := range resources {
		header := o.writeHeader(ctx, resource)
		if header == nil || header.Provider == ProviderIdentity {
			continue
		}
		key := registrationOf(*header)
		// A full etcd refuses even a transaction that would change nothing, and a server must start on it.
		known, err := o.Store.client.KV.Get(ctx, key, clientv3.WithCountOnly())
		if err != nil {
			return fmt.Errorf("read %s from etcd: %w", key, err)
		}
		if known.Count > 0 {
			continue
		}
		sealed, err := o.transformer(resource).TransformToStorage(ctx, []byte(registrationText), value.DefaultContext(key))
		if err != nil {
			return fmt.Errorf("encrypt with %s: %w", header, err)
		}
		_, err = o.Store.client.KV.Txn(ctx).If(clientv3.Compare(clientv3.CreateRevision(key), "=", 0)).
			Then(clientv3.OpPut(key, string(sealed))).Commit()
		if err != nil {
			return fmt.Errorf("register %s: %w", header, err)
		}
	}
	return nil
}

// RegisteredKeys are the keys that servers of this etcd encrypt with, or did. missing are those that none of the resources'
// transformers has; a key management service that the resources name is never missing, because it may just not answer.
func (o *RESTOptions) RegisteredKeys(ctx context.Context, resources []schema.GroupResource, services map[string]bool,
) (registered, missing []Header, err error) {
	resp, err := o.Store.client.KV.Get(ctx, keyPrefix, clientv3.WithPrefix())
	if err != nil {
		return nil, nil, fmt.Errorf("read %s from etcd: %w", keyPrefix, err)
	}
	for _, kv := range resp.Kvs {
		header := headerOf(kv.Value)
		registered = append(registered, header)
		if header.Provider == ProviderKMS && services[header.Key] {
			continue
		}
		has := slices.ContainsFunc(resources, func(resource schema.GroupResource) bool { return o.opens(ctx, resource, kv) })
		if !has {
			missing = append(missing, header)
		}
	}
	return registered, missing, nil
}

// ForgetKeys removes the registrations of keys that nothing is encrypted with, and new values of the resources won't be.
// Another server that still encrypts with one registers it again.
func (o *RESTOptions) ForgetKeys(ctx context.Context, used []Usage, resources []schema.GroupResource) error {
	inUse := map[string]bool{}
	for _, u := range used {
		inUse[registrationOf(u.Header)] = true
	}
	for _, resource := range resources {
		if header := o.writeHeader(ctx, resource); header != nil {
			inUse[registrationOf(*header)] = true
		}
	}
	resp, err := o.Store.client.KV.Get(ctx, keyPrefix, clientv3.WithPrefix())
	if err != nil {
		return err
	}
	for _, kv := range resp.Kvs {
		if inUse[string(kv.Key)] || headerOf(kv.Value).Provider == ProviderKMS { // whose service may just not answer
			continue
		}
		if _, err := o.Store.client.KV.Delete(ctx, string(kv.Key)); err != nil {
			return err
		}
	}
	return nil
}
