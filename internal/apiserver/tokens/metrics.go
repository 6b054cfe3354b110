package tokens

import (
	"sync"

	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
)

// The names are kube-apiserver's, so that dashboards find them.
var (
	legacyTokens = counter("legacy_tokens_total", "Uses of ServiceAccount tokens that say no audience.", metrics.BETA)
	staleTokens  = counter("stale_tokens_total", "Uses of projected tokens that their program should have read anew.", metrics.BETA)
	validTokens  = counter("valid_tokens_total", "Uses of projected tokens in time.", metrics.BETA)
	manualTokens = counter("legacy_manual_token_uses_total", "Uses of tokens of Secrets.", metrics.ALPHA)
)

// RegisterMetrics adds the metrics of tokens to those that are served.
var RegisterMetrics = sync.OnceFunc(func() {
	legacyregistry.MustRegister(legacyTokens, staleTokens, validTokens, manualTokens)
})

func counter(name, help string, stability metrics.StabilityLevel) *metrics.Counter {
	return metrics.NewCounter(&metrics.CounterOpts{Subsystem: "serviceaccount", Name: name, Help: help, StabilityLevel: stability})
}
