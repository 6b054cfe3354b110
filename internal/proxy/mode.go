package proxy

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"

	"portal/internal/intent"
	"portal/internal/proxy/backend"
)

// autoOrder is what the mode auto tries: the quickest first, the one that every kernel can last.
var autoOrder = []string{"nftables", "iptables", "userspace"}

// choose finds the mode to run: the one that was asked for, or the first of autoOrder that this machine can. A machine
// without IPVS gets iptables instead, which serves the same Services.
func choose(ctx context.Context, modes []backend.Mode, want string, families []intent.Family, log *slog.Logger) (backend.Mode, error) {
	named := func(name string) backend.Mode {
		if i := slices.IndexFunc(modes, func(m backend.Mode) bool { return m.Name() == name }); i >= 0 {
			return modes[i]
		}
		return nil
	}
	if want == "auto" || want == "" {
		return firstOf(ctx, autoOrder, named, families, log)
	}
	m := named(want)
	if m == nil {
		return nil, fmt.Errorf("proxy mode %q is not one of auto, %s", want, strings.Join(names(modes), ", "))
	}
	err := m.Probe(ctx, families)
	if err != nil && want == "ipvs" && named("iptables") != nil {
		log.Warn("this machine can't do IPVS; using the iptables mode instead", "why", err)
		return firstOf(ctx, []string{"iptables"}, named, families, log)
	}
	if err != nil {
		return nil, fmt.Errorf("the proxy mode %s can't run here: %w", want, err)
	}
	return m, nil
}

func firstOf(ctx context.Context, order []string, named func(string) backend.Mode, families []intent.Family, log *slog.Logger) (backend.Mode, error) {
	var whys []string
	for _, name := range order {
		m := named(name)
		if m == nil {
			continue
		}
		err := m.Probe(ctx, families)
		if err == nil {
			return m, nil
		}
		log.Info("a proxy mode can't run here", "mode", name, "why", err)
		whys = append(whys, name+": "+err.Error())
	}
	return nil, fmt.Errorf("no proxy mode can run here: %s", strings.Join(whys, "; "))
}

func names(modes []backend.Mode) (out []string) {
	for _, m := range modes {
		out = append(out, m.Name())
	}
	return out
}

// Cleanup removes everything of every mode. It goes on after an error, and returns the first.
func Cleanup(ctx context.Context, modes []backend.Mode) (first error) {
	for _, m := range modes {
		if err := m.Cleanup(ctx); err != nil && first == nil {
			first = fmt.Errorf("clean up the mode %s: %w", m.Name(), err)
		}
	}
	return first
}
