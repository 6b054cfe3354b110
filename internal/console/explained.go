package console

import (
	"context"

	"k8s.io/client-go/rest"

	"portal/internal/explain"
	"portal/internal/explain/gather"
)

// explainZone is the cluster's DNS zone, as far as a console can know.
const explainZone = "cluster.local"

// Explained has the findings of `portal explain`. It reads with the rights of config, as explain does.
func Explained(ctx context.Context, config *rest.Config, namespace, name string) ([]Finding, error) {
	config = rest.CopyConfig(config)
	config.ContentType, config.AcceptContentTypes = "", "" // what nodes answer is shown as it is
	evidence, err := gather.Gather(ctx, gather.Options{Config: config, Zone: explainZone, Namespace: namespace, Service: namespace + "/" + name})
	if err != nil {
		return nil, err
	}
	answer, err := explain.Ask(explain.Look(evidence), explain.Question{Kind: "service", Namespace: namespace, Name: name})
	if err != nil {
		return nil, err
	}
	var out []Finding
	for i := range answer.Findings {
		f := &answer.Findings[i]
		out = append(out, Finding{Severity: f.Severity.String(), Verdict: f.Verdict, Evidence: f.Evidence, Fix: f.Fix})
	}
	return out, nil
}
