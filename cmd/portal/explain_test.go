package main

import (
	"strings"
	"testing"

	"portal/internal/explain"
)

func TestExplainArguments(t *testing.T) {
	for args, want := range map[string]explain.Question{
		"":                       {},
		"web":                    {Kind: "service", Namespace: "shop", Name: "web"},
		"web.shop":               {Kind: "name", Namespace: "shop", Name: "web.shop"},
		"10.96.0.10":             {Kind: "address", Name: "10.96.0.10"},
		"10.96.0.10:53":          {Kind: "address", Name: "10.96.0.10:53"},
		"fd00:96::a":             {Kind: "address", Name: "fd00:96::a"},
		"[fd00:96::a]:5":         {Kind: "address", Name: "[fd00:96::a]:5"},
		"service web":            {Kind: "service", Namespace: "shop", Name: "web"},
		"svc/web":                {Kind: "service", Namespace: "shop", Name: "web"},
		"service other/web":      {Kind: "service", Namespace: "other", Name: "web"},
		"pods web-1":             {Kind: "pod", Namespace: "shop", Name: "web-1"},
		"name web.shop":          {Kind: "name", Namespace: "shop", Name: "web.shop"},
		"address [fd00:96::a]:5": {Kind: "address", Name: "[fd00:96::a]:5"},
		"ingress front":          {Kind: "ingress", Namespace: "shop", Name: "front"},
	} {
		o := explainOptions{namespace: "shop"}
		if got, err := o.question(strings.Fields(args)); err != nil || got != want {
			t.Errorf("%q: %+v, %v", args, got, err)
		}
	}
}

// TestExplainUsage: a wrong command line is one line and exit status 2.
func TestExplainUsage(t *testing.T) {
	for args, want := range map[string]string{
		"explain node n1":                  `"node" can't be explained: want service NAME`,
		"explain node/n1":                  `"node/n1" can't be explained: want service NAME`,
		"explain service":                  "a name is missing",
		"explain service a b":              "takes one name",
		"explain -o yaml":                  `--output "yaml": must be json`,
		"explain --timeout 0s":             "--timeout: must be more than 0",
		"explain --kubeconfig /none/there": "--kubeconfig",
		"status now":                       "takes no arguments",
		"status -o yaml":                   `--output "yaml": must be json`,
		"explain service web --namespace":  "flag needs an argument",
	} {
		var out strings.Builder
		if code := run(t.Context(), strings.Fields(args), &out); code != 2 || !strings.Contains(out.String(), want) || strings.Count(out.String(), "\n") != 1 {
			t.Errorf("%s: exit status %d: %s\nwant 2 with %q", args, code, out.String(), want)
		}
	}
}
