package apiserver

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime/schema"
	genericserver "k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/server/healthz"
	"k8s.io/apiserver/pkg/server/options/encryptionconfig"
	reloadmetrics "k8s.io/apiserver/pkg/server/options/encryptionconfig/metrics"
	"k8s.io/apiserver/pkg/storage/value"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
	"k8s.io/klog/v2"

	"portal/internal/apiserver/registry/service"
	"portal/internal/store"
)

// storagePlaces are the resources that the scheme knows, by where they are kept.
func storagePlaces() map[string]schema.GroupResource {
	out := map[string]schema.GroupResource{}
	scheme := newScheme()
	for _, group := range groups { // the core group first: both groups' Events are kept as its own
		for kind := range scheme.KnownTypes(group.version) {
			plural, _ := meta.UnsafeGuessKindToResource(group.version.WithKind(kind))
			resource := plural.GroupResource()
			path, ok := storagePaths[resource]
			if !ok {
				path = resource.Resource
			}
			if _, taken := out[path]; !taken {
				out[path] = resource
			}
		}
	}
	return out
}

// claimPaths are where claims on ports are kept, and with whose transformer: that of the Services. Claims on addresses
// are IPAddress objects.
func claimPaths() map[string]schema.GroupResource {
	return map[string]schema.GroupResource{service.PortPrefix: corev1.Resource("services")}
}

// storageView is the storage as transformers show it, for what reads etcd beside the API.
func storageView(s *store.Store, transformers value.ResourceTransformers) *store.RESTOptions {
	return &store.RESTOptions{
		Store: s, Unqualified: unqualifiedGroups(), Paths: storagePaths, Places: storagePlaces(), ClaimPaths: claimPaths(),
		Transformers: transformers,
	}
}

// encryption keeps what is stored encrypted: the transformers of the configuration file, and its changes.
type encryption struct {
	opts  EncryptionOptions
	store *store.Store
	// transformers is nil if nothing is encrypted; dynamic is the same if the file is read again when it changes.
	transformers value.ResourceTransformers
	dynamic      *encryptionconfig.DynamicTransformers
	checks       []healthz.HealthChecker
	// serverID tells servers apart in metrics.
	serverID string
	// ctx ends with the server, and with it what talks to key management services.
	ctx  context.Context
	stop context.CancelFunc
	// rewriting is held by the one rewriting at a time.
	rewriting sync.Mutex

	mu     sync.Mutex
	config *encryptionConfig
	hash   string
	// refused is the hash of the last file that was not taken, and when to try it again.
	refused string
	again   time.Time
	// reloadErr says why it was not taken, lostErr what can't be decrypted any more, missing which keys others use.
	reloadErr, lostErr error
	missing            []store.Header
	surveyed           time.Time
}

// openEncryption reads the configuration, and rejects one that can't decrypt what is stored. It changes nothing in that case.
func openEncryption(ctx context.Context, s *store.Store, opts EncryptionOptions) (_ *encryption, err error) {
	registerEncryptionMetrics()
	e := &encryption{opts: opts, store: s, serverID: serverID()}
	e.ctx, e.stop = context.WithCancel(context.WithoutCancel(ctx))
	defer func() {
		if err != nil {
			e.stop()
		}
	}()
	if opts.ConfigFile == "" {
		return e, e.checkPlain(ctx)
	}
	warnReadable(opts.ConfigFile)
	if e.config, err = readEncryptionConfig(opts); err != nil {
		return nil, err
	}
	inner, end := context.WithCancel(e.ctx)
	loaded, err := encryptionconfig.LoadEncryptionConfig(inner, opts.ConfigFile, opts.Reload, e.serverID)
	if err != nil {
		end()
		return nil, fmt.Errorf("%s %s: %w", encryptionFlag, opts.ConfigFile, err)
	}
	e.hash, e.checks = loaded.EncryptionFileContentHash, loaded.HealthChecks
	if opts.Reload {
		e.dynamic = encryptionconfig.NewDynamicTransformers(loaded.Transformers, loaded.HealthChecks[0], end, loaded.KMSCloseGracePeriod)
		e.transformers, e.checks = e.dynamic, []healthz.HealthChecker{e.dynamic}
	} else {
		context.AfterFunc(e.ctx, end)
		e.transformers = encryptionconfig.StaticTransformers(loaded.Transformers)
	}
	usage, err := e.check(ctx, e.transformers, e.config, e.checks)
	if err != nil {
		return nil, err
	}
	e.warnUnknown()
	view := e.view(e.transformers)
	if err := view.RegisterKeys(ctx, e.config.entries); store.IsNoSpace(err) {
		// A full etcd takes no encrypted value either. When it has room again, look registers the key, within lookEvery.
		klog.ErrorS(err, "a key could not be registered because etcd is full, retrying", "in", lookEvery)
	} else if err != nil {
		return nil, err
	}
	if e.alone() {
		err = view.ForgetKeys(ctx, usage, e.config.entries)
	}
	return e, err
}

func serverID() string {
	name, _ := os.Hostname()
	return fmt.Sprintf("apiserver-%x", sha256.Sum256([]byte(name)))
}

func (e *encryption) view(transformers value.ResourceTransformers) *store.RESTOptions {
	return storageView(e.store, transformers)
}

// checkPlain makes sure that a storage without a configuration needs none. It reads everything only if servers have
// encrypted something here.
func (e *encryption) checkPlain(ctx context.Context) error {
	view := e.view(nil)
	registered, _, err := view.RegisteredKeys(ctx, nil, nil)
	if err != nil || len(registered) == 0 {
		return err
	}
	usage, err := e.check(ctx, nil, nil, nil)
	if err == nil && e.alone() {
		err = view.ForgetKeys(ctx, usage, nil)
	}
	return err
}

// alone says that the etcd has no other server, which may use other keys.
func (e *encryption) alone() bool { return e.store.Failed() != nil }

// check makes sure that everything stored can be decrypted. A key management service that does not answer may do so later;
// that is what the health checks are for.
func (e *encryption) check(ctx context.Context, transformers value.ResourceTransformers, config *encryptionConfig, checks []healthz.HealthChecker,
) ([]store.Usage, error) {
	start := time.Now()
	usage, err := e.view(transformers).Survey(ctx, false)
	if err != nil {
		return nil, err
	}
	healthy := checkAll(ctx, checks) == nil
	var lost []store.Usage
	for _, u := range usage {
		if u.Unreadable > 0 && !u.Lost() {
			klog.ErrorS(nil, "values can't be decrypted although their key is right: they are damaged, and fail reads until they are deleted",
				"resource", u.Resource, "key", u.Header.String(), "example", u.Example)
		}
		if !u.Lost() || config != nil && u.Provider == store.ProviderKMS && config.services[u.Key] && !healthy {
			continue
		}
		lost = append(lost, u)
	}
	klog.V(2).InfoS("checked that what is stored can be decrypted", "kinds", len(usage), "took", time.Since(start))
	return usage, explainLost(e.opts, config, lost)
}

func checkAll(ctx context.Context, checks []healthz.HealthChecker) error {
	var errs []error
	for _, check := range checks {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, "/readyz/"+check.Name(), nil)
		if err != nil {
			return err
		}
		errs = append(errs, check.Check(request))
	}
	return errors.Join(errs...)
}

// warnReadable warns of a file with keys that others can read.
func warnReadable(file string) {
	if info, err := os.Stat(file); err == nil && info.Mode().Perm()&0o077 != 0 {
		klog.InfoS("the encryption keys can be read by others than their owner: chmod 600", "file", file, "mode", info.Mode().Perm().String())
	}
}

// warnUnknown warns of resources in the file that are none: a mistyped name would be stored plain.
func (e *encryption) warnUnknown() {
	places := storagePlaces()
	for _, entry := range e.config.entries {
		known := entry.Resource == "*" || strings.Contains(entry.Group, ".") && !unqualifiedGroups()[entry.Group]
		for _, resource := range places {
			known = known || resource == entry
		}
		if !known {
			klog.InfoS("the encryption configuration names a resource that there is not", "file", e.opts.ConfigFile, "resource", entry.String())
		}
	}
}

// keysCheck is the part of /readyz that fails while another server encrypts with a key that this one lacks.
const keysCheck = "encryption-keys"

// addChecks adds to /readyz and /healthz whether key management services answer. It is not in /livez: a restart would lose the
// keys that they have decrypted, and with them the reads that still work.
func (e *encryption) addChecks(config *genericserver.Config) {
	config.AddReadyzChecks(e.checks...)
	config.AddHealthzChecks(e.checks...)
	config.AddReadyzChecks(healthz.NamedCheck(keysCheck, func(*http.Request) error {
		e.mu.Lock()
		defer e.mu.Unlock()
		return e.lostErr
	}))
}

const (
	// reloadEvery is how often the file is looked at; a file that was not taken is tried again after retryRefused.
	reloadEvery  = 5 * time.Second
	retryRefused = 30 * time.Second
	// lookEvery is how often the keys of other servers are looked at.
	// While this one lacks a key, everything is read every surveyEvery to see whether it is needed.
	lookEvery   = 10 * time.Second
	surveyEvery = time.Minute
)

// run takes changes of the file, and watches which keys other servers use, until ctx ends.
func (e *encryption) run(ctx context.Context) {
	reload, look := time.NewTicker(reloadEvery), time.NewTicker(lookEvery)
	defer reload.Stop()
	defer look.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-reload.C:
			if e.dynamic != nil {
				e.reload(ctx)
			}
		case <-look.C:
			if err := e.look(ctx); err != nil && ctx.Err() == nil {
				klog.ErrorS(err, "keys that other servers encrypt with could not be read, retrying", "in", lookEvery)
			}
		}
	}
}

// close ends the connections to key management services.
func (e *encryption) close() { e.stop() }

// reload takes a changed file, if it is right and can decrypt what is stored. Otherwise all stays as it is.
func (e *encryption) reload(ctx context.Context) {
	hash, err := encryptionconfig.GetEncryptionConfigHash(e.opts.ConfigFile)
	e.mu.Lock()
	skip := err == nil && (hash == e.hash || hash == e.refused && time.Now().Before(e.again))
	if err == nil && hash == e.hash {
		e.refused, e.reloadErr = "", nil // it was changed back
	}
	e.mu.Unlock()
	if skip {
		return
	}
	if err == nil {
		err = e.take(ctx)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if err == nil {
		e.refused, e.reloadErr = "", nil
		reloadmetrics.RecordEncryptionConfigAutomaticReloadSuccess(e.serverID, e.hash)
		klog.InfoS("took the changed encryption configuration", "file", e.opts.ConfigFile)
		return
	}
	if ctx.Err() != nil {
		return
	}
	reloadmetrics.RecordEncryptionConfigAutomaticReloadFailure(e.serverID)
	if e.reloadErr == nil || e.reloadErr.Error() != err.Error() {
		klog.ErrorS(err, "the changed encryption configuration was not taken, the one before stays", "file", e.opts.ConfigFile)
	}
	e.refused, e.again, e.reloadErr = hash, time.Now().Add(retryRefused), err
}

func (e *encryption) take(ctx context.Context) error {
	config, err := readEncryptionConfig(e.opts)
	if err != nil {
		return err
	}
	inner, end := context.WithCancel(e.ctx)
	loaded, err := encryptionconfig.LoadEncryptionConfig(inner, e.opts.ConfigFile, true, e.serverID)
	if err == nil {
		if err = checkAll(ctx, loaded.HealthChecks); err != nil {
			err = fmt.Errorf("%s %s: %w", encryptionFlag, e.opts.ConfigFile, err)
		}
	}
	if err == nil {
		next := encryptionconfig.StaticTransformers(loaded.Transformers)
		if _, err = e.check(ctx, next, config, loaded.HealthChecks); err == nil {
			err = e.view(next).RegisterKeys(ctx, config.entries)
		}
	}
	if err != nil {
		end()
		return err
	}
	e.dynamic.Set(loaded.Transformers, end, loaded.HealthChecks[0], loaded.KMSCloseGracePeriod)
	e.mu.Lock()
	e.config, e.hash = config, loaded.EncryptionFileContentHash
	e.mu.Unlock()
	e.warnUnknown()
	return nil
}

// look finds keys that other servers encrypt with and this one lacks, and registers its own again if somebody removed them.
func (e *encryption) look(ctx context.Context) error {
	e.mu.Lock()
	config := e.config
	e.mu.Unlock()
	var entries []schema.GroupResource
	var services map[string]bool
	if config != nil {
		entries, services = config.entries, config.services
	}
	view := e.view(e.transformers)
	if err := view.RegisterKeys(ctx, entries); err != nil {
		return err
	}
	_, missing, err := view.RegisteredKeys(ctx, entries, services)
	if err != nil {
		return err
	}
	keysMissing.Set(float64(len(missing)))
	e.mu.Lock()
	news := !slices.Equal(missing, e.missing)
	e.missing = missing
	due := len(missing) > 0 && (news || time.Since(e.surveyed) > surveyEvery)
	e.mu.Unlock()
	if news {
		for _, header := range missing {
			klog.ErrorS(nil, "another server of this etcd encrypts, or did, with a key that this one lacks: give all servers the same encryption configuration",
				"key", header.String(), "file", e.opts.ConfigFile)
		}
	}
	if len(missing) > 0 && !due {
		return nil
	}
	var lost error
	if due {
		if _, lost = e.check(ctx, e.transformers, config, e.checks); ctx.Err() != nil {
			return ctx.Err()
		}
	}
	e.mu.Lock()
	e.lostErr, e.surveyed = lost, time.Now()
	e.mu.Unlock()
	return nil
}

// status describes the encryption, or is nil if there is none and was none.
func (e *encryption) status(ctx context.Context) (*store.Encryption, error) {
	e.mu.Lock()
	out := &store.Encryption{Config: e.opts.ConfigFile}
	if e.reloadErr != nil {
		out.Problems = append(out.Problems, "the changed file was not taken: "+e.reloadErr.Error())
	}
	for _, header := range e.missing {
		out.Problems = append(out.Problems, fmt.Sprintf("another server encrypts, or did, with %s, which this one lacks", header))
	}
	e.mu.Unlock()
	if err := checkAll(ctx, e.checks); err != nil {
		out.Problems = append(out.Problems, err.Error())
	}
	return surveyed(ctx, e.view(e.transformers), out)
}

// surveyed completes a description with how everything is stored.
func surveyed(ctx context.Context, view *store.RESTOptions, out *store.Encryption) (_ *store.Encryption, err error) {
	if view.Transformers == nil {
		registered, _, err := view.RegisteredKeys(ctx, nil, nil)
		if err != nil || len(registered) == 0 {
			return nil, err
		}
	}
	out.Usage, err = view.Survey(ctx, true)
	return out, err
}

var errNotConfigured = errors.New("the server has no " + encryptionFlag + ", so there is nothing to encrypt with")

// reencrypt rewrites everything that is encrypted in another way than new values.
func (e *encryption) reencrypt(ctx context.Context, tell func(store.Reencryption)) (store.Reencryption, error) {
	if e.transformers == nil {
		return store.Reencryption{}, errNotConfigured
	}
	if !e.rewriting.TryLock() {
		return store.Reencryption{}, errors.New("it is being done already")
	}
	defer e.rewriting.Unlock()
	e.mu.Lock()
	entries := e.config.entries
	e.mu.Unlock()
	return e.view(e.transformers).Reencrypt(ctx, entries, tell)
}

var keysMissing = metrics.NewGauge(&metrics.GaugeOpts{
	Name: "portal_encryption_keys_missing", StabilityLevel: metrics.ALPHA,
	Help: "Keys that servers of this etcd encrypt with, or did, and this server's configuration lacks.",
})

var registerEncryptionMetrics = sync.OnceFunc(func() { legacyregistry.MustRegister(keysMissing) })
