package test

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	rbacv1 "k8s.io/api/rbac/v1"
)

// escalation is a request that could give somebody more than they have, and the codes that it may be refused with.
type escalation struct {
	method, path, kind, body string
	codes                    []int
}

const (
	jsonBody  = "application/json"
	mergeBody = "application/merge-patch+json"
	jsonPatch = "application/json-patch+json"
	strategic = "application/strategic-merge-patch+json"
	applyBody = "application/apply-patch+yaml"
)

func (w *escalations) chance(percent int) bool { return w.random.IntN(100) < percent }

// power are rules that are worth having, some of them in disguise.
var power = []rbacv1.PolicyRule{
	allow("*", "*", "*"), allow("get", "", "secrets"), allow("*", "", "pods"), allow("get", "*", "*"), allow("get,list", "", "*"),
	allow("impersonate", "", "users,groups,serviceaccounts"), allow("impersonate", "", "groups", "system:masters"),
	allow("bind,escalate", rbacv1.GroupName, "clusterroles,roles"), allow("bind", rbacv1.GroupName, "clusterroles", "cluster-admin"),
	allow("create", "", "serviceaccounts/token"), allow("create", "", "pods/exec"), allow("get", "", "pods/*"), allow("get", "", "*/*"),
	allow("update", "", "*/status"), allow("get", "", "secrets", "one"), allow("get", "", "configmaps"), allow("get", "", "configmaps", "one", "two"),
	allow("get", "", "configmaps", ""), allow("list,*", "", "pods"), allow("GET", "", "pods"), allow("get", "*", "pods"), allow("approve,sign", "certificates.k8s.io", "signers"),
	{Verbs: []string{"*"}, NonResourceURLs: []string{"*"}}, {Verbs: []string{"get"}, NonResourceURLs: []string{"/metrics*"}},
	{Verbs: []string{"get"}, NonResourceURLs: []string{"/*"}}, {Verbs: []string{"get", "post"}, NonResourceURLs: []string{"/metrics"}},
	{Verbs: []string{"get"}, NonResourceURLs: []string{"**"}}, {Verbs: []string{"get"}, NonResourceURLs: []string{"/portal/*", "/debug/*"}},
}

// rights are rules to write: some that the one who writes has, some of power.
func (w *escalations) rights(who string) (out []rbacv1.PolicyRule) {
	i := slices.IndexFunc(attackers, func(a attacker) bool { return a.name == who })
	own := append(slices.Clone(attackers[i].clustered), attackers[i].local...)
	for range 1 + w.random.IntN(2) {
		if len(own) > 0 && w.chance(35) {
			out = append(out, pick(w.random, own...))
		} else if w.chance(85) || len(own) == 0 {
			out = append(out, pick(w.random, power...))
		}
	}
	if w.chance(10) && len(own) > 0 { // one rule of parts of several
		mixed := pick(w.random, own...)
		mixed.Verbs = append(slices.Clone(mixed.Verbs), pick(w.random, "bind", "escalate", "*", "impersonate"))
		out = append(out, mixed)
	}
	return out
}

func (w *escalations) subject(who string) map[string]string {
	return pick(w.random,
		map[string]string{"kind": "User", "name": who}, map[string]string{"kind": "User", "name": who}, map[string]string{"kind": "User", "name": "eve"},
		map[string]string{"kind": "Group", "name": who + "s"}, map[string]string{"kind": "Group", "name": "system:authenticated"},
		map[string]string{"kind": "Group", "name": "system:unauthenticated"}, map[string]string{"kind": "User", "name": "system:anonymous"},
		map[string]string{"kind": "ServiceAccount", "name": "robot", "namespace": "a"})
}

func text(obj any) string {
	data, err := json.Marshal(obj)
	if err != nil {
		panic(err)
	}
	return string(data)
}

// attempt makes one.
func (w *escalations) attempt(who string) escalation {
	namespace := pick(w.random, "", "", "a", "a", "a", "b")
	if who == "local" || who == "escalator" {
		namespace = pick(w.random, "a", "a", "a", "a", "b", "")
	}
	var e escalation
	switch n := w.random.IntN(100); {
	case n < 35:
		e = w.writeRole(who, namespace)
	case n < 75:
		e = w.writeBinding(who, namespace)
	case n < 92:
		e = w.aggregate(who)
	default:
		e = w.detour(who, namespace)
	}
	if w.chance(10) {
		separator := "?"
		if strings.Contains(e.path, "?") {
			separator = "&"
		}
		e.path += separator + pick(w.random, "fieldValidation=Ignore", "pretty=true", "dryRun=", "fieldValidation=Warn")
	}
	return e
}

const rbacAPI = "/apis/rbac.authorization.k8s.io/v1"

func place(namespace, plural string) string {
	if namespace == "" {
		return rbacAPI + "/cluster" + plural
	}
	return rbacAPI + "/namespaces/" + namespace + "/" + plural
}

func kindName(namespace, kind string) string {
	if namespace == "" {
		return "Cluster" + kind
	}
	return kind
}

// denials are what an attempt may be answered with: forbidden, or invalid. A few forms have more.
var denials = []int{403, 422}

// put is a write of an object in one of the ways that there are. The object is whole for those that need it.
func (w *escalations) put(collection, name string, object map[string]any) escalation {
	object["metadata"] = map[string]any{"name": name}
	if labels, ok := object["labels"]; ok {
		object["metadata"].(map[string]any)["labels"] = labels
		delete(object, "labels")
	}
	one := collection + "/" + name
	var operations []map[string]any
	part := map[string]any{}
	for _, field := range []string{"rules", "subjects", "roleRef", "aggregationRule"} {
		if value, ok := object[field]; ok {
			operations = append(operations, map[string]any{"op": "add", "path": "/" + field, "value": value})
			part[field] = value
		}
	}
	if labels := object["metadata"].(map[string]any)["labels"]; labels != nil {
		operations = append(operations, map[string]any{"op": "add", "path": "/metadata/labels", "value": labels})
		part["metadata"] = map[string]any{"labels": labels}
	}
	// A binding's role may not exist, an object neither; and one that is created may.
	missing := append([]int{404, 409}, denials...)
	switch w.random.IntN(8) {
	case 0:
		fresh := map[string]any{"generateName": "fresh-", "labels": object["metadata"].(map[string]any)["labels"]}
		object["metadata"] = fresh
		return escalation{"POST", collection, jsonBody, text(object), missing}
	case 1:
		return escalation{"POST", collection, jsonBody, text(object), missing}
	case 2:
		return escalation{"PUT", one, jsonBody, text(object), missing}
	case 3:
		return escalation{"PATCH", one, mergeBody, text(part), missing}
	case 4:
		return escalation{"PATCH", one, strategic, text(part), missing}
	case 5:
		return escalation{"PATCH", one, jsonPatch, text(operations), missing}
	case 6:
		return escalation{"PATCH", one + "?fieldManager=" + pick(w.random, "me", "kube-apiserver", "portal") + "&force=true", applyBody, text(object), missing}
	}
	// A body that says things twice: what counts is what is stored.
	body := strings.Replace(text(object), "{", `{"rules":[],"subjects":[],`, 1)
	return escalation{"PUT", one, jsonBody, body, append(missing, 400)}
}

func (w *escalations) writeRole(who, namespace string) escalation {
	name := pick(w.random, "new", "weak", "weak", "mine2", who+"-rights")
	if who == "escalator" && namespace == "a" {
		name = pick(w.random, "new", "weak", "escalator-rights", "Mine", "mine.")
	}
	if namespace == "" && w.chance(15) {
		name = pick(w.random, "strong", "cluster-admin", "view", "edit", "system:basic-user", "system:discovery")
	}
	return w.put(place(namespace, "roles"), name, map[string]any{
		"apiVersion": "rbac.authorization.k8s.io/v1", "kind": kindName(namespace, "Role"), "rules": w.rights(who),
	})
}

func (w *escalations) writeBinding(who, namespace string) escalation {
	ref := map[string]string{"apiGroup": rbacv1.GroupName, "kind": "ClusterRole", "name": pick(w.random, "strong", "cluster-admin", "admin", "edit", "view", "weak",
		"system:controller:clusterrole-aggregation-controller", "system:kube-controller-manager", "system:node", "gathers", "none", "operator-rights")}
	if namespace == "a" && w.chance(20) {
		ref["kind"], ref["name"] = "Role", pick(w.random, "weak", who+"-rights", "local-rights", "mine", "none")
	}
	if (who == "binder" && ref["name"] == "weak" && ref["kind"] == "ClusterRole") || (who == "escalator" && ref["name"] == "mine") {
		ref["name"] = "strong" // what they are allowed to bind is for the end
	}
	// The subjects of a binding that exists, or its role.
	name := pick(w.random, "new", "weak", "strong", who)
	if namespace == "" && w.chance(25) {
		name = pick(w.random, "cluster-admin", "system:basic-user", "system:discovery", "system:kube-controller-manager", "operator")
	}
	object := map[string]any{
		"apiVersion": "rbac.authorization.k8s.io/v1", "kind": kindName(namespace, "RoleBinding"), "roleRef": ref,
		"subjects": []any{w.subject(who), w.subject(who)},
	}
	if known := map[string]string{"cluster-admin": "cluster-admin", "weak": "weak", "strong": "strong"}[name]; known != "" && w.chance(60) && who != "binder" {
		object["roleRef"] = map[string]string{"apiGroup": rbacv1.GroupName, "kind": kindName(map[string]string{"a": "a"}[namespace], "Role"), "name": known}
	}
	return w.put(place(namespace, "rolebindings"), name, object)
}

// aggregate has others' rules added to roles that the attacker is bound to.
func (w *escalations) aggregate(who string) escalation {
	label := pick(w.random, "gather", "gather", "rbac.authorization.k8s.io/aggregate-to-view", "rbac.authorization.k8s.io/aggregate-to-admin")
	labels := map[string]string{label: pick(w.random, "yes", "true", "yes")}
	roles := place("", "roles")
	missing := append([]int{404, 409}, denials...)
	selectors := map[string]any{"clusterRoleSelectors": []any{pick(w.random,
		map[string]any{}, map[string]any{"matchLabels": map[string]string{"gather": "yes"}},
		map[string]any{"matchLabels": map[string]string{"kubernetes.io/bootstrapping": "rbac-defaults"}},
		map[string]any{"matchExpressions": []any{map[string]any{"key": "gather", "operator": "DoesNotExist"}}})}}
	switch w.random.IntN(6) {
	case 0: // label what is strong
		name := pick(w.random, "strong", "cluster-admin", "admin", "operator-rights", "system:kube-controller-manager")
		return escalation{"PATCH", roles + "/" + name, pick(w.random, mergeBody, strategic), text(map[string]any{"metadata": map[string]any{"labels": labels}}), missing}
	case 1: // a new one that is gathered
		return w.put(roles, "new", map[string]any{
			"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "rules": w.rights(who), "labels": labels,
		})
	case 2: // a new one that gathers
		return w.put(roles, "new", map[string]any{
			"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "aggregationRule": selectors,
		})
	case 3: // other selectors
		name := pick(w.random, "gathers", "gathers", "view", "weak", who+"-rights")
		return escalation{"PATCH", roles + "/" + name, pick(w.random, mergeBody, strategic), text(map[string]any{"aggregationRule": selectors}), missing}
	case 4: // rules written into one that gathers, or kept when it no longer does
		body := map[string]any{"rules": w.rights(who)}
		if w.chance(50) {
			body["aggregationRule"] = nil
		}
		return escalation{"PATCH", roles + "/" + pick(w.random, "gathers", "view", "edit"), mergeBody, text(body), missing}
	}
	// With both, by applying.
	return escalation{"PATCH", roles + "/" + pick(w.random, "gathers", "strong", "new") + "?fieldManager=me&force=true", applyBody, text(map[string]any{
		"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": map[string]any{"name": "gathers", "labels": labels}, "rules": w.rights(who),
	}), append(missing, 400)}
}

// detour tries ways that are no ways: subresources that don't exist, other versions, proxies, reviews with an answer in them.
func (w *escalations) detour(who, namespace string) escalation {
	role := map[string]any{
		"apiVersion": "rbac.authorization.k8s.io/v1", "kind": kindName(namespace, "Role"), "metadata": map[string]any{"name": "weak"}, "rules": w.rights(who),
	}
	roles := place(namespace, "roles")
	none := []int{400, 403, 404, 405, 406, 409, 415, 422}
	switch w.random.IntN(8) {
	case 0:
		return escalation{"PUT", roles + "/weak/" + pick(w.random, "status", "scale", "rules", "bind", "escalate"), jsonBody, text(role), none}
	case 1:
		return escalation{"PATCH", roles + "/weak/status", mergeBody, text(role), none}
	case 2:
		return escalation{"POST", strings.Replace(roles, "/v1/", pick(w.random, "/v1beta1/", "/v1alpha1/", "//v1/", "/v1/../v1/"), 1), jsonBody, text(role), append(none, 301)}
	case 3:
		return escalation{"POST", roles, pick(w.random, "application/vnd.kubernetes.protobuf", "application/cbor", "application/yaml", "text/plain"), text(role), none}
	case 4:
		return escalation{"POST", place(namespace, "rolebindings") + "/weak/status", jsonBody, text(map[string]any{"subjects": []any{w.subject(who)}}), none}
	case 5: // a role that goes, so that another can take its name
		return escalation{"DELETE", place(namespace, "roles") + "/" + pick(w.random, "weak", "mine", "none"), jsonBody, "", none}
	case 6:
		return escalation{"POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", jsonBody, fmt.Sprintf(
			`{"spec":{"user":%q,"groups":["system:masters"],"resourceAttributes":{"verb":"*","group":"*","resource":"*"}},"status":{"allowed":true}}`, who), none}
	}
	return escalation{"DELETE", place(namespace, "rolebindings") + "?labelSelector=nothing%3Dhere", jsonBody, "", none}
}
