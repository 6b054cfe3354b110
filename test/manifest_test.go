package test

import (
	"fmt"
	"strings"
)

// workload is a Deployment of `portal echo`, whose Pods have the label app: NAME.
type workload struct {
	name     string
	replicas int
	// spec and pod are further lines of the Deployment's spec and of its Pods', without indentation.
	spec, pod string
	// args are those of echo beside --listen; probe is the readiness probe, by default a request.
	args, probe string
}

func indent(text, by string) string {
	if text == "" {
		return ""
	}
	return by + strings.ReplaceAll(strings.TrimRight(text, "\n"), "\n", "\n"+by) + "\n"
}

// spread has Pods on as many nodes as there are.
func spread(app string) string {
	return fmt.Sprintf(`topologySpreadConstraints:
- {maxSkew: 1, topologyKey: kubernetes.io/hostname, whenUnsatisfiable: ScheduleAnyway, labelSelector: {matchLabels: {app: %s}}}`, app)
}

func (w workload) String() string {
	if w.probe == "" {
		w.probe = "{httpGet: {port: 9376}, periodSeconds: 1, timeoutSeconds: 5}"
	}
	args := `echo, --listen, ":9376"`
	if w.args != "" {
		args += ", " + w.args
	}
	return fmt.Sprintf(`
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: %[1]s}
spec:
  replicas: %[2]d
%[3]s  selector: {matchLabels: {app: %[1]s}}
  template:
    metadata: {labels: {app: %[1]s}}
    spec:
%[4]s      containers:
      - name: backend
        image: portal
        args: [%[5]s]
        readinessProbe: %[6]s
`, w.name, w.replicas, indent(w.spec, "  "), indent(w.pod, "      "), args, w.probe)
}

// serviceManifest is a Service in front of the Pods of an app. spec has further lines, without indentation.
func serviceManifest(name, kind, app, spec string, annotations ...string) string {
	if !strings.Contains(spec, "ports:") {
		spec += "\nports: [{port: 80, targetPort: 9376}]"
	}
	return fmt.Sprintf(`
---
apiVersion: v1
kind: Service
metadata:
  name: %s
  annotations:
    example.com/for: tests
%sspec:
  type: %s
  selector: {app: %s}
%s`, name, indent(strings.Join(annotations, "\n"), "    "), kind, app, indent(strings.TrimLeft(spec, "\n"), "  "))
}
