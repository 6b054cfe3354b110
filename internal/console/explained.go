package console

import (
	"context"

	"k8s.io/client-go/rest"

	"portal/internal/explain"
	"portal/internal/explain/gather"
)

// explainZone is the cluster's DNS zone, as far as a console can know.
const explainZone = "cluster.local"

// Explained has the findings of `portal explain`. What is not known already it reads with the rights of the person who asks, as explain does.
func Explained(ctx context.Context, about Subject) ([][]Finding, error) {
	var names []string
	for _, k := range about.Services {
		names = append(names, k.Namespace+"/"+k.Name)
	}
	config := rest.CopyConfig(about.Config)
	config.ContentType, config.AcceptContentTypes = "", "" // what nodes answer is shown as it is
	evidence, err := gather.Gather(ctx, gather.Options{
		Config: config, Zone: explainZone, Namespace: about.Namespace, Services: names, Known: about.Known, Covered: about.Covered,
	})
	if err != nil {
		return nil, err
	}
	release, err := about.Turn(ctx)
	if err != nil {
		return nil, err
	}
	defer release()
	out := make([][]Finding, len(about.Services))
	for i, answer := range explain.AskServices(explain.Look(evidence), about.Services) {
		for j := range answer.Findings {
			f := &answer.Findings[j]
			out[i] = append(out[i], Finding{Severity: f.Severity.String(), Verdict: f.Verdict, Evidence: f.Evidence, Fix: f.Fix})
		}
	}
	return out, nil
}
