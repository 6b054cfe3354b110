package test

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// While one user floods the server, a second user, a node and a leader get their answers, and none of them a 429. How fast is
// for `make bench-flood` to say. It takes all processors, so no other test runs beside it.
func TestFloodRefusesNobodyElse(t *testing.T) {
	file := filepath.Join(t.TempDir(), "tokens")
	users := "flooder,flooder,1,\"\"\nsecond,second,2,\"\"\nnode,system:node:node,3,\"system:nodes\"\nleader,system:kube-controller-manager,4,\"\"\n"
	if err := os.WriteFile(file, []byte(users), 0o600); err != nil {
		t.Fatal(err)
	}
	api := startPortal(t, "--controllers", "none", "--token-auth-file", file)
	allow := &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "flood"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
	}
	for _, name := range []string{"flooder", "second", "system:node:node", "system:kube-controller-manager"} {
		allow.Subjects = append(allow.Subjects, rbacv1.Subject{APIGroup: rbacv1.GroupName, Kind: "User", Name: name})
	}
	client := connect(t, api.Kubeconfig)
	if _, err := client.RbacV1().ClusterRoleBindings().Create(t.Context(), allow, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	second := somebody(api, "second")
	waitFor(t, "the users may write", func() bool {
		code, _ := second.ask(t, "POST", "/api/v1/namespaces/default/configmaps", `{"metadata":{"name":"first"}}`)
		return code == http.StatusCreated
	})
	for i := range 200 {
		body := fmt.Sprintf(`{"metadata":{"name":"c-%d"},"data":{"x":%q}}`, i, strings.Repeat("x", 1000))
		if code, answer := second.ask(t, "POST", "/api/v1/namespaces/default/configmaps", body); code != http.StatusCreated {
			t.Fatalf("%d %s", code, answer)
		}
	}
	leases := map[string]string{"node": "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases", "leader": "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases"}
	for name, path := range leases {
		if code, answer := somebody(api, name).ask(t, "POST", path, fmt.Sprintf(`{"metadata":{"name":%q}}`, name)); code != http.StatusCreated {
			t.Fatalf("%d %s", code, answer)
		}
	}

	ctx, stop := context.WithCancel(t.Context())
	var flood sync.WaitGroup
	var answered atomic.Int64
	for i := range 100 {
		who := somebody(api, "flooder")
		flood.Go(func() {
			for path := []string{"/api/v1/configmaps", "/openapi/v2", "/apis/rbac.authorization.k8s.io/v1/clusterroles"}[i%3]; ctx.Err() == nil; {
				if code, _, err := who.try("GET", path, "application/json", ""); err == nil && code == http.StatusOK {
					answered.Add(1)
				}
			}
		})
	}
	for round := range 20 {
		if code, answer := second.ask(t, "GET", "/api/v1/namespaces/default/configmaps/first", ""); code != http.StatusOK {
			t.Errorf("second user: %d %s", code, answer)
		}
		for name, path := range leases {
			renewal := fmt.Sprintf(`{"spec":{"holderIdentity":"%s-%d"}}`, name, round)
			if code, answer, err := somebody(api, name).try("PATCH", path+"/"+name, "application/merge-patch+json", renewal); code != http.StatusOK {
				t.Errorf("%s: %d %v %s", name, code, err, answer)
			}
		}
	}
	stop()
	flood.Wait()
	if answered.Load() == 0 {
		t.Error("nobody answered the one who flooded")
	}
}

// The configuration of flow control is served. What the server needs of it comes back, and who gets which level can be asked for.
func TestFlowControlConfiguration(t *testing.T) {
	t.Parallel()
	api := startPortal(t, "--controllers", "none")
	client := connect(t, api.Kubeconfig).FlowcontrolV1()
	for _, name := range []string{"exempt", "catch-all", "system-node-high"} {
		if err := client.FlowSchemas().Delete(t.Context(), name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		waitFor(t, "FlowSchema "+name+" comes back", func() bool {
			_, err := client.FlowSchemas().Get(t.Context(), name, metav1.GetOptions{})
			return err == nil
		})
	}
	waitFor(t, "FlowSchemas have their levels", func() bool {
		list, err := client.FlowSchemas().List(t.Context(), metav1.ListOptions{})
		if err != nil || len(list.Items) == 0 {
			return false
		}
		for i := range list.Items {
			if conditions := list.Items[i].Status.Conditions; len(conditions) == 0 || conditions[0].Status != "False" {
				return false
			}
		}
		return true
	})
	level, err := client.PriorityLevelConfigurations().Get(t.Context(), "catch-all", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	level.Spec.Limited.NominalConcurrencyShares = new(int32(500))
	if _, err := client.PriorityLevelConfigurations().Update(t.Context(), level, metav1.UpdateOptions{}); !apierrors.IsInvalid(err) {
		t.Errorf("a level of the server's own was changed: %v", err)
	}

	config := admin(t, api)
	resp, err := config.client.Get(api.URL + "/api/v1/namespaces/default")
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.Header.Get("X-Kubernetes-Pf-Flowschema-Uid") == "" {
		t.Errorf("an answer doesn't say which FlowSchema it had: %v", resp.Header)
	}
}
