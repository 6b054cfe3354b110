package proxy

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"portal/internal/proxy/backend"
)

// choose finds the mode to run: the one that was asked for, or else its fallback; or, for auto, the first in the list that
// this machine can run. Of those, one that can serve node ports where they are asked for comes first.
func choose(ctx context.Context, o *Options) (backend.Mode, error) {
	if o.Mode == "auto" || o.Mode == "" {
		var automatic, unfit []backend.Mode
		for _, m := range o.Modes {
			switch t := m.Traits(); {
			case !t.Automatic:
			case len(o.Config.NodePorts.Unserved(t.Traits, o.Config.Families)) > 0:
				unfit = append(unfit, m)
			default:
				automatic = append(automatic, m)
			}
		}
		return firstOf(ctx, append(automatic, unfit...), o)
	}
	m := named(o.Modes, o.Mode)
	if m == nil {
		return nil, fmt.Errorf("proxy mode %q is not one of auto, %s", o.Mode, strings.Join(names(o.Modes), ", "))
	}
	err := m.Probe(ctx, o.Config.Families)
	if err == nil {
		return m, nil
	}
	if other := named(o.Modes, m.Traits().Fallback); other != nil {
		o.Log.Warn("proxy mode can't run here, falling back", "mode", o.Mode, "to", other.Name(), "err", err)
		return firstOf(ctx, []backend.Mode{other}, o)
	}
	return nil, fmt.Errorf("the proxy mode %s can't run here: %w", o.Mode, err)
}

func named(modes []backend.Mode, name string) backend.Mode {
	if i := slices.IndexFunc(modes, func(m backend.Mode) bool { return m.Name() == name }); i >= 0 {
		return modes[i]
	}
	return nil
}

func firstOf(ctx context.Context, order []backend.Mode, o *Options) (backend.Mode, error) {
	var whys []string
	for _, m := range order {
		err := m.Probe(ctx, o.Config.Families)
		if err == nil {
			return m, nil
		}
		o.Log.Info("proxy mode can't run here", "mode", m.Name(), "err", err)
		whys = append(whys, m.Name()+": "+err.Error())
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
