package test

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admission/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/test/harness"
)

// admissionHook is a webhook that labels every ConfigMap, and refuses those that say so.
type admissionHook struct{}

func (admissionHook) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var review admissionv1.AdmissionReview
	if err := json.NewDecoder(r.Body).Decode(&review); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	var obj struct {
		Metadata metav1.ObjectMeta `json:"metadata"`
		Data     map[string]string `json:"data"`
	}
	_ = json.Unmarshal(review.Request.Object.Raw, &obj)
	answer := &admissionv1.AdmissionResponse{UID: review.Request.UID, Allowed: true}
	switch {
	case strings.HasSuffix(r.URL.Path, "/mutate"):
		kind := admissionv1.PatchTypeJSONPatch
		answer.PatchType, answer.Patch = &kind, []byte(`[{"op":"add","path":"/metadata/labels","value":{"seen":"yes"}}]`)
	case obj.Data["say"] == "no":
		answer.Allowed, answer.Result = false, &metav1.Status{Message: "the webhook says no", Code: http.StatusForbidden}
	default:
		answer.Warnings = []string{"the webhook has looked at " + obj.Metadata.Name + " with label " + obj.Metadata.Labels["seen"]}
	}
	review.Request, review.Response = nil, answer
	_ = json.NewEncoder(w).Encode(review)
}

const (
	hooks = `apiVersion: admissionregistration.k8s.io/v1
kind: MutatingWebhookConfiguration
metadata: {name: labels}
webhooks:
- name: labels.example.com
  clientConfig: {url: %[1]s/mutate, caBundle: %[2]s}
  rules: [{apiGroups: [""], apiVersions: [v1], resources: [configmaps], operations: [CREATE]}]
  namespaceSelector: {matchLabels: {watched: "yes"}}
  sideEffects: None
  admissionReviewVersions: [v1]
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingWebhookConfiguration
metadata: {name: refuses}
webhooks:
- name: refuses.example.com
  clientConfig: {url: %[1]s/validate, caBundle: %[2]s}
  rules: [{apiGroups: [""], apiVersions: [v1], resources: [configmaps], operations: [CREATE, UPDATE]}]
  namespaceSelector: {matchLabels: {watched: "yes"}}
  matchConditions: [{name: not-certificates, expression: "object.metadata.name != 'kube-root-ca.crt'"}]
  sideEffects: None
  admissionReviewVersions: [v1]
`
	policies = `apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata: {name: ports}
spec:
  paramKind: {apiVersion: v1, kind: ConfigMap}
  matchConstraints:
    resourceRules: [{apiGroups: [""], apiVersions: [v1], resources: [services], operations: [CREATE, UPDATE]}]
  variables: [{name: least, expression: "int(params.data.least)"}]
  validations:
  - expression: object.spec.ports.all(p, p.port >= variables.least)
    messageExpression: "'ports begin at ' + string(variables.least)"
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata: {name: ports}
spec:
  policyName: ports
  validationActions: [Deny]
  paramRef: {name: ports, namespace: shop, parameterNotFoundAction: Allow}
  matchResources: {namespaceSelector: {matchLabels: {watched: "yes"}}}
---
apiVersion: admissionregistration.k8s.io/v1
kind: MutatingAdmissionPolicy
metadata: {name: owner}
spec:
  matchConstraints:
    resourceRules: [{apiGroups: [""], apiVersions: [v1], resources: [services], operations: [CREATE]}]
  matchConditions: [{name: unowned, expression: "!has(object.metadata.annotations)"}]
  reinvocationPolicy: Never
  mutations:
  - patchType: ApplyConfiguration
    applyConfiguration: {expression: "Object{metadata: Object.metadata{annotations: {'owner': request.userInfo.username}}}"}
---
apiVersion: admissionregistration.k8s.io/v1
kind: MutatingAdmissionPolicyBinding
metadata: {name: owner}
spec: {policyName: owner}
`
	// mistypedPolicy compiles, for a policy may be about any type.
	mistypedPolicy = `apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata: {name: mistyped}
spec:
  matchConstraints:
    resourceRules: [{apiGroups: ["", house.example.com], apiVersions: [v1], resources: [services, rooms], operations: [CREATE]}]
  validations: [{expression: "object.spec.ports.all(p, p.prot == 80)"}]
`
	mistakenPolicy = `apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata: {name: mistaken}
spec:
  matchConstraints:
    resourceRules: [{apiGroups: [""], apiVersions: [v1], resources: [services], operations: [CREATE]}]
  validations: [{expression: "object.spec.ports.all(p, q"}]
`
)

// Webhooks and policies judge and change what is written, custom resources too, and are judged themselves.
func TestAdmissionExtensions(t *testing.T) {
	t.Parallel()
	k := newTerminal(t, startPortal(t), []string{harness.Portal(), "kubectl"})
	url, authority := webhookServer(t, admissionHook{})
	k.run("create", "namespace", "shop")
	k.run("label", "namespace", "shop", "watched=yes")
	k.run("apply", "-f", k.file("hooks.yaml", fmt.Sprintf(hooks, url, base64.StdEncoding.EncodeToString(authority))))
	k.run("apply", "-f", k.file("policies.yaml", policies))
	k.run("create", "configmap", "ports", "-n", "shop", "--from-literal=least=1000")

	waitFor(t, "the webhook refuses", func() bool {
		out, err := k.try("create", "configmap", "no", "-n", "shop", "--from-literal=say=no", "--dry-run=server")
		return err != nil && strings.Contains(out, "the webhook says no")
	})
	waitFor(t, "the webhook labels, and the next sees it", func() bool {
		out, err := k.try("create", "configmap", "yes", "-n", "shop", "--dry-run=server")
		return err == nil && strings.Contains(out, "looked at yes with label yes")
	})
	k.run("create", "configmap", "elsewhere", "--from-literal=say=no") // in a namespace that is not watched

	waitFor(t, "the policy refuses", func() bool {
		out, err := k.try("create", "service", "clusterip", "web", "-n", "shop", "--tcp=80", "--dry-run=server")
		return err != nil && strings.Contains(out, "ports begin at 1000")
	})
	waitFor(t, "the policy annotates", func() bool {
		out, err := k.try("create", "service", "clusterip", "web", "-n", "shop", "--tcp=8080", "--dry-run=server", "-o", "jsonpath={.metadata.annotations.owner}")
		return err == nil && out != ""
	})
	k.refused("spec.validations[0].expression: Invalid value", "apply", "-f", k.file("mistaken.yaml", mistakenPolicy))
	k.refused("webhooks[0].sideEffects", "apply", "-f", k.file("hook.yaml", strings.ReplaceAll(fmt.Sprintf(hooks, url, ""), "sideEffects: None", "sideEffects: Some")))

	// A webhook that can't be reached refuses what it should have judged.
	broken := strings.ReplaceAll(fmt.Sprintf(hooks, "https://127.0.0.1:1", base64.StdEncoding.EncodeToString(authority)), "name: refuses}", "name: broken}")
	k.run("apply", "-f", k.file("broken.yaml", broken))
	waitFor(t, "the broken webhook refuses", func() bool {
		out, err := k.try("create", "configmap", "x", "-n", "shop", "--dry-run=server")
		return err != nil && strings.Contains(out, "failed calling webhook")
	})
	k.run("delete", "-f", filepath.Join(k.dir, "broken.yaml"))
}

// A policy's status says which expressions don't fit the types that it is about, custom resources too.
func TestAdmissionPolicyStatus(t *testing.T) {
	t.Parallel()
	k := newTerminal(t, startPortal(t), []string{harness.Portal(), "kubectl"})
	k.run("apply", "-f", k.file("rooms.yaml", fmt.Sprintf(roomsDefinition, "https://127.0.0.1:1", "")))
	k.run("wait", "--for=condition=Established", "crd/rooms.house.example.com", "--timeout=60s")
	k.run("apply", "-f", k.file("mistyped.yaml", mistypedPolicy))
	status := func(path string) string {
		out, _ := k.try("get", "validatingadmissionpolicy", "mistyped", "-o", "jsonpath={"+path+"}")
		return out
	}
	waitFor(t, "the policy is checked", func() bool { return status(".status.observedGeneration") == "1" })
	if got := status(".status.typeChecking.expressionWarnings[*].fieldRef"); got != "spec.validations[0].expression" {
		t.Errorf("what does not fit: %q", got)
	}
	if got := status(".status.typeChecking.expressionWarnings[0].warning"); !strings.Contains(got, "prot") || !strings.Contains(got, "Service") || !strings.Contains(got, "Room") {
		t.Errorf("the warning is %q", got)
	}
	k.run("apply", "-f", k.file("mistyped.yaml", strings.NewReplacer("p.prot", "p.port", ", house.example.com", "", ", rooms", "").Replace(mistypedPolicy)))
	waitFor(t, "the policy is right", func() bool { return status(".status.observedGeneration") == "2" })
	if got := status(".status.typeChecking.expressionWarnings"); got != "" {
		t.Errorf("what does not fit: %q", got)
	}
}

// The policy that the Gateway API publishes with its definitions keeps older ones from taking their place.
func TestGatewayAPIUpgradePolicy(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(module(t, "sigs.k8s.io/gateway-api"), "config", "crd", "standard")
	k := newTerminal(t, startPortal(t, "--controllers", "none"), []string{harness.Portal(), "kubectl"})
	k.run("apply", "--server-side", "-f", filepath.Join(dir, "gateway.networking.k8s.io_vap_safeupgrades.yaml"))
	k.run("apply", "--server-side", "-f", filepath.Join(dir, "gateway.networking.k8s.io_referencegrants.yaml"))
	waitFor(t, "an older definition is refused", func() bool {
		out, err := k.try("annotate", "crd", "referencegrants.gateway.networking.k8s.io", "gateway.networking.k8s.io/bundle-version=v1.2.0", "--overwrite", "--dry-run=server")
		return err != nil && strings.Contains(out, "ValidatingAdmissionPolicy")
	})
}
