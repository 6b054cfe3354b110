package controllers_test

import (
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"portal/internal/controllers"
)

func (w *world) soon(what string, check func() error) {
	w.Helper()
	var err error
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if err = check(); err == nil {
			return
		}
	}
	w.Fatalf("%s: %v", what, err)
}

// TestAccountsOfNamespaces: each namespace has its account and its CA, which come back and follow.
func TestAccountsOfNamespaces(t *testing.T) {
	w := newWorld(t)
	var ca atomic.Value
	ca.Store([]byte("one"))
	w.run("serviceaccount,root-ca-certificate-publisher", func(c *controllers.Config) {
		c.RootCA = func() []byte { return ca.Load().([]byte) }
	})
	accounts, maps := w.client.CoreV1().ServiceAccounts(w.namespace), w.client.CoreV1().ConfigMaps(w.namespace)
	has := func() error {
		_, err := accounts.Get(w.ctx(), "default", metav1.GetOptions{})
		return err
	}
	published := func() error {
		cm, err := maps.Get(w.ctx(), "kube-root-ca.crt", metav1.GetOptions{})
		if err == nil && cm.Data["ca.crt"] != string(ca.Load().([]byte)) {
			return fmt.Errorf("it has %v", cm.Data)
		}
		return err
	}
	w.soon("no account", has)
	w.soon("no CA", published)
	w.must(accounts.Delete(w.ctx(), "default", metav1.DeleteOptions{}))
	w.must(maps.Delete(w.ctx(), "kube-root-ca.crt", metav1.DeleteOptions{}))
	w.soon("the account stays away", has)
	w.soon("the CA stays away", published)
	ca.Store([]byte("two"))
	w.soon("the CA is the old one", published)
	cm, err := maps.Get(w.ctx(), "kube-root-ca.crt", metav1.GetOptions{})
	w.must(err)
	frozen := true
	cm.Data["ca.crt"], cm.Immutable = "evil", &frozen
	_, err = maps.Update(w.ctx(), cm, metav1.UpdateOptions{})
	w.must(err)
	w.soon("an immutable one stays wrong", published)
}

// TestTokensInSecrets: a Secret that names an account gets its token, also if the account is there but the informer does not
// know it yet; one that names none is deleted; what somebody else wrote into it stays.
func TestTokensInSecrets(t *testing.T) {
	w := newWorld(t)
	w.run("serviceaccount-token", func(c *controllers.Config) { c.RootCA = func() []byte { return []byte("ca") } })
	core := w.client.CoreV1()
	add := func(name, account, token string) {
		t.Helper()
		s := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{corev1.ServiceAccountNameKey: account}}, Type: corev1.SecretTypeServiceAccountToken}
		if token != "" {
			s.Data = map[string][]byte{"token": []byte(token)}
		}
		_, err := core.Secrets(w.namespace).Create(w.ctx(), s, metav1.CreateOptions{})
		w.must(err)
	}
	get := func(name string) (*corev1.Secret, error) {
		return core.Secrets(w.namespace).Get(w.ctx(), name, metav1.GetOptions{})
	}
	account, err := core.ServiceAccounts(w.namespace).Create(w.ctx(), &corev1.ServiceAccount{
		ObjectMeta: metav1.ObjectMeta{Name: "a"}, Secrets: []corev1.ObjectReference{{Name: "filled"}, {Name: "other"}},
	}, metav1.CreateOptions{})
	w.must(err)
	add("filled", "a", "")
	add("given", "a", "mine")
	add("orphan", "nobody", "")
	full := func(name string) func() error {
		return func() error {
			s, err := get(name)
			if err == nil && (len(s.Data["token"]) == 0 || string(s.Data["ca.crt"]) != "ca" || string(s.Data["namespace"]) != w.namespace ||
				s.Annotations[corev1.ServiceAccountUIDKey] != string(account.UID)) {
				return fmt.Errorf("it has %d entries", len(s.Data))
			}
			return err
		}
	}
	gone := func(name string) func() error {
		return func() error {
			if _, err := get(name); !apierrors.IsNotFound(err) {
				return fmt.Errorf("got %v", err)
			}
			return nil
		}
	}
	w.soon("not filled", full("filled"))
	w.soon("not completed", full("given"))
	if s, err := get("given"); err != nil || string(s.Data["token"]) != "mine" {
		t.Errorf("somebody's token was replaced: %v", err)
	}
	w.soon("an orphan stays", gone("orphan"))
	w.must(core.Secrets(w.namespace).Delete(w.ctx(), "filled", metav1.DeleteOptions{}))
	w.soon("the account lists what is gone", func() error {
		a, err := core.ServiceAccounts(w.namespace).Get(w.ctx(), "a", metav1.GetOptions{})
		if err == nil && (len(a.Secrets) != 1 || a.Secrets[0].Name != "other") {
			return fmt.Errorf("it lists %v", a.Secrets)
		}
		return err
	})
	w.must(core.ServiceAccounts(w.namespace).Delete(w.ctx(), "a", metav1.DeleteOptions{}))
	w.soon("a Secret outlives its account", gone("given"))
}

// TestAnImmutableSecretStaysEmpty: a Secret that can't be given its token is left alone, and goes with its account.
func TestAnImmutableSecretStaysEmpty(t *testing.T) {
	w := newWorld(t)
	core, frozen := w.client.CoreV1(), true
	_, err := core.ServiceAccounts(w.namespace).Create(w.ctx(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "a"}}, metav1.CreateOptions{})
	w.must(err)
	_, err = core.Secrets(w.namespace).Create(w.ctx(), &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: "frozen", Annotations: map[string]string{corev1.ServiceAccountNameKey: "a"}},
		Type:       corev1.SecretTypeServiceAccountToken, Immutable: &frozen,
	}, metav1.CreateOptions{})
	w.must(err)
	var writes atomic.Int32
	direct := w.config
	w.config = rest.CopyConfig(direct)
	w.config.Wrap(func(next http.RoundTripper) http.RoundTripper { return secretWrites{next, &writes} })
	w.run("serviceaccount-token", func(c *controllers.Config) { c.RootCA = func() []byte { return []byte("ca") } })
	w.config = direct
	time.Sleep(2 * time.Second)
	if n := writes.Load(); n > 0 {
		t.Errorf("%d attempts to change a Secret that can't be changed, in 2 s", n)
	}
	w.must(core.ServiceAccounts(w.namespace).Delete(w.ctx(), "a", metav1.DeleteOptions{}))
	w.soon("the Secret outlives its account", func() error {
		if _, err := core.Secrets(w.namespace).Get(w.ctx(), "frozen", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			return fmt.Errorf("got %v", err)
		}
		return nil
	})
}

// secretWrites counts the requests that change Secrets.
type secretWrites struct {
	next  http.RoundTripper
	count *atomic.Int32
}

func (s secretWrites) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Method == http.MethodPut && strings.Contains(r.URL.Path, "/secrets/") {
		s.count.Add(1)
	}
	return s.next.RoundTrip(r)
}
