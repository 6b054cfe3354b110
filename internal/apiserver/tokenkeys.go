package apiserver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"k8s.io/klog/v2"

	"portal/internal/apiserver/tokens"
	"portal/internal/pki"
	"portal/internal/store"
)

const (
	// tokenKey is what `portal certs` calls the key of tokens; tokenKeyFile is its file in the folder pki.
	tokenKey     = "service-account"
	tokenKeyFile = "service-account.key"

	// tokenKeyPrefix holds the public keys of the cluster's servers, by ID, with the time until which there may be tokens
	// that they signed. Every server accepts all of them.
	tokenKeyPrefix = store.Prefix + "/portal/token-keys/"

	// promiseAhead keeps a key's time ahead of the longest token, so that it is seldom written.
	promiseAhead = 30 * 24 * time.Hour
	// rereadInterval bounds how often tokens with unknown keys make the server read etcd.
	rereadInterval = time.Second
	keyTimeout     = 5 * time.Second
)

// errKeyFromFlag means that the key is not this server's to replace.
var errKeyFromFlag = errors.New("the key of tokens is that of --service-account-signing-key-file: replace that file, keep the old " +
	"public key in --service-account-key-file, and restart")

// registeredKey is what etcd holds of a key.
type registeredKey struct {
	PublicKey string    `json:"publicKey"`
	Until     time.Time `json:"until"`
}

// tokenKeys are the keys of ServiceAccounts' tokens: this server's own, and those of the other servers of the cluster.
type tokenKeys struct {
	ring *tokens.Ring
	etcd *clientv3.Client
	file string
	// given: the key is an administrator's, not this server's.
	given bool

	mu    sync.Mutex
	since time.Time
	// until are the registered keys' times, by ID.
	until map[string]time.Time
	read  time.Time
}

// openTokenKeys reads the keys that the flags name, or those of this server, making the latter if there is none.
func (s *Server) openTokenKeys(ctx context.Context) error {
	k := &tokenKeys{
		etcd: s.store.Client(), file: s.opts.Tokens.SigningKeyFile, given: s.opts.Tokens.SigningKeyFile != "",
		until: map[string]time.Time{},
	}
	if !k.given {
		k.file = filepath.Join(s.opts.DataDir, "pki", tokenKeyFile)
	}
	signer, err := k.load()
	if err != nil {
		return fmt.Errorf("the key of ServiceAccounts' tokens: %w", err)
	}
	fixed, err := readPublicKeys(s.opts.Tokens.KeyFiles)
	if err != nil {
		return err
	}
	k.ring = tokens.NewRing(signer, fixed...)
	k.ring.Missing = k.reread
	if err := k.sync(ctx); err != nil {
		// A storage that refuses writes must not keep the server from starting. Nothing is signed until it is mended.
		klog.ErrorS(err, "key of tokens could not be registered in etcd, retrying")
	}
	s.tokenKeys = k
	return nil
}

// load reads the private key, or makes one.
func (k *tokenKeys) load() (*tokens.Signer, error) {
	data, err := os.ReadFile(k.file)
	if errors.Is(err, fs.ErrNotExist) && !k.given {
		signer, data, err := generateTokenKey()
		if err != nil {
			return nil, err
		}
		k.since = time.Now()
		return signer, pki.WriteFile(k.file, data, 0o600)
	}
	if err != nil {
		return nil, err
	}
	if info, err := os.Stat(k.file); err == nil {
		k.since = info.ModTime()
	}
	signer, err := tokens.ParseSigner(data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", k.file, err)
	}
	return signer, nil
}

func generateTokenKey() (*tokens.Signer, []byte, error) {
	data, err := tokens.GenerateKey()
	if err != nil {
		return nil, nil, err
	}
	signer, err := tokens.ParseSigner(data)
	return signer, data, err
}

// readPublicKeys reads the files of --service-account-key-file.
func readPublicKeys(files []string) ([]tokens.Key, error) {
	var out []tokens.Key
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			return nil, fmt.Errorf("--service-account-key-file: %w", err)
		}
		keys, err := tokens.ParseKeys(data)
		if err != nil {
			return nil, fmt.Errorf("--service-account-key-file %s: %w", file, err)
		}
		out = append(out, keys...)
	}
	return out, nil
}

// sync registers this server's key and accepts those of others. Keys whose tokens have all expired are removed.
func (k *tokenKeys) sync(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, keyTimeout)
	defer cancel()
	stale, err := k.accept(ctx)
	if err != nil {
		return err
	}
	for _, key := range stale {
		if _, err := k.etcd.Txn(ctx).If(clientv3.Compare(clientv3.ModRevision(string(key.Key)), "=", key.ModRevision)).
			Then(clientv3.OpDelete(string(key.Key))).Commit(); err != nil {
			return err
		}
	}
	signer := k.ring.Signer()
	if k.promised(signer.ID).IsZero() {
		return k.extend(ctx, signer.Key, time.Now().Add(time.Hour))
	}
	return nil
}

// accept reads the registered keys, and returns those whose time is over.
func (k *tokenKeys) accept(ctx context.Context) (stale []staleKey, err error) {
	resp, err := k.etcd.Get(ctx, tokenKeyPrefix, clientv3.WithPrefix())
	if err != nil {
		return nil, err
	}
	var accepted []tokens.Key
	until := map[string]time.Time{}
	own := k.ring.Signer().ID
	for _, kv := range resp.Kvs {
		id := strings.TrimPrefix(string(kv.Key), tokenKeyPrefix)
		key, registered, err := parseRegistered(id, kv.Value)
		if err != nil {
			klog.ErrorS(err, "registered key of tokens can't be read, ignoring it", "key", string(kv.Key))
			continue
		}
		if id != own && time.Now().After(registered.Until.Add(time.Hour)) {
			stale = append(stale, staleKey{kv.Key, kv.ModRevision})
			continue
		}
		accepted = append(accepted, key)
		until[id] = registered.Until
	}
	k.ring.Accept(accepted)
	k.mu.Lock()
	defer k.mu.Unlock()
	k.until = until
	return stale, nil
}

type staleKey struct {
	Key         []byte
	ModRevision int64
}

// parseRegistered reads an entry. Its name must be the ID of its key, so that none stands for another.
func parseRegistered(id string, value []byte) (tokens.Key, registeredKey, error) {
	var registered registeredKey
	if err := json.Unmarshal(value, &registered); err != nil {
		return tokens.Key{}, registered, err
	}
	keys, err := tokens.ParseKeys([]byte(registered.PublicKey))
	if err != nil {
		return tokens.Key{}, registered, err
	}
	if len(keys) != 1 || keys[0].ID != id {
		return tokens.Key{}, registered, errors.New("it does not hold the one key that it is named for")
	}
	return keys[0], registered, nil
}

// reread accepts keys that other servers have registered a moment ago. Anybody can make up a key ID, so it is limited.
func (k *tokenKeys) reread(ctx context.Context) {
	k.mu.Lock()
	soon := time.Since(k.read) < rereadInterval
	if !soon {
		k.read = time.Now()
	}
	k.mu.Unlock()
	if soon {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, keyTimeout)
	defer cancel()
	if _, err := k.accept(ctx); err != nil {
		klog.ErrorS(err, "keys of tokens could not be read from etcd")
	}
}

func (k *tokenKeys) promised(id string) time.Time {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.until[id]
}

// promise makes sure that every server accepts the key until a time, before a token is signed that lives as long.
func (k *tokenKeys) promise(ctx context.Context, id string, until time.Time) error {
	if !until.After(k.promised(id)) {
		return nil
	}
	signer := k.ring.Signer()
	if signer.ID != id {
		return errors.New("the key has just been replaced")
	}
	ctx, cancel := context.WithTimeout(ctx, keyTimeout)
	defer cancel()
	return k.extend(ctx, signer.Key, until)
}

// extend registers a key until a time, or for longer if it is already.
func (k *tokenKeys) extend(ctx context.Context, key tokens.Key, until time.Time) error {
	text, err := key.PEM()
	if err != nil {
		return err
	}
	for range 10 {
		resp, err := k.etcd.Get(ctx, tokenKeyPrefix+key.ID)
		if err != nil {
			return err
		}
		var revision int64
		entry := registeredKey{PublicKey: string(text)}
		if len(resp.Kvs) > 0 {
			revision = resp.Kvs[0].ModRevision
			if _, registered, err := parseRegistered(key.ID, resp.Kvs[0].Value); err == nil {
				entry.Until = registered.Until
			}
		}
		if until.After(entry.Until) || revision == 0 {
			entry.Until = until.Add(promiseAhead).UTC().Truncate(time.Second)
			value, err := json.Marshal(entry)
			if err != nil {
				return err
			}
			done, err := k.etcd.Txn(ctx).If(clientv3.Compare(clientv3.ModRevision(tokenKeyPrefix+key.ID), "=", revision)).
				Then(clientv3.OpPut(tokenKeyPrefix+key.ID, string(value))).Commit()
			if err != nil {
				return err
			}
			if !done.Succeeded {
				continue // another server with the same key was first
			}
		}
		k.mu.Lock()
		defer k.mu.Unlock()
		k.until[key.ID] = entry.Until
		return nil
	}
	return errors.New("other servers keep changing it")
}

// run keeps the keys in sync with etcd until ctx ends.
func (k *tokenKeys) run(ctx context.Context) {
	changes := k.etcd.Watch(ctx, tokenKeyPrefix, clientv3.WithPrefix())
	for ctx.Err() == nil {
		wait := time.Hour
		if err := k.sync(ctx); err != nil && ctx.Err() == nil {
			klog.ErrorS(err, "keys of tokens could not be compared with etcd, retrying")
			wait = 10 * time.Second
		}
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
		case <-timer.C:
		case _, ok := <-changes:
			if !ok && ctx.Err() == nil {
				changes = k.etcd.Watch(ctx, tokenKeyPrefix, clientv3.WithPrefix())
				time.Sleep(100 * time.Millisecond)
			}
		}
		timer.Stop()
	}
}

// renew signs with a new key from now on. Tokens of the one before stay good as long as they live, unless they are revoked.
func (k *tokenKeys) renew(ctx context.Context, revoke bool) error {
	if k.given {
		return errKeyFromFlag
	}
	before := *k.ring.Signer()
	// The old key is kept in etcd alone: it must be there before its file is gone.
	if err := k.extend(ctx, before.Key, time.Now()); err != nil {
		return fmt.Errorf("register the key of tokens: %w", err)
	}
	signer, data, err := generateTokenKey()
	if err != nil {
		return err
	}
	if err := k.extend(ctx, signer.Key, time.Now().Add(time.Hour)); err != nil {
		return fmt.Errorf("register the new key of tokens: %w", err)
	}
	if err := pki.WriteFile(k.file, data, 0o600); err != nil {
		return err
	}
	k.ring.Sign(signer)
	k.mu.Lock()
	k.since = time.Now()
	k.mu.Unlock()
	klog.InfoS("key of tokens replaced", "key", signer.ID, "before", before.ID, "revoked", revoke)
	if revoke {
		return k.revoke(ctx, signer.ID)
	}
	return nil
}

// revoke removes every registered key but one. Other servers that run register theirs again.
func (k *tokenKeys) revoke(ctx context.Context, but string) error {
	resp, err := k.etcd.Get(ctx, tokenKeyPrefix, clientv3.WithPrefix(), clientv3.WithKeysOnly())
	if err != nil {
		return err
	}
	for _, kv := range resp.Kvs {
		if string(kv.Key) == tokenKeyPrefix+but {
			continue
		}
		if _, err := k.etcd.Delete(ctx, string(kv.Key)); err != nil {
			return fmt.Errorf("revoke the keys of tokens: %w", err)
		}
	}
	_, err = k.accept(ctx)
	return err
}

// list describes the keys for `portal certs list`.
func (k *tokenKeys) list(issuer string) []pki.Info {
	signer := k.ring.Signer()
	describe := func(key tokens.Key) pki.Info {
		return pki.Info{Name: tokenKey, File: k.file, Subject: key.Algorithm() + " key " + key.ID, Issuer: issuer}
	}
	own := describe(signer.Key)
	k.mu.Lock()
	own.Since = k.since
	k.mu.Unlock()
	out := []pki.Info{own}
	for _, key := range k.ring.Keys()[1:] {
		other := describe(key)
		other.Name, other.File, other.Until = tokenKey+" (accepted)", "", k.promised(key.ID)
		out = append(out, other)
	}
	return out
}
