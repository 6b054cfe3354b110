package gather

import (
	"context"
	"encoding/json"
	"strconv"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"portal/internal/reports"
)

// reports reads what the parts of nodes say about themselves in the API. An API without any has none: it is not Portal's, or nobody may install
// their definition.
func (g *gatherer) reports(ctx context.Context) {
	api := g.client.CoreV1().RESTClient()
	next := ""
	for ctx.Err() == nil {
		request := api.Get().AbsPath(reports.APIPath).SetHeader("Accept", "application/json").Param("limit", strconv.Itoa(pageSize))
		if next == "" {
			request = request.Param("resourceVersion", "0") // from the server's cache: they are minutes old
		} else {
			request = request.Param("continue", next)
		}
		data, err := request.Do(ctx).Raw()
		switch {
		case apierrors.IsNotFound(err):
			return
		case apierrors.IsForbidden(err):
			// Whether there are any is known to everybody.
			if apierrors.IsNotFound(api.Get().AbsPath("/apis/" + reports.Group).Do(ctx).Error()) {
				return
			}
			fallthrough
		case err != nil:
			g.note(func() { g.out.Unseen[reports.Resource] = short(err) + ": what parts of nodes report is not known" })
			return
		}
		var page reports.List
		if err := json.Unmarshal(data, &page); err != nil {
			g.note(func() { g.out.Unseen[reports.Resource] = err.Error() })
			return
		}
		g.note(func() { g.out.Parts = append(g.out.Parts, page.Items...) })
		if next = page.Continue; next == "" {
			return
		}
	}
}

// fewNodes is how many nodes are all asked for details, which are much: what each of them does for all Services. Of more, only those
// are asked whose reports don't say that all is well.
const fewNodes = 50

// asked are the nodes to ask for details, and how many are left out.
func (g *gatherer) asked() (names []string, left int) {
	well := map[string]bool{}
	if len(g.Services) == 0 && len(g.out.Nodes) > fewNodes {
		for i := range g.out.Parts {
			if r := &g.out.Parts[i]; r.Part == reports.Proxy {
				well[r.Node] = r.Status.State == reports.Running && r.Age(g.out.Now) < reports.Stale
			}
		}
	}
	for i := range g.out.Nodes {
		if name := g.out.Nodes[i].Name; well[name] {
			left++
		} else {
			names = append(names, name)
		}
	}
	return names, left
}
