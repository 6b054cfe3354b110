//go:build peers

package test

import (
	"fmt"
	"path/filepath"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/test/harness"
)

// TestPeersWithAccounts: kube-controller-manager, each of whose controllers has a ServiceAccount of its own and the
// rights of its default role, gives namespaces what Portal's controllers do, and Portal accepts the tokens that it signs.
func TestPeersWithAccounts(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	audit := filepath.Join(dir, "audit.log")
	api := startPortal(t, append(audited(t, audit), "--controllers", "none", "--enable-admission-plugins", "ServiceAccount")...)
	admin, ctx := connect(t, api.Kubeconfig), t.Context()
	pki := filepath.Join(filepath.Dir(api.Kubeconfig), "pki")
	manager := startPeer(t, dir, "kube-controller-manager", "--kubeconfig", api.Kubeconfig, "--authentication-kubeconfig", api.Kubeconfig,
		"--authorization-kubeconfig", api.Kubeconfig, "--bind-address", "127.0.0.1", "--secure-port", fmt.Sprint(harness.FreePort()),
		"--cert-dir", filepath.Join(dir, "kcm"), "--use-service-account-credentials=true", "--leader-elect=false",
		"--root-ca-file", filepath.Join(pki, "ca.crt"), "--service-account-private-key-file", filepath.Join(pki, "service-account.key"),
		"--controllers", "namespace-controller,serviceaccount-controller,serviceaccount-token-controller,"+
			"root-ca-certificate-publisher-controller,endpoints-controller,endpointslice-controller,"+
			"endpointslice-mirroring-controller,clusterrole-aggregation-controller")
	core := admin.CoreV1()
	if _, err := core.Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "x"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	within(t, "no default account", func() error {
		_, err := core.ServiceAccounts("x").Get(ctx, "default", metav1.GetOptions{})
		return err
	})
	secret := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: "s", Annotations: map[string]string{corev1.ServiceAccountNameKey: "default"}},
		Type:       corev1.SecretTypeServiceAccountToken,
	}
	if _, err := core.Secrets("x").Create(ctx, secret, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	var token string
	within(t, "the Secret is not filled", func() error {
		s, err := core.Secrets("x").Get(ctx, "s", metav1.GetOptions{})
		if token = string(s.Data["token"]); err == nil && token == "" {
			return fmt.Errorf("it has no token")
		}
		return err
	})
	if _, err := asToken(t, api, token).CoreV1().Pods("x").List(ctx, metav1.ListOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("its token: %v", err)
	}
	pod := aPod("p", "")
	pod.Labels = map[string]string{"app": "p"}
	if _, err := core.Pods("x").Create(ctx, pod, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	service := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "v"}, Spec: corev1.ServiceSpec{Selector: pod.Labels, Ports: []corev1.ServicePort{{Port: 80}}}}
	if _, err := core.Services("x").Create(ctx, service, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	within(t, "the controllers of endpoints do nothing", func() error {
		if _, err := core.Endpoints("x").Get(ctx, "v", metav1.GetOptions{}); err != nil {
			return err
		}
		list, err := admin.DiscoveryV1().EndpointSlices("x").List(ctx, metav1.ListOptions{})
		if err == nil && len(list.Items) == 0 {
			return fmt.Errorf("no slice")
		}
		return err
	})
	if err := core.Namespaces().Delete(ctx, "x", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	within(t, "the namespace does not end", func() error {
		if _, err := core.Namespaces().Get(ctx, "x", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			return fmt.Errorf("got %v", err)
		}
		return nil
	})
	if _, err := asToken(t, api, token).CoreV1().Pods("x").List(ctx, metav1.ListOptions{}); !apierrors.IsUnauthorized(err) {
		t.Errorf("its token without the Secret: %v", err)
	}
	manager.Kill()
	for _, line := range complaints(t, manager.Log) {
		t.Errorf("%s: %s", manager.Name, line)
	}
	notRefused(t, audit, "system:serviceaccount:kube-system:namespace-controller", "system:serviceaccount:kube-system:endpointslice-controller",
		"system:serviceaccount:kube-system:clusterrole-aggregation-controller")
}
