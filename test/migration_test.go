package test

import (
	"strings"
	"testing"
)

const twoVersions = `apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: widgets.example.com}
spec:
  group: example.com
  scope: Namespaced
  names: {plural: widgets, singular: widget, kind: Widget, listKind: WidgetList}
  versions:
  - {name: v1, served: true, storage: STORED1, schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}}
  - {name: v2, served: true, storage: STORED2, schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}}
`

const migration = `apiVersion: storagemigration.k8s.io/v1
kind: StorageVersionMigration
metadata: {name: NAME}
spec: {resource: {group: GROUP, resource: RESOURCE}}
`

// A migration stores a custom resource's objects in the version of today, so that the old version can go.
func TestStorageVersionMigration(t *testing.T) {
	t.Parallel()
	k := newTerminal(t, startPortal(t), kubectls(t)["portal-kubectl"])
	definition := func(v1, v2 string) string {
		return k.file("crd.yaml", strings.NewReplacer("STORED1", v1, "STORED2", v2).Replace(twoVersions))
	}
	k.run("apply", "-f", definition("true", "false"))
	k.run("wait", "--for=condition=Established", "crd/widgets.example.com", "--timeout=30s")
	k.run("create", "-f", k.file("widget.yaml", "apiVersion: example.com/v1\nkind: Widget\nmetadata: {name: w}\nspec: {size: 3}\n"))
	k.run("apply", "-f", definition("false", "true"))
	stored := func() string {
		return k.run("get", "crd", "widgets.example.com", "-o", "jsonpath={.status.storedVersions}")
	}
	if got := stored(); got != `["v1","v2"]` {
		t.Fatalf("stored versions before: %s", got)
	}
	before := k.run("get", "widget", "w", "-o", "jsonpath={.metadata.resourceVersion}")

	k.run("create", "-f", k.file("m.yaml", strings.NewReplacer("NAME", "widgets", "GROUP", "example.com", "RESOURCE", "widgets").Replace(migration)))
	k.run("wait", "--for=condition=Succeeded", "storageversionmigration/widgets", "--timeout=60s")
	if got := stored(); got != `["v2"]` {
		t.Errorf("stored versions afterwards: %s", got)
	}
	if after := k.run("get", "widget", "w", "-o", "jsonpath={.metadata.resourceVersion}"); after == before {
		t.Error("the object was not written")
	}
	if got := k.run("get", "widget", "w", "-o", "jsonpath={.spec.size}"); got != "3" {
		t.Errorf("the object has changed: %s", got)
	}
	if out := k.run("get", "storageversionmigrations"); !strings.Contains(out, "widgets.example.com") || !strings.Contains(out, "Succeeded") {
		t.Errorf("%s", out)
	}
	k.run("create", "-f", k.file("none.yaml", strings.NewReplacer("NAME", "none", "GROUP", "\"\"", "RESOURCE", "reviews").Replace(migration)))
	k.refused("cannot be changed", "patch", "storageversionmigration", "none", "--type=merge", "-p", `{"spec":{"resource":{"resource":"secrets"}}}`)
}
