package test

import (
	"bytes"
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kms "k8s.io/kms/apis/v2"

	"portal/test/harness"
)

// keyService is a KMS v2 plugin: it encrypts with the key that it is at, and decrypts with every one.
type keyService struct {
	kms.UnsafeKeyManagementServiceServer
	socket string
	key    atomic.Int32
	server *grpc.Server
}

func (k *keyService) start(t *testing.T) {
	t.Helper()
	_ = os.Remove(k.socket)
	listener, err := net.Listen("unix", k.socket)
	if err != nil {
		t.Fatal(err)
	}
	k.server = grpc.NewServer()
	kms.RegisterKeyManagementServiceServer(k.server, k)
	go func() { _ = k.server.Serve(listener) }()
	t.Cleanup(k.server.Stop)
}

func sealer(id string) (cipher.AEAD, error) {
	block, err := aes.NewCipher(bytes.Repeat([]byte(id+" "), 32)[:32])
	if err != nil {
		return nil, err
	}
	return cipher.NewGCM(block)
}

func (k *keyService) id() string { return fmt.Sprintf("key-%d", k.key.Load()) }

func (k *keyService) Status(context.Context, *kms.StatusRequest) (*kms.StatusResponse, error) {
	return &kms.StatusResponse{Version: "v2", Healthz: "ok", KeyId: k.id()}, nil
}

func (k *keyService) Encrypt(_ context.Context, r *kms.EncryptRequest) (*kms.EncryptResponse, error) {
	gcm, err := sealer(k.id())
	if err != nil {
		return nil, err
	}
	nonce := make([]byte, gcm.NonceSize())
	if _, err := rand.Read(nonce); err != nil {
		return nil, err
	}
	return &kms.EncryptResponse{Ciphertext: gcm.Seal(nonce, nonce, r.Plaintext, nil), KeyId: k.id()}, nil
}

func (k *keyService) Decrypt(_ context.Context, r *kms.DecryptRequest) (*kms.DecryptResponse, error) {
	gcm, err := sealer(r.KeyId)
	if err != nil {
		return nil, err
	}
	if len(r.Ciphertext) < gcm.NonceSize() {
		return nil, errors.New("too short")
	}
	plain, err := gcm.Open(nil, r.Ciphertext[:gcm.NonceSize()], r.Ciphertext[gcm.NonceSize():], nil)
	return &kms.DecryptResponse{Plaintext: plain}, err
}

// A key management service over its socket: it encrypts, its key changes, its failure shows in /readyz while what it has
// decrypted is served, and a server that starts without it waits for it.
func TestEncryptionByKMS(t *testing.T) {
	t.Parallel()
	need(t, harness.Portal(), "build")
	dir := t.TempDir()
	short, err := os.MkdirTemp("", "kms") // a socket's path is short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(short) })
	service := &keyService{socket: filepath.Join(short, "s")}
	service.key.Store(1)
	service.start(t)
	file := filepath.Join(dir, "encryption.yaml")
	replaceFile(t, file, `apiVersion: apiserver.config.k8s.io/v1
kind: EncryptionConfiguration
resources:
- resources: [secrets, services, ipaddresses.networking.k8s.io]
  providers:
  - kms: {apiVersion: v2, name: vault, endpoint: "unix://`+service.socket+`", timeout: 1s}
`)
	api, err := harness.StartPortal(dir, "--encryption-provider-config", file)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { api.Kill() })
	client := connect(t, api.Kubeconfig)
	create := func(name string) {
		t.Helper()
		if _, err := client.CoreV1().Secrets("default").Create(t.Context(), secret(name, "under the third oak"), metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	inUse := func() []string { return keysInUse(storageStatus(t, "--kubeconfig", api.Kubeconfig), "secrets") }
	health := func() int {
		code, _ := admin(t, api).ask(t, "GET", "/readyz/kms-providers", "")
		return code
	}
	create("a")
	if _, err := client.CoreV1().Services("default").Create(t.Context(), nodePort("web"), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if got := inUse(); !slices.Equal(got, []string{"kms/vaultkey-1"}) {
		t.Errorf("keys in use: %v", got)
	}
	if found := filesWith(t, filepath.Join(dir, "data", "etcd"), "under the third oak"); len(found) > 0 {
		t.Errorf("the Secret is in %v", found)
	}

	service.key.Store(2)
	waitFor(t, "the service's new key is used", func() bool {
		health() // makes the server ask, at most every 20 s
		return len(staleOf(t, api)) > 0
	})
	create("b")
	if got := inUse(); !slices.Equal(got, []string{"kms/vaultkey-1", "kms/vaultkey-2"}) {
		t.Errorf("keys in use: %v", got)
	}
	if _, err := harness.Run(t.Context(), nil, harness.Portal(), "storage", "reencrypt", "--kubeconfig", api.Kubeconfig); err != nil {
		t.Fatal(err)
	}
	if got := inUse(); !slices.Equal(got, []string{"kms/vaultkey-2"}) {
		t.Errorf("keys in use after reencrypt: %v", got)
	}

	service.server.Stop()
	waitFor(t, "/readyz/kms-providers fails", func() bool { return health() == http.StatusInternalServerError })
	if code, answer := admin(t, api).ask(t, "GET", "/livez", ""); code != http.StatusOK {
		t.Errorf("/livez: %d %s", code, answer)
	}
	for _, name := range []string{"a", "b"} {
		if got, err := client.CoreV1().Secrets("default").Get(t.Context(), name, metav1.GetOptions{}); err != nil || string(got.Data["treasure"]) != "under the third oak" {
			t.Errorf("without the service: %v %v", got, err)
		}
	}
	if out, err := harness.Run(t.Context(), nil, harness.Portal(), "audit", "--kubeconfig", api.Kubeconfig); err != nil || !strings.Contains(out, "all sound") {
		t.Errorf("portal audit: %v", err)
	}
	if err := api.Stop(20 * time.Second); err != nil {
		t.Fatal(err)
	}

	// A start without the service waits for it, and repairs nothing that it can't read.
	again, err := harness.Start(dir, "portal", harness.Portal(), "server", "--data-dir", filepath.Join(dir, "data"), "--listen",
		strings.TrimPrefix(api.URL, "https://"), "--encryption-provider-config", file)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(again.Kill)
	api.Process = again
	if err := harness.WaitURL(api.URL+"/livez", 60*time.Second); err != nil {
		t.Fatal(err, again.Tail())
	}
	if code := health(); code != http.StatusInternalServerError {
		t.Errorf("/readyz/kms-providers at a start without the service: %d", code)
	}
	service.start(t)
	if err := api.WaitReady(60 * time.Second); err != nil {
		t.Fatal(err)
	}
	if got, err := connect(t, api.Kubeconfig).CoreV1().Secrets("default").List(t.Context(), metav1.ListOptions{}); err != nil || len(got.Items) != 2 {
		t.Errorf("after the service came back: %v %v", got, err)
	}
}

// staleOf are the resources with values that are stored in another way than new ones.
func staleOf(t *testing.T, api *harness.API) []string {
	t.Helper()
	var out []string
	for _, u := range storageStatus(t, "--kubeconfig", api.Kubeconfig).Encryption.Usage {
		if u.Stale && u.Provider == "kms" {
			out = append(out, u.Resource)
		}
	}
	return out
}
