package apiserver

import (
	"strings"
	"testing"
)

const tracingHead = "apiVersion: apiserver.config.k8s.io/v1\nkind: TracingConfiguration\n"

// An error in the configuration names flag, file, line and field.
func TestTracingConfigMistakes(t *testing.T) {
	for name, c := range map[string]struct{ text, want string }{
		"no YAML":         {"a: b\nc: d: e", "line 2"},
		"empty":           {"", "is missing"},
		"another kind":    {encryptionHead + "resources: []\n", "it is a EncryptionConfiguration, and must be a TracingConfiguration"},
		"unknown field":   {tracingHead + "endpoints: a:1\n", "line 3: endpoints: there is no such field"},
		"not a number":    {tracingHead + "samplingRatePerMillion: all\n", "line 3: samplingRatePerMillion: must be a int32, and is a string"},
		"negative rate":   {tracingHead + "samplingRatePerMillion: -1\n", "line 3: samplingRatePerMillion: is wrong"},
		"too high a rate": {tracingHead + "endpoint: a:1\nsamplingRatePerMillion: 1000001\n", "line 4: samplingRatePerMillion: is wrong"},
		"a web page":      {tracingHead + "endpoint: https://collector:4317\n", "line 3: endpoint: is wrong"},
		"no endpoint":     {tracingHead + "endpoint: ''\n", "line 3: endpoint: is wrong: must be the host:port of a collector"},
	} {
		file := write(t, c.text)
		err := TracingOptions{ConfigFile: file}.validate()
		if err == nil || !strings.HasPrefix(err.Error(), "--tracing-config-file "+file) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
	if err := (TracingOptions{ConfigFile: "/does/not/exist"}).validate(); err == nil || !strings.Contains(err.Error(), "--tracing-config-file: ") {
		t.Error(err)
	}
	for _, version := range []string{"v1alpha1", "v1beta1", "v1"} {
		file := write(t, strings.Replace(tracingHead, "/v1", "/"+version, 1)+"endpoint: collector:4317\nsamplingRatePerMillion: 100\n")
		if err := (TracingOptions{ConfigFile: file}).validate(); err != nil {
			t.Errorf("%s: %v", version, err)
		}
	}
}

// Without a file there is nothing that could record.
func TestTracingIsOffByDefault(t *testing.T) {
	if provider, err := DefaultOptions().Tracing.open(t.Context(), 6443); provider != nil || err != nil {
		t.Errorf("%v, %v", provider, err)
	}
}
