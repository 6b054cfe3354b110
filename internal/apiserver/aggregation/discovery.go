package aggregation

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"

	apidiscoveryv2 "k8s.io/api/apidiscovery/v2"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/version"
	"k8s.io/apiserver/pkg/endpoints"
	"k8s.io/apiserver/pkg/endpoints/discovery"
)

// view is what requests are decided by. It is replaced as a whole.
type view struct {
	remotes map[schema.GroupVersion]*remote
	// groups answer for /apis/GROUP, if one of its versions is remote.
	groups map[string]http.Handler
	// root answers for /apis in its older form.
	root http.Handler
}

// below is what answers for a path below /apis, or nil if the server itself does.
func (v *view) below(rest string, reads bool) http.Handler {
	if len(v.remotes) == 0 || !strings.HasPrefix(rest, "/") {
		return nil
	}
	parts := strings.SplitN(rest[1:], "/", 3)
	if len(parts) == 1 || len(parts) == 2 && parts[1] == "" {
		if h := v.groups[parts[0]]; h != nil && reads {
			return h
		}
		return nil
	}
	if r := v.remotes[schema.GroupVersion{Group: parts[0], Version: parts[1]}]; r != nil {
		return remoteHandler{remote: r}
	}
	return nil
}

// ranked is a group version with its priorities.
type ranked struct {
	schema.GroupVersion
	priority
	remote bool
}

// Rebuild makes the lists of groups anew: custom resources came or went.
func (a *Aggregator) Rebuild() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.rebuildLocked()
}

// rebuildLocked makes the view from what the server and others serve. The caller holds mu.
func (a *Aggregator) rebuildLocked() {
	next := &view{remotes: map[schema.GroupVersion]*remote{}, groups: map[string]http.Handler{}}
	var all []ranked
	for _, r := range a.remotes {
		next.remotes[r.version] = r
		all = append(all, ranked{r.version, priority{r.spec.GroupPriorityMinimum, r.spec.VersionPriority}, true})
	}
	for _, v := range a.own.BuiltIn {
		group, within := priorities(v)
		all = append(all, ranked{v, priority{group, within}, false})
	}
	versions, _ := a.own.Custom()
	for _, v := range versions {
		if next.remotes[v] == nil {
			all = append(all, ranked{v, custom, false})
		}
	}
	root := discovery.NewRootAPIsHandler(a.own.Addresses, a.Serializer)
	for _, group := range groupsOf(all) {
		root.AddGroup(group)
		if slices.ContainsFunc(all, func(v ranked) bool { return v.remote && v.Group == group.Name }) {
			next.groups[group.Name] = discovery.NewAPIGroupHandler(a.Serializer, group)
		}
	}
	next.root = root
	a.view.Store(next)
}

// groupsOf are the groups as /apis lists them, best first. The core API is not among them.
func groupsOf(all []ranked) []metav1.APIGroup {
	byName := map[string][]ranked{}
	for _, v := range all {
		if v.Group != "" {
			byName[v.Group] = append(byName[v.Group], v)
		}
	}
	highest := func(versions []ranked) int32 {
		return slices.MaxFunc(versions, func(a, b ranked) int { return cmp.Compare(a.priority.group, b.priority.group) }).priority.group
	}
	var out []metav1.APIGroup
	for name, versions := range byName {
		slices.SortFunc(versions, func(a, b ranked) int {
			return cmp.Or(cmp.Compare(b.priority.version, a.priority.version), version.CompareKubeAwareVersionStrings(b.Version, a.Version))
		})
		group := metav1.APIGroup{Name: name}
		for _, v := range versions {
			group.Versions = append(group.Versions, metav1.GroupVersionForDiscovery{GroupVersion: v.String(), Version: v.Version})
		}
		group.PreferredVersion = group.Versions[0]
		out = append(out, group)
	}
	slices.SortFunc(out, func(a, b metav1.APIGroup) int {
		return cmp.Or(cmp.Compare(highest(byName[b.Name]), highest(byName[a.Name])), cmp.Compare(a.Name, b.Name))
	})
	return out
}

// publish puts what the other server serves into the aggregated list of groups. Without it the group version is listed with what was known
// before, as stale.
func (r *remote) publish(resources []apidiscoveryv2.APIResourceDiscovery) {
	entry := apidiscoveryv2.APIVersionDiscovery{
		Version: r.version.Version, Resources: resources, Freshness: apidiscoveryv2.DiscoveryFreshnessCurrent,
	}
	if resources == nil {
		entry.Resources, entry.Freshness = r.learned.resources, apidiscoveryv2.DiscoveryFreshnessStale
	}
	r.in.discovery().AddGroupVersion(r.version.Group, entry)
}

const (
	acceptAggregated = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList," +
		"application/json;g=apidiscovery.k8s.io;v=v2beta1;as=APIGroupDiscoveryList,application/json"
	aggregatedKind = "as=APIGroupDiscoveryList"
)

// discover reads which resources the other server has in its group version. What it says about others is not its business.
func (r *remote) discover(ctx context.Context) ([]apidiscoveryv2.APIResourceDiscovery, error) {
	all, err := r.get(ctx, "/apis", acceptAggregated, "", maxDocument)
	if err == nil && strings.Contains(all.contentType, aggregatedKind) {
		var list apidiscoveryv2.APIGroupDiscoveryList
		if err := json.Unmarshal(all.body, &list); err != nil {
			return nil, fmt.Errorf("read /apis: %w", err)
		}
		for _, group := range list.Items {
			for _, v := range group.Versions {
				if group.Name == r.version.Group && v.Version == r.version.Version {
					return orEmpty(v.Resources), nil
				}
			}
		}
	}
	own, err := r.resources(ctx, maxDocument)
	if err != nil {
		return nil, err
	}
	resources, err := endpoints.ConvertGroupVersionIntoToDiscovery(own)
	return orEmpty(resources), err
}

// resources reads the older form of discovery, which every API server has.
func (r *remote) resources(ctx context.Context, limit int64) ([]metav1.APIResource, error) {
	one, err := r.get(ctx, r.path(), "application/json", "", limit)
	if err != nil {
		return nil, err
	}
	var list metav1.APIResourceList
	if err := json.Unmarshal(one.body, &list); err != nil {
		return nil, fmt.Errorf("GET %s: the answer is no list of resources: %w", r.path(), err)
	}
	if list.GroupVersion != r.version.String() {
		return nil, fmt.Errorf("GET %s: the answer is about the group version %q", r.path(), list.GroupVersion)
	}
	return list.APIResources, nil
}

func orEmpty(resources []apidiscoveryv2.APIResourceDiscovery) []apidiscoveryv2.APIResourceDiscovery {
	if resources == nil {
		return []apidiscoveryv2.APIResourceDiscovery{}
	}
	return resources
}
