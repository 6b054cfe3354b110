package main

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"k8s.io/client-go/kubernetes"

	"portal/internal/trace"
	"portal/internal/trace/learn"
)

// learn finds out how the nodes' proxies are configured, as far as flags don't say, and returns where it learned that. In a lab the
// proxies are asked directly; elsewhere through the API.
func (o *traceOptions) learn(ctx context.Context, client kubernetes.Interface, objects *trace.Objects, s *trace.Settings) string {
	if o.lab != "" {
		running, err := findLab(o.lab)
		if err != nil || s.Mode != "" {
			return ""
		}
		for _, name := range slices.Sorted(maps.Keys(running.Machines)) {
			m, err := running.Machine(name)
			if err != nil || !strings.HasPrefix(name, "node") {
				continue
			}
			if state, err := proxyState(ctx, m.Do); err == nil && slices.Contains(trace.ModeNames(), state.Mode) {
				s.Mode = state.Mode
				return fmt.Sprintf("all nodes have the proxy mode of %s, %s", name, state.Mode)
			}
		}
		return ""
	}
	var nodes []string
	for i := range objects.Nodes {
		nodes = append(nodes, objects.Nodes[i].Name)
	}
	return learn.Settings(ctx, client, nodes, s)
}
